"""Stage 1: ask the drafter for the next positions, in one pass.

Also says what a drafter is. Marginals may come from anything that predicts L positions at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ddtree.sampling.coupling import Perturb
from ddtree.types import Marginals


@runtime_checkable
class DraftSession(Protocol):
    """A drafter's state for one request: it has seen the committed context and nothing else."""

    def extend(self, features: Float[Tensor, "M F"], token_ids: Int64[Tensor, " M"]) -> None:
        """Take in the next M committed positions: the target's features there, and the tokens.

        Both are on the target's device. What `Drafter.layer_ids` names is in `features`: nothing
        (F = 0) where it is empty.
        """
        ...

    def propose(
        self, root_id: int, *, num_depths: int, num_ranks: int, perturb: Perturb | None = None
    ) -> Marginals:
        """Distributions for the `num_depths` positions behind the root; leaves no trace.

        With `perturb`, the logits of all tokens that can be proposed go through it before they are
        normalised and ranked. A drafter that lacks the argument cannot be coupled.
        """
        ...


@runtime_checkable
class Drafter(Protocol):
    """Anything that predicts L positions in one pass.

    Attributes:
        layer_ids: 0-based target layers whose outputs it wants as features, in this order, or
            `models.target.FINAL_HIDDEN` for what the target's head reads; empty for none.
        num_depths: L, the most positions of one pass.
    """

    @property
    def layer_ids(self) -> Sequence[int]:
        """See above."""
        ...

    @property
    def num_depths(self) -> int:
        """See above."""
        ...

    def start(self, capacity: int) -> DraftSession:
        """A fresh session for one request, with room for `capacity` positions."""
        ...


@torch.inference_mode()
def draft(
    session: DraftSession,
    root_id: int,
    num_depths: int,
    num_ranks: int,
    perturb: Perturb | None = None,
) -> Marginals:
    """One drafter pass.

    Args:
        session: the request's drafter state; not changed.
        root_id: the last decided token.
        num_depths: positions wanted, at most L.
        num_ranks: K = min(B, V) is enough for the best tree of B nodes (Lemma 1).
        perturb: of coupled drafting, see `DraftSession.propose`.
    """
    if perturb is None:
        return session.propose(root_id, num_depths=num_depths, num_ranks=num_ranks)
    return session.propose(root_id, num_depths=num_depths, num_ranks=num_ranks, perturb=perturb)
