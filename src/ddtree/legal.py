"""Legal drafting in the loop: what the rule bans whatever the logits say is not drafted.

Attaches to the stages from outside, so that the loop knows no bans. The drafter's logits go through
them before they are ranked, so that its ranks are legal ones; tokens that a grammar forces stand in
the draft whatever the drafter says; and with a grammar every node is asked for by its path. What is
legal is `sampling.legality`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Bool, Float, Float32, Int64
from numpy import ndarray
from torch import Tensor

from ddtree.coupled import takes_perturb
from ddtree.decode import Stages
from ddtree.draft import DraftSession, draft
from ddtree.sampling.coupling import ChangesBehind, Perturb
from ddtree.sampling.legality import Ahead, Legality
from ddtree.sampling.rule import DecodingRule
from ddtree.stopping import Stopping
from ddtree.tree import reference
from ddtree.tree.chain import build_chain
from ddtree.types import DraftTree, Marginals, Method, Transitions, Walk

# Those of `decode.BUILDERS`, which take a question for every node.
_BUILDERS = {"dflash": build_chain, "ddtree": reference.build_tree}


class LegalDrafting:
    """Keeps the drafts of one request to what its rule may say.

    Args:
        legality: of this request; mutated.
        method: how it drafts, not "ar".
    """

    def __init__(self, legality: Legality, method: Method) -> None:
        self._legality = legality
        self._builder = partial(_BUILDERS[method], allowed=legality.allows)
        self._session: DraftSession | None = None
        self._is_open = False  # whether its logits can be changed
        self._ahead: Ahead | None = None  # of this round

    def attached(self, stages: Stages) -> Stages:
        """The same stages, with legal drafts; around whatever else changes drafts."""
        stages = replace(
            stages, draft=partial(self._draft, stages), walk=partial(self._walk, stages)
        )
        # Without a grammar the ranks say it all, and the compiled builder will do.
        return replace(stages, build=self._builder) if self._legality.has_grammar else stages

    def ask(
        self,
        session: DraftSession,
        root_id: int,
        num_depths: int,
        num_ranks: int,
        perturb: Perturb | None = None,
    ) -> Marginals:
        """As `ddtree.draft.draft`, with the drafter's logits held to what is legal."""
        if session is not self._session:
            self._session, self._is_open = session, takes_perturb(session)
        assert self._ahead is not None, "only the attached stages ask"
        bans = _Bans(self._ahead, perturb) if self._is_open else None
        return draft(session, root_id, num_depths, num_ranks, bans)

    @torch.inference_mode()
    def _draft(
        self, stages: Stages, session: DraftSession, root_id: int, num_depths: int, num_ranks: int
    ) -> Marginals:
        ahead = self._ahead = self._legality.ahead(num_depths)
        if len(ahead.forced) == num_depths:
            return _certain(ahead.forced)
        said = stages.draft(session, root_id, num_depths, num_ranks)
        return _forced(_banned(said, ahead.banned), ahead.forced)

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
        if walked.finish_reason is None:
            self._legality.follow(walked.token_ids)
        return walked


@dataclass(frozen=True)
class _Bans:
    """Bans before whatever else changes the logits: a `Perturb`."""

    ahead: Ahead
    then: Perturb | None

    def __call__(
        self, logits: Float[Tensor, "L Vd"], token_ids: Int64[Tensor, " Vd"] | None
    ) -> Float[Tensor, "L Vd"]:
        banned: Bool[ndarray, "L V"] = self.ahead.banned.numpy()
        if token_ids is None:
            columns = banned[:, : logits.shape[1]].copy()
        else:
            columns = banned.take(token_ids.cpu().numpy(), axis=1)
        # Where nothing is left, the scores would be NaN: such a depth falls when it is ranked.
        columns[columns.all(axis=1)] = False
        logits = logits.masked_fill(torch.from_numpy(columns).to(logits.device), -torch.inf)
        return logits if self.then is None else self.then(logits, token_ids)

    def weigh(self, changes: Float[Tensor, "L ..."]) -> Float[Tensor, "L ..."]:
        return changes if self.then is None else self.then.weigh(changes)

    def keep(self, changes_behind: ChangesBehind) -> None:
        if self.then is not None:
            self.then.keep(changes_behind)


def _certain(token_ids: Sequence[int]) -> Marginals:
    """One token for each depth."""
    return Marginals(torch.zeros(len(token_ids), 1), torch.tensor([token_ids]).T.contiguous())


def _banned(said: Marginals, banned: Bool[Tensor, "L V"]) -> Marginals:
    """What is banned has log-prob -inf, and the last places."""
    at = banned.to(said.token_ids.device).gather(1, said.token_ids)
    if not bool((at & (said.log_probs > -torch.inf)).any()):
        return said
    log_probs, order = _sorted(said.log_probs.masked_fill(at, -torch.inf))
    token_ids, behind = said.token_ids.gather(1, order), said.transitions
    if behind is None:
        return Marginals(log_probs, token_ids)
    # A rank's new place, as a parent and as a child.
    places = order.argsort(dim=1)
    ranks = places[1:, None].expand_as(behind.ranks).gather(2, behind.ranks)
    rows, follow = _sorted(
        behind.log_probs.masked_fill(
            at[1:, None].expand_as(behind.ranks).gather(2, behind.ranks), -torch.inf
        )
    )
    parents = order[:-1, :, None].expand_as(rows)
    ranks = ranks.gather(2, follow)
    return Marginals(
        log_probs, token_ids, Transitions(rows.gather(1, parents), ranks.gather(1, parents))
    )


def _sorted(log_probs: Float32[Tensor, "*rows K"]) -> tuple[Tensor, Tensor]:
    found = log_probs.sort(dim=-1, descending=True, stable=True)
    return found.values, found.indices


def _forced(said: Marginals, forced: Sequence[int]) -> Marginals:
    """The first depths have these tokens and no others, whatever stood there."""
    if not forced:
        return said
    end = len(forced)
    log_probs, token_ids = said.log_probs.clone(), said.token_ids.clone()
    known = token_ids[end - 1, 0] == forced[-1]
    log_probs[:end] = -torch.inf
    log_probs[:end, 0] = 0.0
    token_ids[:end, 0] = torch.tensor(forced, device=token_ids.device)
    behind = said.transitions
    if behind is not None:
        rows, ranks = behind.log_probs.clone(), behind.ranks.clone()
        places = torch.arange(said.num_ranks, device=ranks.device)
        rows[: end - 1], ranks[: end - 1] = log_probs[1:end, None], places
        if not known:
            # The drafter does not know what follows a token that it does not know.
            rows[end - 1, 0], ranks[end - 1, 0] = log_probs[end], places
        behind = Transitions(rows, ranks)
    return Marginals(log_probs, token_ids, behind)
