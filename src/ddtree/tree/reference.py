"""Algorithm 1 of the paper on `heapq`: the readable specification that defines every other builder.

The best tree of B nodes under the drafter's surrogate is the B prefixes of highest score
(Proposition 2). A heap pops them best first: each pop can only make two new candidates worth
looking at, the prefix's next sibling and its first child, and neither scores higher. Nothing else
is asked of the surrogate: what follows a prefix may depend on its last token (a first-order draft).

Contract (DESIGN 3), shared by all builders:

- score(child) = float32(score(parent) + log_prob), in this order;
- order of nodes: score from high to low, then depth from low to high, then the parent's place in
  this order, then rank, which is the place among all that may follow the parent;
- a prefix of score -inf is never a node, so banned tokens shrink the tree below B.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from ddtree.host_marginals import HostMarginals
from ddtree.types import DraftTree, Marginals

# A candidate is its own heap key: (-score, depth, parent's index, rank).
_Candidate = tuple[np.float32, int, int, int]


@np.errstate(over="ignore")  # below float32's range is -inf: banned
def build_tree(
    marginals: Marginals,
    root_id: int,
    budget: int,
    *,
    allowed: Callable[[tuple[int, ...]], bool] | None = None,
) -> DraftTree:
    """Build the draft tree of highest expected acceptance length.

    Args:
        marginals: log-probs and token ids [L, K]; optimal over all tokens if K >= min(budget, V).
            With transitions, optimal over the K tokens of each depth.
        root_id: the token at node 0.
        budget: B >= 0, the most nodes besides the root.
        allowed: whether a prefix may be a node, by its tokens behind the root. Asked of each one
            whose turn it is, after its parent; nothing below one that may not is looked at.

    Returns:
        A tree of at most B nodes in score order; the tree of a smaller budget is its beginning.

    Raises:
        MarginalsError: see `HostMarginals.of`.

    Source: arXiv 2604.12989, Algorithm 1.

    >>> import torch
    >>> q = torch.tensor([[0.6, 0.4], [0.9, 0.1]])
    >>> ids = torch.tensor([[7, 8], [5, 6]])
    >>> tree = build_tree(Marginals(q.log(), ids), root_id=1, budget=3)
    >>> tree.token_ids.tolist(), tree.parents.tolist()
    ([1, 7, 5, 8], [-1, 0, 1, 0])
    """
    host = HostMarginals.of(marginals)
    num_depths, num_ranks = host.log_probs.shape
    scores, parents, depths, ranks = [np.float32(0.0)], [-1], [0], [-1]
    columns = [0]  # of each node's token in its depth's row of `token_ids`
    prefixes: list[tuple[int, ...]] = [()]
    heap: list[_Candidate] = []
    opened = [(0, 0)]  # (parent, rank) of the candidates that the last pop made worth a look
    while True:
        for parent, rank in opened:
            depth = depths[parent] + 1
            if depth > num_depths or rank >= num_ranks:
                continue
            log_probs, _ = host.behind(depth - 1, columns[parent])
            score = scores[parent] + log_probs[rank]
            if score > -np.inf:
                heapq.heappush(heap, (-score, depth, parent, rank))
        if not heap or len(scores) > budget:
            break
        negative_score, depth, parent, rank = heapq.heappop(heap)
        opened = [(parent, rank + 1)]
        _, followers = host.behind(depth - 1, columns[parent])
        column = int(followers[rank])
        prefix = (*prefixes[parent], int(host.token_ids[depth - 1, column]))
        if allowed is not None and not allowed(prefix):
            continue
        opened.append((len(scores), 0))
        scores.append(-negative_score)
        parents.append(parent)
        depths.append(depth)
        ranks.append(rank)
        columns.append(column)
        prefixes.append(prefix)

    return DraftTree(
        np.array([root_id, *(prefix[-1] for prefix in prefixes[1:])], np.int64),
        np.array(parents, np.int32),
        np.array(depths, np.int32),
        np.array(ranks, np.int32),
        np.array(scores, np.float32),
    )
