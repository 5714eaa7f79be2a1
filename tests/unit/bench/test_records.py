"""Records of a benchmark: what is written is what was done, and reads back as it was."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from ddtree.bench.records import (
    NUM_BINS,
    Arm,
    PromptRecord,
    Run,
    count_nodes,
    read_run,
    record_generation,
)
from ddtree.errors import CheckpointError
from ddtree.types import DraftTree, Generation, Round, StageSeconds, StageSpan

# b -> A (p 0.6), B (0.25); A -> C (0.1 along the path)
TREE = DraftTree(
    np.array([9, 1, 2, 3], np.int64),
    np.array([-1, 0, 0, 1], np.int32),
    np.array([0, 1, 1, 2], np.int32),
    np.array([-1, 0, 1, 4], np.int32),
    np.log(np.array([1.0, 0.6, 0.25, 0.1], np.float32)),
)


def generation() -> Generation:
    """A prefill, a round with a tree of which two nodes are accepted, and one without a draft."""
    return Generation(
        text=None,
        token_ids=(9, 1, 3, 5, 6),
        finish_reason="length",
        method="ddtree",
        rounds=(
            Round(tree=None, path=(), token_ids=(9,), finish_reason=None),
            Round(tree=TREE, path=(1, 3), token_ids=(1, 3, 5), finish_reason=None),
            Round(tree=DraftTree.root_only(5), path=(), token_ids=(6,), finish_reason="length"),
        ),
        spans=(
            StageSpan("prefill", 0.0, 1.0, 0),
            StageSpan("walk", 1.0, 0.25, 0),
            StageSpan("draft", 2.0, 0.5, 1),
            StageSpan("verify", 3.0, 2.0, 1),
            StageSpan("verify", 6.0, 3.0, 2),
        ),
        elapsed_s=10.0,
    )


def record() -> PromptRecord:
    arm = record_generation("ddtree-3", generation(), 20)
    return PromptRecord(
        suite="s",
        id="s/1",
        index=0,
        turn=0,
        temperature=0.0,
        num_prompt_tokens=20,
        order=("ddtree-3",),
        arms=(arm,),
    )


def test_a_generation_is_written_down_round_by_round() -> None:
    arm = record_generation("ddtree-3", generation(), 20)
    first, second = arm.rounds
    assert (first.context, first.nodes, first.tokens, first.ranks) == (20, 3, 3, (0, 4))
    assert first.promised == pytest.approx(1.95)
    assert first.seconds == StageSeconds(draft=0.5, verify=2.0)
    assert (second.context, second.nodes, second.promised, second.ranks) == (23, 0, 1.0, ())
    assert second.seconds == StageSeconds(verify=3.0)
    assert arm.prefill_s == 1.25
    assert (arm.round_tokens, arm.tau, arm.tokens_per_s) == (4, 2.0, 0.5)


def test_nodes_are_counted_by_the_probability_of_their_path() -> None:
    counts = count_nodes(TREE, (1, 3))
    assert counts.shape == (NUM_BINS, 3)
    assert counts.sum(axis=0).tolist() == pytest.approx([3, 0.95, 2])
    # Bins are [.., -2), [-2, -1), [-1, 0), [0, 1), .. in log-odds: 0.4, -1.1 and -2.2 here.
    assert counts[10].tolist() == pytest.approx([1, 0.6, 1])
    assert counts[8].tolist() == pytest.approx([1, 0.25, 0])
    assert counts[7].tolist() == pytest.approx([1, 0.1, 1])


def test_a_run_reads_back_as_it_was(tmp_path: Path) -> None:
    run = Run(
        card={"command": "x"},
        arms=(Arm(name="ddtree-3", method="ddtree", budget=3),),
        prompts=(record(),),
    )
    (tmp_path / "results.json").write_text(run.as_json())
    assert read_run(tmp_path) == run
    assert PromptRecord.parse(json.dumps(asdict(record()))) == record()


@pytest.mark.parametrize(
    "content", [None, "", "{}", '{"format": "ddtree-bench", "version": 99}', '{"format": "x"}']
)
def test_what_is_no_run_is_refused_with_the_remedy(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    with pytest.raises(CheckpointError, match="ddtree bench"):
        read_run(tmp_path)


def test_the_arms_that_differ_from_the_first_are_named() -> None:
    first = record().arms[0]
    other = record_generation("other", generation(), 20)
    same = PromptRecord(**{**vars(record()), "arms": (first, other)})
    assert same.disagreeing == ()
    changed = type(other)(**{**vars(other), "token_ids": (1,)})
    assert PromptRecord(**{**vars(record()), "arms": (first, changed)}).disagreeing == ("other",)
