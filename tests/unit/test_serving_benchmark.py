"""The benchmark of serving: its loop counts what came, and its page says what was measured."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ddtree.errors import BackendError

FOLDER = Path(__file__).parents[2] / "benchmarks"
MODULES = ("serving", "serving_engine", "serving_report", "serving_attention", "speed", "builders")


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The benchmark's modules by name, gone again afterwards."""
    monkeypatch.syspath_prepend(FOLDER)
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in MODULES:
        sys.modules.pop(name, None)


@dataclass
class CountingEngine:
    """Says 0, 1, 2, ...: one token in a request's first step, then `per_step`, up to its number."""

    num_tokens: int
    per_step: int
    there: dict[str, list[int]] = field(default_factory=dict)
    most: int = 0
    aborted: list[str] = field(default_factory=list)

    def add_request(self, request_id: str, prompt: dict[str, Any], params: object) -> None:
        assert prompt["prompt_token_ids"]
        self.there[request_id] = []

    def step(self) -> list[SimpleNamespace]:
        self.most = max(self.most, len(self.there))
        outputs = []
        for request_id, said in list(self.there.items()):
            num_new = min(self.per_step if said else 1, self.num_tokens - len(said))
            said.extend(range(len(said), len(said) + num_new))
            done = len(said) == self.num_tokens
            completion = SimpleNamespace(token_ids=said)
            outputs.append(
                SimpleNamespace(request_id=request_id, outputs=[completion], finished=done)
            )
            if done:
                del self.there[request_id]
        return outputs

    def abort_request(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            del self.there[request_id]


@pytest.mark.parametrize("concurrency", [1, 2, 5])
def test_as_many_requests_as_asked_for_are_there_until_none_are_left(
    concurrency: int, imported: Any
) -> None:
    engine = CountingEngine(num_tokens=7, per_step=3)
    served = imported("serving_engine").serve(engine, [[1]] * 5, concurrency, None)
    assert engine.most == concurrency
    assert served.token_ids == [list(range(7))] * 5
    assert all(seconds > 0 for seconds in served.request_s)
    assert (served.num_rounds, served.round_tokens) == (5 * 2, 5 * 6)
    assert served.num_steps == 3 * -(-5 // concurrency)
    assert served.decode_tokens == 5 * 6
    assert 0 < served.in_flight <= concurrency


def test_timed_steps_leave_the_engine_with_nothing_to_do(imported: Any) -> None:
    engine = CountingEngine(num_tokens=100, per_step=2)
    assert len(imported("serving_engine").step_seconds(engine, [1, 2], 8, None)) == 8
    assert engine.aborted == ["steps"]
    assert not engine.there


def test_every_arm_has_options_that_the_plugin_takes(imported: Any) -> None:
    arms = imported("serving").ARMS
    for name, arm in arms.items():
        given = arm.llm_arguments("drafter")
        assert ("speculative_config" in given) == (name != "none")
        assert ("worker_cls" in given) == (arm.options is not None)
    assert [n for n, arm in arms.items() if arm.is_tree] == [
        "tree-7",
        "tree-8",
        "tree-16",
        "auto",
        "auto-no-lookup",
    ]


def test_the_first_text_that_differs_is_named(imported: Any) -> None:
    texts = [
        {"arm": "chain", "batch": 1, "repeat": 0, "token_ids": [[1, 2], [4]]},
        {"arm": "none", "batch": 1, "repeat": 0, "token_ids": [[1, 2], [3]]},
        {"arm": "none", "batch": 4, "repeat": 0, "token_ids": [[1], [3]]},
    ]
    found = imported("serving").compared(texts, "none")
    assert (found["num"], found["num_equal"]) == (6, 4)
    place = {"arm": "chain", "batch": 1, "repeat": 0, "prompt": 1, "index": 0}
    assert found["first_difference"] == {**place, "expected": [3], "got": [4]}
    line = imported("serving_report").texts_line(found)
    assert line == (
        "4 of 6 texts are those of `none`. The first that is not: chain at batch 1, prompt 1, "
        "token 0, [4] instead of [3]."
    )


def run(arm: str, batch: int, repeat: int, tokens_per_s: float) -> dict[str, Any]:
    """One of two prompts with 10 tokens each."""
    seconds = 20 / tokens_per_s
    return {
        "arm": arm,
        "batch": batch,
        "repeat": repeat,
        "seconds": seconds,
        "num_tokens": [10, 10],
        "request_s": [seconds / 2, seconds / 2],
        "in_flight": float(batch),
        "num_rounds": 6,
        "round_tokens": 18,
        "decode_s": seconds / 2,
        "decode_steps": 6,
        "decode_tokens": 18,
        "num_drafts": 0 if arm == "none" else 6,
        "num_draft_tokens": 0 if arm == "none" else 42,
    }


def result(speeds: dict[tuple[str, int], list[float]]) -> dict[str, Any]:
    """Of arms by (arm, batch), with an entry per repeat."""
    runs = [run(*key, repeat, s) for key, each in speeds.items() for repeat, s in enumerate(each)]
    options = {"auto": {}, "our-chain": {"method": "dflash"}}
    arms = {arm: {"says": f"the arm {arm}", "options": options.get(arm)} for arm, _ in speeds}
    texts = {"base": "none", "num": 2, "num_equal": 2, "first_difference": None}
    return {"card": {"seed": 0}, "arms": arms, "suites": ["a", "b"], "runs": runs, "texts": texts}


def test_targets_are_held_against_the_same_repeat(imported: Any) -> None:
    speeds = {
        ("none", 1): [10.0, 10.0],
        ("chain", 1): [10.0, 20.0],
        ("auto", 1): [12.0, 24.0],
        ("our-chain", 1): [20.0, 20.0],
        ("none", 8): [10.0, 10.0],
        ("chain", 8): [5.0, 20.0],
        ("auto", 8): [10.0, 19.0],
        ("our-chain", 8): [1.0, 1.0],
    }
    page = imported("serving_report").markdown(result(speeds))
    assert "- batch 1, auto over chain: 1.20 (1.20 to 1.20), at least 1.15 asked for: met" in page
    assert (
        "- batch 8, auto over the faster of chain and none: 0.97 (0.95 to 1.00), at least 0.97 "
        "in every repeat asked for: missed"
    ) in page
    assert "our-chain over" not in page
    assert "| none | 10.0 (10.0 to 10.0) | 1.00 (1.00 to 1.00) | 0.75 (0.50 to 1.00) |" in page
    assert "| a | 10.0 (10.0 to 10.0) | 15.0 (10.0 to 20.0) |" in page
    assert "| 3.00 (3.00 to 3.00) | 7.00 (7.00 to 7.00) |" in page


def test_targets_need_what_they_compare_with(imported: Any) -> None:
    page = imported("serving_report").markdown(result({("auto", 4): [10.0]}))
    assert "- batch 1 or 8, none and chain were not all measured" in page
    assert "| auto | 10.0 (10.0 to 10.0) | - | - |" in page


def test_growth_with_the_context_is_that_of_a_repeat(imported: Any) -> None:
    steps = [
        {"arm": "tree-7", "context": c, "repeat": r, "seconds": [s, s, 9.0], "rows": 8.0}
        for c, each in ((200, (0.01, 0.02)), (4000, (0.02, 0.03)))
        for r, s in enumerate(each)
    ]
    cases = [{"context": 4000, "rows": 17, "causal": [2.0, 4.0, 9.0], "tree": [3.0]}]
    found = {"steps": steps, "attention": {"layers": 30, "cases": cases}}
    lines = imported("serving_report").context_report(found)
    assert (
        "| tree-7 | 8.0 | 15.0 (10.0 to 20.0) | 25.0 (20.0 to 30.0) | 1.75 (1.50 to 2.00) |"
    ) in lines
    assert "| 4,000 | 17 | 4.00 | 3.00 | 0.75 |" in lines


def test_without_vllm_it_says_so_and_exits_with_2(
    imported: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module: ModuleType = imported("serving")

    def missing() -> str:
        raise BackendError("vllm", expected="vllm 0.32", got="none", remedy="Install it.")

    monkeypatch.setattr(module, "check_versions", missing)
    monkeypatch.setattr(sys, "argv", ["benchmarks/serving.py"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 2
    assert "vllm: expected vllm 0.32, got none. Install it." in capsys.readouterr().err
