"""A DFlash drafter and its session: one pass gives a distribution for each of L positions.

The network (`drafter_network`) sees the context's features and a block; what goes in is embedded,
and what comes out becomes tokens, by the target's two ends or by the drafter's own. Knows the
target only by these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from ddtree.cache.store import KVStore
from ddtree.models.drafter_config import DrafterConfig
from ddtree.models.drafter_network import DFlashNetwork
from ddtree.models.fused import fuse_layers
from ddtree.models.packed import PackedLinear, pack_linears
from ddtree.models.target import Target
from ddtree.models.transitions import NO_ROW, conditioned
from ddtree.sampling.coupling import Perturb
from ddtree.types import Marginals

# Positions whose features wait at most: they take more memory than keys and values made of them.
_MOST_WAITING = 256


class DFlashDrafter:
    """A DFlash network bound to its target.

    Args:
        network: on the target's device and in its dtype.
        target: lends its embedding and head.
        name: how to call it in messages.
        draft_token_ids: [Vd], the only target tokens it can propose; None for all. The head's rows
            of these are copied, and the softmax is over them alone.
        embedding: [V, D], of its own, in place of the target's.
        head: of its own, in place of the target's; one row for each token it can propose.
    """

    def __init__(
        self,
        network: DFlashNetwork,
        target: Target,
        *,
        name: str,
        draft_token_ids: Int64[Tensor, " Vd"] | None = None,
        embedding: Float[Tensor, "V D"] | None = None,
        head: nn.Linear | None = None,
    ) -> None:
        self.network = network.eval()
        self.target = target
        self.name = name
        self.config = network.config
        self.layer_ids = self.config.target_layer_ids
        self.num_depths = self.config.num_depths
        self.own_embedding = embedding
        self.has_own_head = head is not None
        self.draft_token_ids: Tensor | None = None
        if draft_token_ids is not None:
            self.draft_token_ids = draft_token_ids.to(target.device)
            if head is None:
                head = target.head_of(self.draft_token_ids)
        self._head: Callable[[Tensor], Tensor] = target.head if head is None else head

    @property
    def own_tensors(self) -> Mapping[str, Tensor]:
        """What it has in place of the target's embedding and head, by name."""
        own = {} if self.own_embedding is None else {"embedding": self.own_embedding}
        if not self.has_own_head:
            return own
        assert isinstance(self._head, nn.Linear | PackedLinear)
        return {**own, "head": self._head.weight}

    def pack(self) -> None:
        """Lay its weights out for speed, see `models.packed`; it can then only run."""
        fuse_layers(pack_linears(self.network, self.target.products))
        if isinstance(self._head, nn.Module):
            self._head = pack_linears(self._head, self.target.products)

    def embed(self, token_ids: Int64[Tensor, " M"]) -> Float[Tensor, "M D"]:
        """The scaled embedding of slots that hold these tokens."""
        if self.own_embedding is None:
            rows = self.target.embed(token_ids)
        else:
            rows = functional.embedding(token_ids, self.own_embedding)
        return rows * self.config.input_embedding_scale

    def logits(self, hidden: Float[Tensor, "L D"]) -> Float[Tensor, "L Vd"]:
        """Scaled and capped logits in float32, one column per token that can be proposed."""
        return shaped_logits(self._head(hidden).float(), self.config)

    def first_order(
        self,
        root_id: int,
        hidden: Float[Tensor, "L D"],
        scores: Float[Tensor, "L Vd"],
        perturb: Perturb | None,
    ) -> Marginals:
        """The candidates of each depth, and how probable they are behind each other.

        As many as the drafter was made for, whatever is asked for: they share one probability out
        between them, and a tree of few nodes is to be the beginning of one of many.

        Args:
            root_id: the token before depth 1.
            hidden: of each depth's slot.
            scores: of every token of each depth, which rank it.
            perturb: what made `scores` of the logits, if anything did.
        """
        selector = self.network.candidate_selector
        assert selector is not None, "this drafter knows no transitions"
        best = torch.topk(scores, min(self.config.selector_top_k, scores.shape[1]))
        rows = best.indices
        root = torch.full_like(rows[:1], self._row_of.get(root_id, NO_ROW))
        added = selector.between(torch.cat([root, rows[:-1]]), rows, hidden).float()
        if perturb is not None:
            added = perturb.weigh(added)
            perturb.keep(partial(self._changes_behind, root_id, hidden))
        log_probs = best.values - torch.logsumexp(scores, dim=-1, keepdim=True)
        ids = rows if self.draft_token_ids is None else self.draft_token_ids[rows]
        return conditioned(Marginals(log_probs.clamp(max=0.0), ids), best.values, added)

    def _changes_behind(
        self, root_id: int, hidden: Float[Tensor, "L D"], token_ids: Sequence[int]
    ) -> Float[Tensor, "M Vd"]:
        """See `sampling.coupling.ChangesBehind`."""
        selector = self.network.candidate_selector
        assert selector is not None, "this drafter knows no transitions"
        rows = [self._row_of.get(token, NO_ROW) for token in (root_id, *token_ids)]
        previous = torch.tensor(rows, device=hidden.device)
        return selector.changes(previous, hidden[: len(rows)])

    @cached_property
    def _row_of(self) -> Mapping[int, int]:
        """Row of the codebooks of each token that has one."""
        ids = range(self.target.vocab_size)
        known = ids if self.draft_token_ids is None else self.draft_token_ids.tolist()
        return {token: row for row, token in enumerate(known)}

    def start(self, capacity: int) -> DFlashSession:
        """A session of its own for one request, with room for `capacity` positions."""
        return DFlashSession(self, capacity)


class DFlashSession:
    """The drafter's context of one request: keys and values of committed positions only.

    Features wait until the next pass needs them: where nothing is drafted they cost nothing.
    """

    def __init__(self, drafter: DFlashDrafter, capacity: int) -> None:
        self._drafter = drafter
        room = capacity + drafter.config.block_size
        self._stores = [KVStore(room) for _ in drafter.network.layers]
        self._waiting: list[Tensor] = []

    @property
    def length(self) -> int:
        """Context positions seen; equals the target cache's length between rounds."""
        return self._stores[0].length + sum(part.shape[0] for part in self._waiting)

    @property
    def num_bytes(self) -> int:
        """Memory held by the context entries, and by features that wait."""
        waiting = sum(part.numel() * part.element_size() for part in self._waiting)
        return waiting + sum(store.num_bytes for store in self._stores)

    def extend(self, features: Float[Tensor, "M F"], token_ids: Int64[Tensor, " M"]) -> None:
        """Take in the target's features of the next M committed positions; they say it all."""
        self._waiting.append(features)
        if sum(part.shape[0] for part in self._waiting) >= _MOST_WAITING:
            self._take_in()

    def _take_in(self) -> None:
        if self._waiting:
            self._drafter.network.extend(torch.cat(self._waiting), self._stores)
            self._waiting.clear()

    def propose(
        self, root_id: int, *, num_depths: int, num_ranks: int, perturb: Perturb | None = None
    ) -> Marginals:
        """Draft the positions that follow the root.

        Args:
            root_id: the last decided token, at position `length`.
            num_depths: positions wanted, 1 <= num_depths <= L.
            num_ranks: K, capped at the draft vocabulary; a drafter with a transition head has its
                own.
            perturb: changes the logits before they are ranked, see `sampling.coupling`.
        """
        self._take_in()
        drafter, config = self._drafter, self._drafter.config
        ids = torch.full((config.block_size,), config.mask_token_id, device=drafter.target.device)
        ids[0] = root_id
        first = config.first_slot
        hidden = drafter.network(drafter.embed(ids), self._stores)[first : first + num_depths]
        scores = drafter.logits(hidden)
        if perturb is not None:
            scores = perturb(scores, drafter.draft_token_ids)
        if drafter.network.candidate_selector is None:
            return top_marginals(scores, num_ranks, drafter.draft_token_ids)
        return drafter.first_order(root_id, hidden, scores, perturb)


def shaped_logits(logits: Float[Tensor, "M V"], config: DrafterConfig) -> Float[Tensor, "M V"]:
    """The head's logits after the drafter's multiplier and soft-capping."""
    logits = logits * config.output_multiplier
    cap = config.final_logit_softcapping
    return logits if cap is None else cap * torch.tanh(logits / cap)


def top_marginals(
    logits: Float[Tensor, "L V"], num_ranks: int, token_ids: Int64[Tensor, " V"] | None = None
) -> Marginals:
    """Normalise over the vocabulary and keep the best ranks.

    Args:
        logits: [L, V] float32.
        num_ranks: K, capped at V.
        token_ids: [V], the token of each column; None where the columns are the token ids.

    >>> top_marginals(torch.tensor([[0.0, 0.0]]), 16).log_probs.exp()
    tensor([[0.5000, 0.5000]])
    """
    top = torch.topk(logits, min(num_ranks, logits.shape[1]), dim=-1, sorted=True)
    log_probs = top.values - torch.logsumexp(logits, dim=-1, keepdim=True)
    # Rounding can lift a probability of 1 above 1.
    ids = top.indices if token_ids is None else token_ids[top.indices]
    return Marginals(log_probs.clamp(max=0.0), ids)
