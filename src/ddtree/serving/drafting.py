"""From hidden states of the drafter to the trees of a batch.

    hidden states -> head -> marginals -> guesses mixed in -> calibrated -> trees -> shared budget

Knows no engine: what a request is, is said by `RequestState`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from torch import Tensor

from ddtree.sampling.coupling import Perturb
from ddtree.serving.draft_head import DraftHead
from ddtree.serving.requests import RequestState
from ddtree.serving.shared_budget import SharedBudget
from ddtree.tree.chain import build_chain
from ddtree.tree.host import build_tree
from ddtree.types import DraftTree, Marginals, Transitions


class BatchDrafting:
    """Drafts a step's requests together.

    Args:
        share: how many nodes each of them gets; mutated.
        vocab_size: V of the target, over which noise is drawn.
        max_nodes: B, the most nodes of a tree.
    """

    def __init__(self, share: SharedBudget, *, vocab_size: int, max_nodes: int) -> None:
        self.share = share
        self._vocab_size = vocab_size
        self._max_nodes = max_nodes

    def ask(
        self, head: DraftHead, hidden: Float[Tensor, "R L D"], requests: Sequence[RequestState]
    ) -> list[Marginals]:
        """What the drafter says of each request, and of none but the drafter."""
        perturbs: list[Perturb | None] = [
            None if r.coupling is None else r.coupling.perturb(len(r.token_ids), self._vocab_size)
            for r in requests
        ]
        return head.marginals(hidden, [r.root_id for r in requests], self._max_nodes, perturbs)

    def trees(
        self,
        said: Sequence[Marginals],
        requests: Sequence[RequestState],
        num_others: int,
        prompt_rows: int,
    ) -> list[DraftTree]:
        """The trees that the next step is to verify, kept in the requests too.

        Args:
            said: of the drafter, for each request.
            requests: those that can draft.
            num_others: requests of the next step that draft nothing.
            prompt_rows: rows of prompts that it is thought to have.
        """
        trees = [self._tree(*each) for each in zip(said, requests, strict=True)]
        gains = [np.exp(tree.log_probs[1:]) for tree in trees]
        gains += [np.empty(0, np.float32)] * num_others
        counts = self.share.share(gains, prompt_rows)
        for i, request in enumerate(requests):
            request.tree = trees[i] = trees[i].first(counts[i])
        return trees

    def _tree(self, said: Marginals, request: RequestState) -> DraftTree:
        said = _down_to(request.deepest, said)
        guessing = request.guessing if request.method == "ddtree" else None
        if guessing is not None:
            said = guessing.into(said, request.token_ids)
        request.drafted = said
        build = build_tree if request.method == "ddtree" else build_chain
        return build(self.share.calibrate(said), request.root_id, request.budget)


def _down_to(deepest: int | None, said: Marginals) -> Marginals:
    """Without the depths below the deepest; None leaves all."""
    if deepest is None or deepest >= said.num_depths:
        return said
    behind = said.transitions
    if behind is not None:
        pairs = slice(0, deepest - 1)
        behind = Transitions(behind.log_probs[pairs], behind.ranks[pairs])
    return Marginals(said.log_probs[:deepest], said.token_ids[:deepest], behind)
