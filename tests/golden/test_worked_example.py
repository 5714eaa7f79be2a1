"""The worked example of DESIGN 3, written by hand: marginals, tree, mask, lookup and walk."""

import numpy as np
import pytest
import torch

from ddtree.sampling.rule import Greedy
from ddtree.stopping import TextStopping
from ddtree.tree.geometry import ancestor_mask, child_lookup, path_to
from ddtree.tree.reference import build_tree
from ddtree.types import DraftTree, Marginals
from ddtree.walk import walk

A, B, C, D = range(4)
ROOT = 9

# A .60, B .38, AB .30, AA .24, BB .19, ABC .165; the first one left out is BA with .152.
PROBS = [
    [0.60, 0.38, 0.01, 0.01],
    [0.50, 0.40, 0.06, 0.04],
    [0.55, 0.20, 0.15, 0.10],
]
TOKENS = [[A, B, C, D], [B, A, C, D], [C, D, A, B]]


@pytest.fixture
def tree() -> DraftTree:
    return build_tree(Marginals(torch.tensor(PROBS).log(), torch.tensor(TOKENS)), ROOT, budget=6)


def test_flattened_tree_is_b_A_B_B_A_B_C(tree: DraftTree) -> None:  # noqa: N802
    assert tree.token_ids.tolist() == [ROOT, A, B, B, A, B, C]


def test_positions_relative_to_the_root(tree: DraftTree) -> None:
    assert tree.depths.tolist() == [0, 1, 1, 2, 2, 2, 3]


def test_parents_and_ranks(tree: DraftTree) -> None:
    assert tree.parents.tolist() == [-1, 0, 0, 1, 1, 2, 3]
    assert tree.ranks.tolist() == [-1, 0, 1, 0, 1, 0, 0]


def test_scores_are_products_of_the_marginals(tree: DraftTree) -> None:
    expected = [1.0, 0.60, 0.38, 0.30, 0.24, 0.19, 0.165]
    np.testing.assert_allclose(np.exp(tree.log_probs), expected, rtol=1e-6)
    assert tree.expected_acceptance_length == pytest.approx(2.875, rel=1e-6)


def test_each_row_sees_its_ancestors_and_itself(tree: DraftTree) -> None:
    assert ancestor_mask(tree).astype(int).tolist() == [
        # b  A  B AB AA BB ABC
        [1, 0, 0, 0, 0, 0, 0],  # b
        [1, 1, 0, 0, 0, 0, 0],  # A
        [1, 0, 1, 0, 0, 0, 0],  # B
        [1, 1, 0, 1, 0, 0, 0],  # AB
        [1, 1, 0, 0, 1, 0, 0],  # AA
        [1, 0, 1, 0, 0, 1, 0],  # BB
        [1, 1, 0, 1, 0, 0, 1],  # ABC
    ]


def test_child_lookup_and_path(tree: DraftTree) -> None:
    assert child_lookup(tree) == {
        (0, A): 1,
        (0, B): 2,
        (1, B): 3,
        (1, A): 4,
        (2, B): 5,
        (3, C): 6,
    }
    assert path_to(tree, 6) == (1, 3, 6)


def test_target_choices_A_B_D_accept_A_B_and_give_bonus_D(tree: DraftTree) -> None:  # noqa: N802
    logits = torch.tensor(
        [
            [5.0, 1.0, 2.0, 0.0],  # at b the target says A
            [0.0, 5.0, 2.0, 1.0],  # at A it says B
            [9.0, 0.0, 0.0, 0.0],
            [1.0, 0.0, 2.0, 5.0],  # at AB it says D, which is no child
            [9.0, 0.0, 0.0, 0.0],
            [9.0, 0.0, 0.0, 0.0],
            [9.0, 0.0, 0.0, 0.0],
        ]
    )
    token_ids = [7, ROOT]
    result = walk(tree, logits, Greedy(), TextStopping(100, (), None), token_ids)
    assert result.path == (1, 3)
    assert result.token_ids == (A, B, D)
    assert result.next_root_id == D
    assert result.finish_reason is None
    assert token_ids == [7, ROOT, A, B, D]
