"""The compiled core in `native/`: `reference.build_tree` and the ancestor mask, in microseconds.

Equal to their readable twins bit for bit; what a tree is, is said there. The core is optional: an
installation without a C compiler has `AVAILABLE` False, and `host` and `geometry` do without.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool
from numpy import ndarray
from torch import Tensor

from ddtree.errors import BackendError
from ddtree.types import DraftTree, HostMarginals, Marginals

try:
    from ddtree.tree import _native
except ImportError:
    AVAILABLE = False
else:
    AVAILABLE = True


def build_tree(marginals: Marginals, root_id: int, budget: int) -> DraftTree:
    """Build the draft tree of highest expected acceptance length; releases the GIL.

    Args:
        marginals: log-probs and token ids [L, K]; optimal over all tokens if K >= min(budget, V).
        root_id: the token at node 0.
        budget: B >= 0, the most nodes besides the root.

    Returns:
        The tree of `reference.build_tree`; its arrays share one block of memory.

    Raises:
        MarginalsError: see `HostMarginals.of`.
        BackendError: the core is not there.

    >>> q = torch.tensor([[0.6, 0.4], [0.9, 0.1]])
    >>> ids = torch.tensor([[7, 8], [5, 6]])
    >>> tree = build_tree(Marginals(q.log(), ids), root_id=1, budget=3)
    >>> tree.token_ids.tolist(), tree.parents.tolist()
    ([1, 7, 5, 8], [-1, 0, 1, 0])
    """
    _require()
    log_probs = _host(marginals.log_probs, torch.float32)
    token_ids = _host(marginals.token_ids, torch.int64)
    packed = _native.build_tree(log_probs, token_ids, root_id, budget)
    if packed is None:
        HostMarginals.of(marginals)
        raise AssertionError("the core refuses marginals that HostMarginals accepts")
    num_rows = len(packed) // 24
    narrow = np.frombuffer(packed, np.int32, offset=8 * num_rows).reshape(4, num_rows)
    return DraftTree(
        np.frombuffer(packed, np.int64, num_rows),
        narrow[0],
        narrow[1],
        narrow[2],
        narrow[3].view(np.float32),
    )


def ancestor_mask(tree: DraftTree) -> Bool[ndarray, "N N"]:
    """Which rows a row may attend to inside the tree: see `geometry.ancestor_mask`.

    Raises:
        BackendError: the core is not there.
        ValueError: a parent that does not come before its child.

    >>> ancestor_mask(DraftTree.root_only(3)).tolist()
    [[True]]
    """
    _require()
    mask: Bool[ndarray, "N N"] = np.empty((tree.num_rows, tree.num_rows), np.bool_)
    _native.ancestor_mask(np.ascontiguousarray(tree.parents), mask)
    return mask


def _host(values: Tensor, dtype: torch.dtype) -> ndarray:
    return values.to("cpu", dtype).contiguous().numpy()


def _require() -> None:
    if not AVAILABLE:
        raise BackendError(
            "tree builder",
            expected="the compiled core",
            got="an installation without it",
            remedy="Install a C compiler and reinstall ddtree, or use ddtree.tree.host.",
        )
