"""The profile is what Chrome's trace event format asks for: by a golden written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ddtree.config import DecodeConfig
from ddtree.errors import CacheWriteError
from ddtree.pair import Pair
from ddtree.tracing.chrome_trace import profile_json, write_profile
from ddtree.tracing.recording import Recording
from ddtree.tree.reference import build_tree
from ddtree.types import Generation, Marginals, Round, StageSpan
from tests.support.disk import fill_disk
from tests.support.models import dflash_drafter, tiny_target


def by_hand() -> Generation:
    """A prefill and one round of two nodes, both of which are accepted."""
    q = Marginals(torch.tensor([[-0.1], [-0.2]]), torch.tensor([[7], [8]]))
    tree = build_tree(q, 5, 2)
    spans = [
        ("prefill", 0.0, 0.25, 0),
        ("walk", 0.25, 0.0005, 0),
        ("draft", 0.251, 0.01, 1),
        ("build", 0.261, 0.000002, 1),
        ("verify", 0.262, 0.1, 1),
        ("walk", 0.362, 0.001, 1),
        ("commit", 0.363, 0.0000004, 1),
    ]
    return Generation(
        text="abcd",
        token_ids=(5, 7, 8, 9),
        finish_reason="stop",
        method="ddtree",
        rounds=(
            Round(tree=None, path=(), token_ids=(5,), finish_reason=None),
            Round(tree=tree, path=(1, 2), token_ids=(7, 8, 9), finish_reason="stop"),
        ),
        spans=tuple(StageSpan(*span) for span in spans),
        elapsed_s=0.37,
    )


PREFILL = {"context_tokens": 0, "round": 0, "nodes": 0, "tokens": 1}
ROUND = {"context_tokens": 11, "round": 1, "nodes": 2, "tokens": 3}


def complete(
    track: int, name: str, ts: float, dur: float, args: dict[str, int]
) -> dict[str, object]:
    category = {1: "round", 2: "stage"}[track]
    head = {"ph": "X", "name": name, "cat": category, "ts": ts, "dur": dur}
    return {**head, "pid": 1, "tid": track, "args": args}


GOLDEN = [
    {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "ddtree generate, ddtree"}},
    {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "rounds"}},
    {"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": 1, "args": {"sort_index": 1}},
    {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "stages"}},
    {"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": 2, "args": {"sort_index": 2}},
    complete(1, "prefill: 1 token", 0.0, 250500.0, PREFILL),
    complete(2, "prefill", 0.0, 250000.0, PREFILL),
    complete(2, "walk", 250000.0, 500.0, PREFILL),
    complete(1, "round 1: 2 nodes, 3 tokens", 251000.0, 112000.4, ROUND),
    complete(2, "draft", 251000.0, 10000.0, ROUND),
    complete(2, "build", 261000.0, 2.0, ROUND),
    complete(2, "verify", 262000.0, 100000.0, ROUND),
    complete(2, "walk", 362000.0, 1000.0, ROUND),
    complete(2, "commit", 363000.0, 0.4, ROUND),
]


def test_a_generation_becomes_the_events_of_the_golden() -> None:
    found = profile_json(by_hand(), 11)
    assert found["traceEvents"] == GOLDEN
    assert found["displayTimeUnit"] == "ms"
    assert found["otherData"] == {
        "method": "ddtree",
        "num_tokens": 4,
        "num_rounds": 1,
        "finish_reason": "stop",
        "elapsed_s": 0.37,
    }


def recorded_profile() -> tuple[dict[str, object], Generation, int]:
    target = tiny_target("llama")
    pair, config = Pair(target, dflash_drafter(target)), DecodeConfig(budget=8, max_new_tokens=12)
    recording = Recording(pair, config, proposals=False)
    *_, generation = pair.run([5, 17, 42, 8], config, observe=recording.observe)
    num_prompt = len(recording.prompt_ids)
    return profile_json(generation, num_prompt), generation, num_prompt


def test_stages_lie_inside_their_round_and_nothing_overlaps_on_a_track() -> None:
    found, generation, _ = recorded_profile()
    events = [e for e in found["traceEvents"] if e["ph"] == "X"]
    assert len(events) == len(generation.spans) + len(generation.rounds)
    for track in (1, 2):
        line = [e for e in events if e["tid"] == track]
        ends = [round(e["ts"] + e["dur"], 3) for e in line]
        assert all(end <= e["ts"] for end, e in zip(ends, line[1:], strict=False))
    rounds = {e["args"]["round"]: e for e in events if e["tid"] == 1}
    for stage in (e for e in events if e["tid"] == 2):
        around = rounds[stage["args"]["round"]]
        assert around["ts"] <= stage["ts"]
        assert stage["ts"] + stage["dur"] <= around["ts"] + around["dur"] + 0.001


def test_the_context_of_a_round_is_what_its_tree_was_verified_behind() -> None:
    found, generation, num_prompt = recorded_profile()
    told = [e["args"] for e in found["traceEvents"] if e["ph"] == "X" and e["tid"] == 1]
    assert num_prompt == 4
    tokens = [done.num_tokens for done in generation.rounds]
    assert [args["tokens"] for args in told] == tokens
    contexts = [args["context_tokens"] for args in told]
    assert contexts == [0] + [4 + sum(tokens[1:i]) for i in range(1, len(tokens))]


def test_the_file_is_one_json_object_and_replaces_an_older_one(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text("old")
    write_profile(path, by_hand(), 11)
    assert json.loads(path.read_text()) == profile_json(by_hand(), 11)
    assert [p.name for p in tmp_path.iterdir()] == ["profile.json"]


def test_a_full_disk_is_named_and_leaves_the_old_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "profile.json"
    path.write_text("old")
    fill_disk(monkeypatch, "profile.json.partial")
    with pytest.raises(CacheWriteError, match=r"profile\.json: .* No space left"):
        write_profile(path, by_hand(), 11)
    assert path.read_text() == "old"
