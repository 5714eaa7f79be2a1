"""`ddtree bench` on the command line: what it runs, what it leaves, and how it refuses."""

from __future__ import annotations

import dataclasses
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from transformers.utils import logging as transformers_logging

from ddtree.bench import runner
from ddtree.bench.records import ArmRecord, read_run
from ddtree.cli import app as cli
from ddtree.tracing.replay import first_difference, replay
from ddtree.tracing.trace_file import read_trace
from ddtree.tree.host import build_tree
from tests.support.checkpoints import write_drafter, write_target

pytestmark = pytest.mark.usefixtures("unchecked")

Run = Callable[..., SimpleNamespace]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs `ddtree bench` in this process; `err` has its line breaks taken out."""

    def call(*arguments: object) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["ddtree", "bench", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        err = " ".join(captured.err.split())
        return SimpleNamespace(code=ended.value.code or 0, out=captured.out, err=err)

    verbosity = transformers_logging.get_verbosity()
    yield call
    transformers_logging.set_verbosity(verbosity)
    transformers_logging.enable_progress_bar()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """A target and a drafter that fit together, as options."""
    root = tmp_path_factory.mktemp("checkpoints")
    target, drafter = write_target(root / "target"), write_drafter(root / "drafter")
    return ("--target", str(target), "--drafter", str(drafter), "--max-new-tokens", "4")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "hello"}\n{"turns": ["why", "and"]}\n')
    return file


@pytest.fixture
def rebuilt(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders whose report was made, which is another matter and takes its time."""
    folders: list[Path] = []

    def rebuild(folder: Path, console: Console) -> None:
        assert read_run(folder).prompts
        assert console.stderr
        folders.append(folder)

    monkeypatch.setattr("ddtree.bench.run_report.rebuild", rebuild)
    return folders


def test_a_run_measures_every_arm_reports_and_goes_on(
    run: Run, models: tuple[str, ...], prompts: Path, rebuilt: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = (
        *("--suite", f"mine={prompts}", "--out", out, "--temperature", "0,0.5"),
        *("--methods", "ddtree,dflash,hf-generate", "--budgets", "2,auto", *models),
    )
    done = run(*arguments, "--limit", "1", "--seed", "3")
    assert (done.code, done.out) == (0, "")
    assert "differ" not in done.err
    assert rebuilt == [out]
    found = read_run(out)
    names = ("ar", "ddtree-2", "ddtree-auto", "dflash", "hf-generate")
    assert tuple(arm.name for arm in found.arms) == names
    assert found.card["seed"] == 3
    done = run(*arguments, "--seed", "3")
    assert "9 of 27 texts are there already." in done.err
    assert (done.code, len(read_run(out).prompts)) == (0, 6)
    done = run(*arguments)
    assert (done.code, done.out) == (2, "")
    assert "other values of seed" in done.err


def test_a_traced_run_can_be_replayed_and_is_gone_on_with(
    run: Run, models: tuple[str, ...], prompts: Path, rebuilt: list[Path], tmp_path: Path
) -> None:
    file = tmp_path / "t.jsonl"
    arguments = (
        *("--suite", f"mine={prompts}", "--out", tmp_path / "out", "--trace", file),
        *("--methods", "ar,dflash,ddtree", "--budgets", "3", *models),
    )
    assert run(*arguments, "--limit", "1").code == 0
    assert run(*arguments).code == 0
    trace = read_trace(file)
    turns = [*["mine/mine/1/0/0"] * 3, *["mine/mine/2/0/0"] * 3, *["mine/mine/2/1/0"] * 3]
    arms = ["ar", "ddtree-3", "dflash"] * 3
    assert sorted(g.id for g in trace.generations) == [
        f"{turn}/{arm}" for turn, arm in zip(turns, arms, strict=True)
    ]
    for traced in trace.generations:
        # One drafted arm was asked along the text, for all of them.
        assert bool(traced.along) == traced.id.endswith("dflash")
        if traced.id.endswith("ddtree-3"):
            again = replay(traced, build_tree, 3).rounds
            assert first_difference(again, [r.round for r in traced.rounds]) is None


@pytest.mark.parametrize(("dtype", "code"), [("float32", 1), ("bfloat16", 0)])
def test_disagreement_fails_the_run_where_it_cannot_be_rounding(
    dtype: str,
    code: int,
    run: Run,
    models: tuple[str, ...],
    prompts: Path,
    rebuilt: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = runner._run_arm

    def cut(whole: runner.Bench, arm: object, *rest: object) -> ArmRecord:
        record = original(whole, arm, *rest)  # type: ignore[arg-type]
        ours = (0, 0) if record.arm == "dflash" else (1, 1)
        return dataclasses.replace(record, token_ids=ours)

    monkeypatch.setattr(runner, "_run_arm", cut)
    options = ("--suite", f"mine={prompts}", "--limit", "1", "--methods", "ar,dflash")
    done = run(*options, "--out", tmp_path / "out", "--dtype", dtype, *models)
    assert done.code == code
    assert ("FAILED" in done.err) == (code == 1)
    assert "differ from ar on 1 of 1 turns: dflash 1." in done.err
    assert rebuilt == [tmp_path / "out"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ((), "--out: expected a folder for the results, got none"),
        (("--out", "x", "--suite", "gsm8"), "suite: expected one of gsm8k, math500"),
        (("--out", "x", "--suite", "a=nowhere.jsonl"), "nowhere.jsonl: expected a readable file"),
        (("--out", "x", "--source", "net"), "source: expected one of packaged, hub"),
        (("--out", "x", "--methods", "medusa"), "methods: expected some of ar, dflash"),
        (("--out", "x", "--budgets", "8;16"), "budgets: expected whole numbers from 1 to 4096"),
        (("--out", "x", "--temperature", "0;1"), "temperature: expected numbers with commas"),
        (("--out", "x", "--temperature", "1,nan"), "temperature: expected a finite number"),
        (("--out", "x", "--limit", "0"), "limit: expected a whole number >= 1"),
        (("--out", "x", "--max-new-tokens", "1"), "max_new_tokens: expected a whole number >= 2"),
        (("--out", "x", "--assistant", "small"), "assistant: expected a model with method"),
        (("--out", "x", "--methods", "assistant"), "assistant: expected a model with method"),
    ],
)
def test_a_mistake_is_named_before_a_model_is_loaded(
    options: tuple[str, ...], named: str, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ddtree.cli.bench.load_pair", lambda *_, **__: pytest.fail("loaded"))
    done = run(*options)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ")
    assert named in done.err
    assert not (tmp_path / "x").exists()


def test_a_report_that_could_not_be_drawn_is_no_surprise_at_the_end(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddtree.cli.bench.load_pair", lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setattr("ddtree.bench.plots.find_spec", lambda name: None)
    done = run("--out", "x")
    assert done.code == 2
    assert 'pip install "ddtree[bench]"' in done.err


def test_an_assistant_is_an_arm(
    run: Run, models: tuple[str, ...], prompts: Path, rebuilt: list[Path], tmp_path: Path
) -> None:
    options = ("--suite", f"mine={prompts}", "--limit", "1", "--methods", "assistant")
    done = run(*options, "--assistant", models[1], "--out", tmp_path / "out", *models)
    assert done.code == 0
    found = read_run(tmp_path / "out")
    assert [arm.name for arm in found.arms] == ["ar", "assistant"]
    assert found.card["options"]["assistant"] == models[1]
    assert found.card["drafter"] is None  # none was needed


def test_without_a_suite_the_packaged_ones_are_run(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, object]] = []

    def read(wanted: object, source: object) -> None:
        asked.append((wanted, source))
        raise KeyboardInterrupt

    monkeypatch.setattr("ddtree.bench.workloads.read_suites", read)
    for options in ((), ("--source", "hub"), ("--suite", "aime24", "--suite", "a=b.jsonl")):
        assert run("--out", "x", *options).code != 0
    packaged = ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench")
    assert asked == [(packaged, None), (packaged, "hub"), (["aime24", "a=b.jsonl"], None)]


def test_a_report_is_made_anew_and_two_runs_are_compared(
    run: Run, rebuilt: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[Path, Path]] = []
    module = SimpleNamespace(
        rebuild=lambda folder, console: rebuilt.append(folder),
        compare_runs=lambda a, b, console: compared.append((a, b)),
    )
    for name in ("run_report", "run_compare"):
        monkeypatch.setitem(sys.modules, f"ddtree.bench.{name}", module)  # type: ignore[arg-type]
    assert run("report", tmp_path).code == 0
    assert rebuilt == [tmp_path]
    assert run("compare", tmp_path / "a", tmp_path / "b").code == 0
    assert compared == [(tmp_path / "a", tmp_path / "b")]
