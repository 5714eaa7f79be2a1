"""What is seen of a round: states and probabilities, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from ddtree.types import DraftTree, Round
from ddtree.viewer.scenes import scenes_of
from tests.support.rounds import (
    ROOT,
    A,
    B,
    D,
    plain_round,
    prefill_round,
    worked_round,
    worked_tree,
)


def test_the_worked_example_shows_what_was_accepted_and_the_bonus_token_behind_it() -> None:
    (scene,) = scenes_of([worked_round()])
    states = [node.state for node in scene.nodes]
    assert states == [
        "root",
        "accepted",
        "rejected",
        "accepted",
        "rejected",
        "rejected",
        "rejected",
        "bonus",
    ]
    bonus = scene.nodes[-1]
    assert (bonus.token_id, bonus.parent, bonus.depth) == (D, 3, 3)
    assert (bonus.rank, bonus.probability, bonus.path_probability) == (None, None, None)
    assert (scene.num_drafted, scene.num_accepted) == (6, 2)
    assert scene.expected_tokens == pytest.approx(2.875)


def test_a_node_has_its_own_probability_and_that_of_its_path() -> None:
    (scene,) = scenes_of([worked_round()])
    drafted = scene.nodes[1:-1]
    own = [0.60, 0.38, 0.50, 0.40, 0.50, 0.55]
    paths = [0.60, 0.38, 0.30, 0.24, 0.19, 0.165]
    assert [node.probability for node in drafted] == pytest.approx(own, rel=1e-5)
    assert [node.path_probability for node in drafted] == pytest.approx(paths, rel=1e-5)
    assert [node.rank for node in drafted] == [0, 1, 0, 1, 0, 0]


def test_children_come_by_rank_and_the_bonus_token_last() -> None:
    (scene,) = scenes_of([worked_round()])
    assert scene.children() == [[1, 2], [3, 4], [5], [6, 7], [], [], [], []]


def test_a_bonus_token_that_was_drafted_is_that_node() -> None:
    # The text may end inside the accepted path: B is delivered last, and the tree has it.
    ended = Round(tree=worked_tree(), path=(1,), token_ids=(A, B), finish_reason="length")
    (scene,) = scenes_of([ended])
    assert len(scene.nodes) == 7
    assert scene.nodes[3].state == "bonus"
    assert scene.nodes[3].path_probability == pytest.approx(0.30)


def test_the_prefill_has_one_node_and_a_round_without_a_draft_two() -> None:
    first, second = scenes_of([prefill_round(ROOT), plain_round(ROOT, A)])
    assert [node.state for node in first.nodes] == ["bonus"]
    assert [node.state for node in second.nodes] == ["root", "bonus"]
    assert (second.num_drafted, second.expected_tokens) == (0, 1.0)
    assert [first.number, second.number] == [0, 1]


def test_rounding_of_scores_gives_no_child_a_probability_above_1() -> None:
    tree = DraftTree(
        np.array([ROOT, A, B], np.int64),
        np.array([-1, 0, 1], np.int32),
        np.array([0, 1, 2], np.int32),
        np.array([-1, 0, 0], np.int32),
        np.array([0.0, -0.3, np.nextafter(np.float32(-0.3), np.float32(0))], np.float32),
    )
    (scene,) = scenes_of([Round(tree=tree, path=(), token_ids=(D,), finish_reason=None)])
    assert scene.nodes[2].probability == 1.0
