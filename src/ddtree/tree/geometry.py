"""What follows from a tree's `parents`: who sees whom, where a child is, the path to a node.

The only place where the shape of a tree is derived. Knows no probabilities and no model.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool
from numpy import ndarray

from ddtree.tree import native
from ddtree.types import DraftTree


def ancestor_mask(tree: DraftTree) -> Bool[ndarray, "N N"]:
    """Which rows a row may attend to inside the tree: its ancestors and itself.

    Returns:
        [N, N]; entry (i, j) is True where node j is node i or an ancestor of it. Column 0 (the
        root) is True everywhere.

    >>> from ddtree.types import DraftTree
    >>> ancestor_mask(DraftTree.root_only(3)).tolist()
    [[True]]
    """
    return native.ancestor_mask(tree) if native.AVAILABLE else ancestor_mask_by_rows(tree)


def ancestor_mask_by_rows(tree: DraftTree) -> Bool[ndarray, "N N"]:
    """The same in Python, which defines it: a row sees what its parent sees, and itself."""
    mask: Bool[ndarray, "N N"] = np.eye(tree.num_rows, dtype=np.bool_)
    for node, parent in enumerate(tree.parents.tolist()[1:], start=1):
        mask[node] |= mask[parent]
    return mask


def child_lookup(tree: DraftTree) -> dict[tuple[int, int], int]:
    """Map (node, token id) to the child of that node which proposes that token."""
    parents, token_ids = tree.parents.tolist(), tree.token_ids.tolist()
    return {(parents[i], token_ids[i]): i for i in range(1, tree.num_rows)}


def path_to(tree: DraftTree, node: int) -> tuple[int, ...]:
    """Node indices from the root's child down to `node`; empty for the root."""
    path = []
    while node > 0:
        path.append(node)
        node = int(tree.parents[node])
    return tuple(reversed(path))
