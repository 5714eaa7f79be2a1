"""What a drafter says, heard from outside: in a generation's rounds, and along a whole text.

Rounds start only where the round before ended. The features that pass by in a generation serve a
second look: the drafter is asked at every position of the response, which weighs easy and hard
places alike, and says what rounds of any other budget would have been told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from numpy import ndarray
from torch import Tensor

from ddtree.draft import Drafter, DraftSession, draft
from ddtree.host_marginals import HostMarginals
from ddtree.sampling.coupling import Perturb
from ddtree.types import Marginals


@dataclass(frozen=True)
class Proposal:
    """What a drafter proposed behind one root.

    Args:
        root: the root's position in the text; depth k speaks of position root + k.
        marginals: on the host.
    """

    root: int
    marginals: HostMarginals

    def said(self, token_ids: Sequence[int]) -> Bool[ndarray, "D K"]:
        """Which of the proposed tokens are those of the text.

        Args:
            token_ids: the whole text, prompt included.

        Returns:
            [D, K], D the depths whose position lies inside the text.
        """
        first = self.root + 1
        follow = token_ids[first : first + len(self.marginals.token_ids)]
        truth = np.array(follow, np.int64)[:, None]
        said: Bool[ndarray, "D K"] = self.marginals.token_ids[: len(follow)] == truth
        return said


@dataclass
class OverheardDrafter:
    """A drafter that remembers what one generation gave it and got from it.

    Args:
        drafter: does the work.
        features: what the session was extended by: [M, F] each, of all positions in order.
        proposals: what was proposed, and behind which root.
    """

    drafter: Drafter
    features: list[Tensor] = field(default_factory=list)
    proposals: list[Proposal] = field(default_factory=list)

    @property
    def layer_ids(self) -> Sequence[int]:
        """See `Drafter`."""
        return self.drafter.layer_ids

    @property
    def num_depths(self) -> int:
        """See `Drafter`."""
        return self.drafter.num_depths

    def start(self, capacity: int) -> DraftSession:
        """See `Drafter`; for one request only."""
        assert not self.features, "two requests would be mixed up"
        return _OverheardSession(self, self.drafter.start(capacity))


@dataclass
class _OverheardSession:
    overheard: OverheardDrafter
    session: DraftSession
    length: int = 0

    def extend(self, features: Float[Tensor, "M F"], token_ids: Int64[Tensor, " M"]) -> None:
        self.session.extend(features, token_ids)
        self.overheard.features.append(features)
        self.length += features.shape[0]

    def propose(
        self, root_id: int, *, num_depths: int, num_ranks: int, perturb: Perturb | None = None
    ) -> Marginals:
        marginals = draft(self.session, root_id, num_depths, num_ranks, perturb)
        # The root is not in the context yet: its position is the context's length.
        self.overheard.proposals.append(Proposal(self.length, HostMarginals.of(marginals)))
        return marginals


@torch.inference_mode()
def propose_along(
    drafter: Drafter,
    features: Float[Tensor, "S F"],
    token_ids: Sequence[int],
    num_prompt_tokens: int,
    *,
    num_ranks: int,
    end: int | None = None,
    perturb_at: Callable[[int], Perturb] | None = None,
) -> list[Proposal]:
    """What the drafter proposes behind every token of the response but the last.

    Args:
        drafter: asked anew, with the true text as its context.
        features: of all positions of the text but the last, at least.
        token_ids: the text, prompt and response.
        num_prompt_tokens: how many of them are the prompt.
        num_ranks: K, wanted of each depth.
        end: positions from here on are not spoken of, and roots with nothing to say are left out;
            None is the end of the text.
        perturb_at: given the position of the first drafted token, what couples the drafter to the
            noise there; None leaves it alone, whatever the rounds did.
    """
    last = len(token_ids) - 1
    end = last + 1 if end is None else end
    session = drafter.start(len(token_ids))
    ids = torch.tensor(token_ids, dtype=torch.int64, device=features.device)
    session.extend(features[:num_prompt_tokens], ids[:num_prompt_tokens])
    proposals = []
    for root in range(num_prompt_tokens, min(last, end - 1)):
        marginals = draft(
            session,
            token_ids[root],
            min(drafter.num_depths, end - 1 - root),
            num_ranks,
            None if perturb_at is None else perturb_at(root + 1),
        )
        proposals.append(Proposal(root, HostMarginals.of(marginals)))
        session.extend(features[root : root + 1], ids[root : root + 1])
    return proposals
