"""The benchmark of speed keeps what it measured when it is stopped, and mixes no two runs."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import ddtree
from ddtree.models.target import Target
from tests.support.models import dflash_drafter, tiny_model
from tests.support.tokenizers import tiny_tokenizer

FILE = Path(__file__).parents[2] / "benchmarks" / "speed.py"
Measure = Callable[..., None]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The module, for a tiny pair and two suites of two prompts."""
    spec = importlib.util.spec_from_file_location("speed", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "speed", module)
    spec.loader.exec_module(module)
    target = Target(tiny_model("llama"), tiny_tokenizer(), name="tiny")
    pair = ddtree.Pair(target, dflash_drafter(target))
    monkeypatch.setenv("DDTREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(ddtree, "load", lambda name, **options: pair)
    monkeypatch.setattr(module, "load_target", lambda name, packed: target)
    monkeypatch.setattr(module, "SUITES", ("fox", "dog"))
    monkeypatch.setattr(module, "PROMPTS", tmp_path)
    for suite in module.SUITES:
        lines = [{"id": f"{suite}/{i}", "turns": [f"the {suite}"]} for i in range(2)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"{suite}.jsonl").write_text(text)
    return module


@pytest.fixture
def measure(benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measure:
    """Runs it into one folder."""

    def call(*options: str) -> None:
        arguments = ["--max-new-tokens", "6", *options, "--out", str(tmp_path / "out")]
        monkeypatch.setattr("sys.argv", ["benchmarks/speed.py", *arguments])
        benchmark.main()

    return call


def kept(out: Path) -> list[str]:
    return [row["id"] for row in json.loads(out.read_text())["rows"]]


def stop_before(
    prompt_id: str, benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Stop a run there; the prompts that are run from now on."""
    run_prompt, seen = benchmark.run_prompt, []

    def stopped(pair: object, suite: str, prompt: dict[str, str], *rest: object) -> object:
        if prompt["id"] == prompt_id:
            raise KeyboardInterrupt
        seen.append(prompt["id"])
        return run_prompt(pair, suite, prompt, *rest)

    monkeypatch.setattr(benchmark, "run_prompt", stopped)
    return seen


def test_a_run_that_is_stopped_goes_on_and_a_finished_one_starts_anew(
    benchmark: ModuleType, measure: Measure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = ["fox/0", "fox/1", "dog/0", "dog/1"]
    unfinished = tmp_path / "out" / "speed.unfinished.json"
    with monkeypatch.context() as first:
        stop_before("dog/0", benchmark, first)
        with pytest.raises(KeyboardInterrupt):
            measure()
    assert kept(unfinished) == every[:2]
    assert [path.name for path in unfinished.parent.iterdir()] == [unfinished.name]
    seen = stop_before("none", benchmark, monkeypatch)
    measure()
    assert seen == every[2:]
    assert kept(tmp_path / "out" / "speed.json") == every
    assert "on 4 of 4 prompts" in (tmp_path / "out" / "speed.md").read_text()
    assert not unfinished.exists()
    measure()
    assert seen == [*every[2:], *every]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (("--limit", "2"), "prompts"),
        (("--max-new-tokens", "5"), "decoding"),
        (("--seed", "1"), "seed"),
    ],
)
def test_another_run_is_refused_by_what_changed(
    changes: tuple[str, ...],
    named: str,
    benchmark: ModuleType,
    measure: Measure,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop_before("fox/1", benchmark, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        measure()
    with pytest.raises(SystemExit, match=f"other values of {named}\\. Delete the file"):
        measure(*changes)


def test_machine_and_commit_are_a_part_of_the_run(
    benchmark: ModuleType, measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_before("fox/1", benchmark, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        measure()
    other = {**benchmark.origin(), "commit": "0", "machine": "another"}
    monkeypatch.setattr(benchmark, "origin", lambda: other)
    with pytest.raises(SystemExit, match="other values of commit, machine"):
        measure()
