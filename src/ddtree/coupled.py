"""Coupled drafting in the loop: the drafter hears the noise, and the weights hear of the walk.

Attaches to the stages from outside, so that the loop knows no noise. What it does to the drafter's
logits is `sampling.coupling`'s.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import Tensor

from ddtree.decode import Stages
from ddtree.draft import DraftSession, draft
from ddtree.errors import OptionError
from ddtree.sampling.coupling import Coupling, Perturb
from ddtree.sampling.rule import DecodingRule
from ddtree.stopping import Stopping
from ddtree.types import DraftTree, Marginals, Walk

# As `ddtree.draft.draft`.
Draft = Callable[[DraftSession, int, int, int, Perturb | None], Marginals]


class CoupledDrafting:
    """Couples the drafter of one request to the noise of its decoding rule.

    Args:
        coupling: of this request; mutated.
        draft: asks the drafter.
    """

    def __init__(self, coupling: Coupling, draft: Draft = draft) -> None:
        self._coupling = coupling
        self._ask = draft
        # The walk of the prefill comes before the first draft and sets both.
        self._position = self._vocab_size = 0
        self._session: DraftSession | None = None

    def attached(self, stages: Stages) -> Stages:
        """The same stages, with a coupled draft."""
        return replace(stages, draft=self._draft, walk=partial(self._walk, stages))

    def _draft(
        self, session: DraftSession, root_id: int, num_depths: int, num_ranks: int
    ) -> Marginals:
        if session is not self._session:
            _check_takes_perturb(session)
            self._session = session
        perturb = self._coupling.perturb(self._position, self._vocab_size)
        return self._ask(session, root_id, num_depths, num_ranks, perturb)

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
        self._coupling.observe(walked)
        self._position, self._vocab_size = len(token_ids), logits.shape[-1]
        return walked


def takes_perturb(session: DraftSession) -> bool:
    """Whether a drafter lets its logits be changed before it ranks them."""
    parameters = inspect.signature(session.propose).parameters.values()
    return any(p.name == "perturb" or p.kind is p.VAR_KEYWORD for p in parameters)


def _check_takes_perturb(session: DraftSession) -> None:
    if takes_perturb(session):
        return
    raise OptionError(
        "coupled",
        expected="a drafter whose propose takes `perturb`, see ddtree.DraftSession",
        got=f"{type(session).__qualname__}, whose propose does not",
        remedy="Add it, or switch coupled drafting off: coupled=False, --no-coupled.",
    )
