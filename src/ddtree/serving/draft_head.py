"""From the hidden states of drafted slots to `Marginals`, for all requests of a batch at once.

The engine's own drafter ends in the target's whole head. This one multiplies only what can be
proposed, knows transition heads, and lends sampled requests' noise to the ranking, as
`models.drafter` does for one request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ddtree.models.drafter import top_marginals
from ddtree.models.transitions import NO_ROW, TransitionHead, conditioned
from ddtree.sampling.coupling import Perturb
from ddtree.types import Marginals


class DraftHead:
    """The end of a drafter.

    Args:
        logits: hidden states [M, D] to scores [M, Vd] of every token that can be proposed.
        draft_token_ids: [Vd], the token of each column; None where the columns are the ids.
        transitions: what it knows of a token behind another, or None.
        num_candidates: candidates per depth that `transitions` scores.
    """

    def __init__(
        self,
        logits: Callable[[Tensor], Tensor],
        *,
        draft_token_ids: Int64[Tensor, " Vd"] | None = None,
        transitions: TransitionHead | None = None,
        num_candidates: int = 16,
    ) -> None:
        self._logits = logits
        self._draft_token_ids = draft_token_ids
        self._transitions = transitions
        self._num_candidates = num_candidates

    @torch.inference_mode()
    def marginals(
        self,
        hidden: Float[Tensor, "R L D"],
        root_ids: Sequence[int],
        num_ranks: int,
        perturbs: Sequence[Perturb | None],
    ) -> list[Marginals]:
        """What each request's next L tokens may be, on the host.

        Args:
            hidden: of each drafted slot.
            root_ids: R tokens, decided and not yet drafted behind.
            num_ranks: K; a drafter with transitions has its own.
            perturbs: of requests whose drafts are coupled to their noise.
        """
        num_requests, num_depths, _ = hidden.shape
        scores = self._logits(hidden.flatten(0, 1)).float()
        scores = scores.reshape(num_requests, num_depths, -1)
        rows = [
            said if perturb is None else perturb(said, self._draft_token_ids)
            for said, perturb in zip(scores, perturbs, strict=True)
        ]
        each = zip(root_ids, hidden, rows, perturbs, strict=True)
        if self._transitions is not None:
            return [self._first_order(self._transitions, *request).cpu() for request in each]
        # One search for all requests: their rows are alike.
        flat = top_marginals(torch.cat(rows), num_ranks, self._draft_token_ids).cpu()
        spans = [slice(i, i + num_depths) for i in range(0, len(flat.log_probs), num_depths)]
        return [Marginals(flat.log_probs[span], flat.token_ids[span]) for span in spans]

    def _first_order(
        self,
        transitions: TransitionHead,
        root_id: int,
        hidden: Float[Tensor, "L D"],
        scores: Float[Tensor, "L Vd"],
        perturb: Perturb | None,
    ) -> Marginals:
        """See `DFlashDrafter.first_order`."""
        best = torch.topk(scores, min(self._num_candidates, scores.shape[1]))
        rows = best.indices
        root = torch.full_like(rows[:1], self._row_of(root_id))
        added = transitions.between(torch.cat([root, rows[:-1]]), rows, hidden).float()
        if perturb is not None:
            added = perturb.weigh(added)
            perturb.keep(partial(self._changes_behind, transitions, root_id, hidden))
        log_probs = best.values - torch.logsumexp(scores, dim=-1, keepdim=True)
        ids = rows if self._draft_token_ids is None else self._draft_token_ids[rows]
        return conditioned(Marginals(log_probs.clamp(max=0.0), ids), best.values, added)

    def _changes_behind(
        self,
        transitions: TransitionHead,
        root_id: int,
        hidden: Float[Tensor, "L D"],
        token_ids: Sequence[int],
    ) -> Float[Tensor, "M Vd"]:
        """See `sampling.coupling.ChangesBehind`."""
        rows = [self._row_of(token) for token in (root_id, *token_ids)]
        previous = torch.tensor(rows, device=hidden.device)
        return transitions.changes(previous, hidden[: len(rows)])

    def _row_of(self, token_id: int) -> int:
        """Row of the codebooks of a token, NO_ROW where it has none."""
        return token_id if self._draft_token_ids is None else self._rows.get(token_id, NO_ROW)

    @cached_property
    def _rows(self) -> dict[int, int]:
        assert self._draft_token_ids is not None
        return {token: row for row, token in enumerate(self._draft_token_ids.tolist())}
