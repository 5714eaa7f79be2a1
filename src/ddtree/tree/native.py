"""The compiled core in `native/`: trees, their masks, what nodes are worth, and noise.

`build_tree`, `ancestor_mask` and `gumbel` equal their readable twins bit for bit, the other two but
for rounding; what they do is said there. The core is optional: an installation without a C compiler
has `AVAILABLE` False, and `tree.host`, `tree.geometry` and `sampling` do without.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64, Int64
from numpy import ndarray
from torch import Tensor

from ddtree.errors import BackendError
from ddtree.host_marginals import HostMarginals
from ddtree.types import DraftTree, Marginals, Transitions

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
    behind = marginals.transitions
    packed = _native.build_tree(
        _host(marginals.log_probs, torch.float32),
        _host(marginals.token_ids, torch.int64),
        root_id,
        budget,
        *(() if behind is None else _host_transitions(behind)),
    )
    if packed is None:
        HostMarginals.of(marginals)
        raise AssertionError("the core refuses marginals that HostMarginals accepts")
    num_rows = len(packed) // 24
    return DraftTree(
        np.frombuffer(packed, np.int64, num_rows),
        np.frombuffer(packed, np.int32, num_rows, 8 * num_rows),
        np.frombuffer(packed, np.int32, num_rows, 12 * num_rows),
        np.frombuffer(packed, np.int32, num_rows, 16 * num_rows),
        np.frombuffer(packed, np.float32, num_rows, 20 * num_rows),
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


def count(
    counts: Float64[ndarray, "L width"],
    bins: Float64[ndarray, "2 J"],
    log_probs: Float32[ndarray, "D K"],
    token_ids: Int64[ndarray, "D K"],
    chosen: tuple[int, ...],
    fade: float,
) -> None:
    """Take in what the target chose: see `ddtree.sampling.worth.count`.

    Raises:
        BackendError: the core is not there.
        ValueError: shapes that do not fit each other, or more than 64 bins.
    """
    _require()
    log_probs, token_ids = np.ascontiguousarray(log_probs), np.ascontiguousarray(token_ids)
    _native.count(counts, bins, log_probs, token_ids, chosen, fade)


def worth(
    counts: Float64[ndarray, "L width"],
    bins: Float64[ndarray, "2 J"],
    log_probs: Float32[ndarray, "D *M K"],
    prior_weight: float,
    prior_tokens: float,
) -> Float32[ndarray, "D *M K"]:
    """Log-probs as the counts have it: see `ddtree.sampling.worth.worth`.

    Raises:
        BackendError: the core is not there.
        ValueError: shapes that do not fit each other, or more than 64 bins.
    """
    _require()
    found: Float32[ndarray, "D *M K"] = np.empty(log_probs.shape, np.float32)
    said = np.ascontiguousarray(log_probs)
    _native.worth(counts, bins, said, found, prior_weight, prior_tokens)
    return found


def gumbel(seed: int, position: int, vocab_size: int) -> Float32[ndarray, " V"]:
    """Noise of one position: see `ddtree.sampling.gumbel.gumbel`.

    Raises:
        BackendError: the core is not there.
    """
    _require()
    noise: Float32[ndarray, " V"] = np.empty(vocab_size, np.float32)
    _native.gumbel(seed, position, noise)
    return noise


def _host_transitions(behind: Transitions) -> tuple[ndarray, ndarray]:
    return _host(behind.log_probs, torch.float32), _host(behind.ranks, torch.int64)


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
