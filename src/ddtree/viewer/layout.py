"""Where the nodes of a tree are drawn: the row of each; its column is its depth.

A first child stands in its parent's row, so the likeliest chain reads as a line of text, and
siblings follow below as tightly as their subtrees allow. Knows no sizes.
"""

from __future__ import annotations

from collections.abc import Sequence


def rows_of(children: Sequence[Sequence[int]]) -> list[int]:
    """A row for each node, the root's is 0.

    No two nodes of one depth share a row, none is above its parent, and edges do not cross.

    Args:
        children: of each node its children, in the order in which they are drawn. Children come
            after their parents; node 0 is the root.

    >>> rows_of([[1, 2], [3, 4], [5], [], [], []])
    [0, 0, 2, 0, 1, 2]
    """
    below_parent = [0] * len(children)
    contours: list[_Contour] = [([], [])] * len(children)
    for node in reversed(range(len(children))):
        tops, bottoms = [0], [0]
        for child in children[node]:
            child_tops, child_bottoms = contours[child]
            # Column i of a child's contour is column i + 1 of ours.
            pairs = zip(bottoms[1:], child_tops, strict=False)
            row = max((bottom + 1 - top for bottom, top in pairs), default=0)
            below_parent[child] = row
            reach = len(bottoms) - 1
            tops += [row + top for top in child_tops[reach:]]
            bottoms[1:] = [row + b for b in child_bottoms] + bottoms[1 + len(child_bottoms) :]
        contours[node] = (tops, bottoms)
    rows = below_parent
    for node, below in enumerate(children):
        for child in below:
            rows[child] += rows[node]
    return rows


# The first and the last row of a subtree in each column, from its own column and row on.
_Contour = tuple[list[int], list[int]]
