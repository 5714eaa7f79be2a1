"""The tree with one node per depth: plain DFlash as a builder, so that one loop serves both."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ddtree.host_marginals import HostMarginals
from ddtree.types import DraftTree, Marginals


@np.errstate(over="ignore")  # below float32's range is -inf: banned
def build_chain(
    marginals: Marginals,
    root_id: int,
    budget: int,
    *,
    allowed: Callable[[tuple[int, ...]], bool] | None = None,
) -> DraftTree:
    """Chain the most probable token of each depth, behind the one chosen before it.

    Args:
        marginals: log-probs and token ids [L, K], K >= 1.
        root_id: the token at node 0.
        budget: the most nodes besides the root; the chain has min(budget, L) of them, fewer if
            every token of some depth is banned (-inf).
        allowed: whether a prefix may be the chain, by its tokens behind the root: each depth has
            the most probable token with which it may.

    Returns:
        A tree in which node i has parent i - 1, and rank 0 unless one above was not allowed.

    Raises:
        MarginalsError: see `HostMarginals.of`.

    >>> import torch
    >>> q = torch.tensor([[0.6, 0.4], [0.9, 0.1]])
    >>> build_chain(Marginals(q.log(), torch.tensor([[7, 8], [5, 6]])), 1, 16).token_ids.tolist()
    [1, 7, 5]
    """
    host = HostMarginals.of(marginals)
    scores, token_ids, ranks, column = [np.float32(0.0)], [root_id], [-1], 0
    for depth, ids in enumerate(host.token_ids[:budget]):
        log_probs, followers = host.behind(depth, column)
        prefixes = ((*token_ids[1:], int(ids[follower])) for follower in followers)
        legal = (rank for rank, p in enumerate(prefixes) if allowed is None or allowed(p))
        rank = next(legal, None)
        if rank is None or scores[-1] + log_probs[rank] == -np.inf:
            break
        column = int(followers[rank])
        scores.append(scores[-1] + log_probs[rank])
        token_ids.append(int(ids[column]))
        ranks.append(rank)
    num_rows = len(scores)
    return DraftTree(
        np.array(token_ids, np.int64),
        np.arange(-1, num_rows - 1, dtype=np.int32),
        np.arange(num_rows, dtype=np.int32),
        np.array(ranks, np.int32),
        np.array(scores, np.float32),
    )
