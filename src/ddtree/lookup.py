"""Prompt lookup in the loop: the text's own repetitions join the drafts.

Attaches to the stages from outside, so that the loop knows nothing of it; what a guess is and what
it is worth is `sampling.lookup`'s.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from ddtree.decode import Stages
from ddtree.draft import DraftSession
from ddtree.sampling.lookup import Guessing
from ddtree.sampling.rule import DecodingRule
from ddtree.stopping import Stopping
from ddtree.types import DraftTree, Marginals, Walk


class LookupDrafting:
    """Mixes what the text says into the drafts of one request.

    Args:
        guessing: of this request; mutated.
    """

    def __init__(self, guessing: Guessing) -> None:
        self._guessing = guessing
        self._token_ids: list[int] = []  # the walk of the prefill comes before the first draft

    def attached(self, stages: Stages) -> Stages:
        """The same stages, with guesses in the draft."""
        return replace(stages, draft=partial(self._draft, stages), walk=partial(self._walk, stages))

    def _draft(
        self, stages: Stages, session: DraftSession, root_id: int, num_depths: int, num_ranks: int
    ) -> Marginals:
        marginals = stages.draft(session, root_id, num_depths, num_ranks)
        return self._guessing.into(marginals, self._token_ids)

    def _walk(
        self,
        stages: Stages,
        tree: DraftTree,
        logits: Tensor,
        rule: DecodingRule,
        stopping: Stopping,
        token_ids: list[int],
    ) -> Walk:
        walked = stages.walk(tree, logits, rule, stopping, token_ids)
        self._token_ids = token_ids
        self._guessing.learn(walked.token_ids)
        return walked
