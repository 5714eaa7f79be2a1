"""Hears a generation from outside and writes down what a trace needs.

recording = Recording(pair, config)
*_, generation = pair.run(prompt, config, observe=recording.observe)
traced = recording.traced(generation, id="0", num_ranks=64)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import numpy as np
import torch

from ddtree.config import DecodeConfig
from ddtree.decode import Stages
from ddtree.draft import Drafter, DraftSession
from ddtree.host_marginals import HostMarginals
from ddtree.models.target import Target
from ddtree.overhear import OverheardDrafter, propose_along
from ddtree.pair import Pair
from ddtree.prefill import Prefilled
from ddtree.provenance import origin
from ddtree.sampling.coupling import Coupling, CouplingWeights, Perturb
from ddtree.sampling.rule import sampling_of
from ddtree.tracing.trace import Counts, TraceCard, TracedGeneration, TracedRound
from ddtree.types import Generation, Marginals

NUM_RANKS = 64

_Prefill = Callable[[Target, Drafter | None, Sequence[int], int], Prefilled]
_Draft = Callable[[DraftSession, int, int, int], Marginals]


class Recording:
    """Of one generation.

    Args:
        pair: that will run it.
        config: its options.
        proposals: False hears the prompt alone, and costs the generation nothing.

    Attributes:
        prompt_ids: known once the generation has begun.
    """

    def __init__(self, pair: Pair, config: DecodeConfig, *, proposals: bool = True) -> None:
        self.prompt_ids: tuple[int, ...] = ()
        self._pair = pair
        self._config = config
        self._proposals = proposals
        self._heard: OverheardDrafter | None = None
        # Of coupled drafting, before each pass: [L, 2] each, one for every proposal heard.
        self._weights: list[np.ndarray] = []
        self._lookup: Counts | None = None

    def observe(self, stages: Stages) -> Stages:
        """The same stages, heard; for `Pair.run`."""
        if self._config.lookup and self._config.method == "ddtree":
            self._lookup = self._pair.lookup_weights(self._config).counts
        prefill, draft = self._listening(stages.prefill), self._weighing(stages.draft)
        return replace(stages, prefill=prefill, draft=draft)

    def _listening(self, prefill: _Prefill) -> _Prefill:
        def heard(
            target: Target, drafter: Drafter | None, prompt_ids: Sequence[int], capacity: int
        ) -> Prefilled:
            self.prompt_ids = tuple(prompt_ids)
            if drafter is not None and self._proposals:
                drafter = self._heard = OverheardDrafter(drafter)
            return prefill(target, drafter, prompt_ids, capacity)

        return heard

    def _weighing(self, draft: _Draft) -> _Draft:
        def heard(
            session: DraftSession, root_id: int, num_depths: int, num_ranks: int
        ) -> Marginals:
            if self._heard is None:
                return draft(session, root_id, num_depths, num_ranks)
            weights = self._pair.coupling_weights.values.copy()
            marginals = draft(session, root_id, num_depths, num_ranks)
            # What a grammar forces is drafted without asking the drafter.
            if len(self._heard.proposals) > len(self._weights):
                self._weights.append(weights)
            return marginals

        return heard

    def traced(self, generation: Generation, *, id: str, num_ranks: int | None) -> TracedGeneration:
        """What was heard, in order; asks the drafter along the text, which takes a pass a token.

        Args:
            generation: the one that was heard.
            id: unique in its file.
            num_ranks: K wanted along the text, or as many as its rounds had if they had more; None
                does not ask: then only the budget that ran can be replayed.
        """
        proposed = {p.root: p.marginals for p in self._heard.proposals} if self._heard else {}
        ranks = max([num_ranks or 0, *(m.log_probs.shape[1] for m in proposed.values())])
        asked = self._heard is not None and num_ranks is not None
        seconds = generation.round_seconds
        rounds, start = [], len(self.prompt_ids)
        for done, spent in zip(generation.rounds[1:], seconds[1:], strict=True):
            marginals = proposed.get(start)
            rounds.append(TracedRound(start=start, marginals=marginals, round=done, seconds=spent))
            start += done.num_tokens
        return TracedGeneration(
            id=id,
            options=asdict(self._config),
            prompt_ids=self.prompt_ids,
            token_ids=generation.token_ids,
            text=generation.text,
            finish_reason=generation.finish_reason,
            elapsed_s=generation.elapsed_s,
            prefill_seconds=seconds[0],
            num_ranks=ranks if asked else 0,
            rounds=tuple(rounds),
            along=self._along(generation, ranks) if asked else {},
            lookup=self._lookup,
        )

    def _along(self, generation: Generation, num_ranks: int) -> dict[int, HostMarginals]:
        """What rounds that began elsewhere would have been told, by where they begin."""
        assert self._heard is not None, "asked only where a drafter was heard"
        num_prompt = len(self.prompt_ids)
        proposals = propose_along(
            self._heard.drafter,
            torch.cat(self._heard.features),
            [*self.prompt_ids, *generation.token_ids],
            num_prompt,
            num_ranks=num_ranks,
            # As in decoding: no depth is drafted that only a text beyond the limit could reach.
            end=num_prompt + self._config.max_new_tokens - 1,
            perturb_at=self._perturb_at(),
        )
        return {p.root: p.marginals for p in proposals}

    def _perturb_at(self) -> Callable[[int], Perturb] | None:
        """Couples the drafter as its rounds were, by the weights of that time; None: they were not.

        The weights are learnt from the rounds, so those of another run would be a little different.
        """
        sampling = sampling_of(self._pair.rule(self._config, len(self.prompt_ids)))
        if sampling is None or not self._config.coupled or self._heard is None:
            return None
        known = self._pair.coupling_weights
        then = CouplingWeights(len(known.values))
        coupling = Coupling(temperature=sampling.temperature, noise=sampling.noise, weights=then)
        roots = [proposal.root for proposal in self._heard.proposals]
        weights = self._weights or [known.values]
        vocab_size = self._pair.target.vocab_size

        def perturb_at(position: int) -> Perturb:
            then.values = weights[max(bisect_right(roots, position - 1) - 1, 0)].copy()
            return coupling.perturb(position, vocab_size)

        return perturb_at


def card_of(pair: Pair) -> TraceCard:
    """The card of traces of this pair, made here and now."""
    drafter = pair.drafter
    return TraceCard(
        target=pair.target.name,
        drafter=None if drafter is None else getattr(drafter, "name", type(drafter).__name__),
        dtype=pair.target.dtype_name,
        vocab_size=pair.target.vocab_size,
        num_depths=0 if drafter is None else drafter.num_depths,
        origin=origin(),
    )
