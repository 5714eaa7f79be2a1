"""The tree with one node per depth: plain DFlash as a builder, so that one loop serves both."""

from __future__ import annotations

import numpy as np

from ddtree.types import DraftTree, HostMarginals, Marginals


@np.errstate(over="ignore")  # below float32's range is -inf: banned
def build_chain(marginals: Marginals, root_id: int, budget: int) -> DraftTree:
    """Chain the most probable token of each depth.

    Args:
        marginals: log-probs and token ids [L, K], K >= 1.
        root_id: the token at node 0.
        budget: the most nodes besides the root; the chain has min(budget, L) of them, fewer if
            every token of some depth is banned (-inf).

    Returns:
        A tree in which node i has parent i - 1 and rank 0.

    Raises:
        MarginalsError: see `HostMarginals.of`.

    >>> import torch
    >>> q = torch.tensor([[0.6, 0.4], [0.9, 0.1]])
    >>> build_chain(Marginals(q.log(), torch.tensor([[7, 8], [5, 6]])), 1, 16).token_ids.tolist()
    [1, 7, 5]
    """
    host = HostMarginals.of(marginals)
    scores = [np.float32(0.0)]
    for log_prob in host.log_probs[:budget, 0]:
        score = scores[-1] + log_prob
        if score == -np.inf:
            break
        scores.append(score)
    num_rows = len(scores)
    return DraftTree(
        np.concatenate([[root_id], host.token_ids[: num_rows - 1, 0]]).astype(np.int64),
        np.arange(-1, num_rows - 1, dtype=np.int32),
        np.arange(num_rows, dtype=np.int32),
        np.array([-1] + [0] * (num_rows - 1), np.int32),
        np.array(scores, np.float32),
    )
