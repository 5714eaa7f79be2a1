"""Algorithm 1 of the paper on `heapq`: the readable specification that defines every other builder.

The best tree of B nodes under the factorised surrogate is the B prefixes of highest score
(Proposition 2). A heap pops them best first: each pop can only make two new candidates worth
looking at, the prefix's next sibling and its first child, and neither scores higher.

Contract (DESIGN 3), shared by all builders:

- score(child) = float32(score(parent) + log_prob), in this order;
- order of nodes: score from high to low, then depth from low to high, then the parent's place in
  this order, then rank;
- a prefix of score -inf is never a node, so banned tokens shrink the tree below B.
"""

from __future__ import annotations

import heapq

import numpy as np

from ddtree.types import DraftTree, HostMarginals, Marginals

# A candidate is its own heap key: (-score, depth, parent's index, rank).
_Candidate = tuple[np.float32, int, int, int]


@np.errstate(over="ignore")  # below float32's range is -inf: banned
def build_tree(marginals: Marginals, root_id: int, budget: int) -> DraftTree:
    """Build the draft tree of highest expected acceptance length.

    Args:
        marginals: log-probs and token ids [L, K]; optimal over all tokens if K >= min(budget, V).
        root_id: the token at node 0.
        budget: B >= 0, the most nodes besides the root.

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
    scores = [np.float32(0.0)]
    token_ids, parents, depths, ranks = [root_id], [-1], [0], [-1]
    heap: list[_Candidate] = []
    opened = [(0, 0)]  # (parent, rank) of the candidates that the last pop made worth a look
    while True:
        for parent, rank in opened:
            depth = depths[parent] + 1
            if depth > num_depths or rank >= num_ranks:
                continue
            score = scores[parent] + host.log_probs[depth - 1, rank]
            if score > -np.inf:
                heapq.heappush(heap, (-score, depth, parent, rank))
        if not heap or len(scores) > budget:
            break
        negative_score, depth, parent, rank = heapq.heappop(heap)
        node = len(scores)
        scores.append(-negative_score)
        token_ids.append(int(host.token_ids[depth - 1, rank]))
        parents.append(parent)
        depths.append(depth)
        ranks.append(rank)
        opened = [(parent, rank + 1), (node, 0)]

    return DraftTree(
        np.array(token_ids, np.int64),
        np.array(parents, np.int32),
        np.array(depths, np.int32),
        np.array(ranks, np.int32),
        np.array(scores, np.float32),
    )
