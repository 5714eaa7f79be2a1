"""Ancestor mask, child lookup and paths on random trees against the naive definitions."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ddtree.tree.geometry import ancestor_mask, child_lookup, path_to
from ddtree.types import DraftTree


@st.composite
def random_trees(draw: st.DrawFn) -> DraftTree:
    num_rows = draw(st.integers(1, 24))
    parents, depths, ranks, num_children = [-1], [0], [-1], [0] * num_rows
    for node in range(1, num_rows):
        parent = draw(st.integers(0, node - 1))
        parents.append(parent)
        depths.append(depths[parent] + 1)
        ranks.append(num_children[parent])
        num_children[parent] += 1
    # Siblings differ in their tokens; cousins need not.
    token_ids = [7, *(50 + rank for rank in ranks[1:])]
    return DraftTree(
        np.array(token_ids, np.int64),
        np.array(parents, np.int32),
        np.array(depths, np.int32),
        np.array(ranks, np.int32),
        -np.arange(num_rows, dtype=np.float32),
    )


def ancestors_and_self(tree: DraftTree, node: int) -> list[int]:
    line = [node]
    while tree.parents[line[-1]] >= 0:
        line.append(int(tree.parents[line[-1]]))
    return line


@given(random_trees())
def test_a_row_sees_exactly_its_ancestors_and_itself(tree: DraftTree) -> None:
    mask = ancestor_mask(tree)
    for node in range(tree.num_rows):
        assert np.flatnonzero(mask[node]).tolist() == sorted(ancestors_and_self(tree, node))


@given(random_trees())
def test_a_row_sees_as_many_rows_as_its_depth_and_itself(tree: DraftTree) -> None:
    assert (ancestor_mask(tree).sum(axis=1) == tree.depths + 1).all()


@given(random_trees())
def test_path_leads_from_the_roots_child_to_the_node(tree: DraftTree) -> None:
    for node in range(tree.num_rows):
        # The naive line runs upwards and ends with the root.
        assert path_to(tree, node) == tuple(ancestors_and_self(tree, node)[:-1][::-1])
        assert len(path_to(tree, node)) == tree.depths[node]


@given(random_trees())
def test_lookup_finds_every_child_by_its_token_and_nothing_else(tree: DraftTree) -> None:
    lookup = child_lookup(tree)
    for node in range(tree.num_rows):
        for token in range(40, 80):
            children = [
                child
                for child in range(1, tree.num_rows)
                if tree.parents[child] == node and tree.token_ids[child] == token
            ]
            assert [lookup[node, token]] == children if children else (node, token) not in lookup
    assert len(lookup) == tree.num_nodes


def test_the_root_alone_has_no_children_and_an_empty_path() -> None:
    tree = DraftTree.root_only(3)
    assert child_lookup(tree) == {}
    assert path_to(tree, 0) == ()
    assert ancestor_mask(tree).tolist() == [[True]]
