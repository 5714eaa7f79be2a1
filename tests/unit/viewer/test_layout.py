"""Rows of nodes: no overlap, no crossing, as tight as it can be."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.viewer.layout import rows_of
from ddtree.viewer.scenes import scenes_of
from tests.support.rounds import large_round


@st.composite
def children_lists(draw: st.DrawFn) -> list[list[int]]:
    """Trees of up to 40 nodes, parents before their children."""
    size = draw(st.integers(1, 40))
    parents = [draw(st.integers(0, i - 1)) for i in range(1, size)]
    found: list[list[int]] = [[] for _ in range(size)]
    for child, parent in enumerate(parents, start=1):
        found[parent].append(child)
    return found


def depths_of(children: list[list[int]]) -> list[int]:
    depths = [0] * len(children)
    for node, below in enumerate(children):
        for child in below:
            depths[child] = depths[node] + 1
    return depths


@settings(max_examples=50)
@given(children_lists())
def test_no_two_nodes_of_a_depth_share_a_row(children: list[list[int]]) -> None:
    places = list(zip(depths_of(children), rows_of(children), strict=True))
    assert len(set(places)) == len(places)


@settings(max_examples=50)
@given(children_lists())
def test_a_first_child_continues_its_parents_row_and_siblings_follow_below(
    children: list[list[int]],
) -> None:
    rows = rows_of(children)
    for node, below in enumerate(children):
        siblings = [rows[child] for child in below]
        assert siblings == sorted(siblings)
        assert siblings[:1] == [rows[node]][: len(below)]


@settings(max_examples=50)
@given(children_lists())
def test_edges_do_not_cross(children: list[list[int]]) -> None:
    rows, depths = rows_of(children), depths_of(children)
    edges = [(depths[n], rows[n], rows[c]) for n, below in enumerate(children) for c in below]
    for depth, parent, child in edges:
        for other_depth, other_parent, other_child in edges:
            if depth == other_depth and parent < other_parent:
                assert child < other_child


def test_a_subtree_moves_up_beside_a_shallower_one() -> None:
    # 0 - 1 - 2 - 3     the leaf 4 stands below 2, and 5 right below 1's lowest child
    #       \ 4         in the next column; 6, its child, needs the row after 4.
    #   \ 5 - 6
    children = [[1, 5], [2, 4], [3], [], [], [6], []]
    assert rows_of(children) == [0, 0, 0, 0, 1, 2, 2]
    # A leaf needs no row after another's grandchildren: 7 stands right below 1.
    assert rows_of([[1, 4], [2, 3], [], [], []]) == [0, 0, 0, 1, 1]


def test_a_large_tree_is_no_taller_than_its_fullest_depths_ask() -> None:
    (scene,) = scenes_of([large_round(400)])
    rows = rows_of(scene.children())
    depths = [node.depth for node in scene.nodes]
    fullest = max(map(depths.count, set(depths)))
    assert fullest <= max(rows) + 1 < 400
