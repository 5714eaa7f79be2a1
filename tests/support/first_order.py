"""A drafter whose positions hang together: alone they say little, one behind the other all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.sampling.coupling import Perturb
from ddtree.types import Marginals, Transitions

_ALONE = torch.tensor([0.3, 0.28, 0.22, 0.2]).log()
_SURE = torch.tensor([0.9, 0.04, 0.03, 0.02]).log()
NUM_RANKS = len(_ALONE)


@dataclass
class FirstOrderDrafter:
    """Knows the script, and hides it: the truth of position p is at rank p % 4 of its depth alone.

    Behind the true token the next true one is nearly sure; behind a wrong one, the last wrong one.

    Args:
        script: the whole sequence, prompt included.
        tells: False keeps the transitions to itself.
    """

    script: Sequence[int]
    vocab_size: int
    tells: bool = True
    num_depths: int = 7
    layer_ids: Sequence[int] = (1, 2)

    def start(self, capacity: int) -> FirstOrderSession:
        return FirstOrderSession(self)

    def candidates(self, position: int) -> list[int]:
        truth = self.script[position] if position < len(self.script) else 0
        wrong = [(truth + 1 + i) % self.vocab_size for i in range(NUM_RANKS - 1)]
        place = position % NUM_RANKS
        return [*wrong[:place], truth, *wrong[place:]]


@dataclass
class FirstOrderSession:
    drafter: FirstOrderDrafter
    length: int = 0

    def extend(self, features: Tensor, token_ids: Tensor) -> None:
        self.length += features.shape[0]

    def propose(
        self, root_id: int, *, num_depths: int, num_ranks: int, perturb: Perturb | None = None
    ) -> Marginals:
        # Who knows the text knows what the noise picks.
        positions = range(self.length + 1, self.length + 1 + num_depths)
        token_ids = torch.tensor([self.drafter.candidates(p) for p in positions])
        alone = _ALONE.expand(num_depths, -1).contiguous()
        if not self.drafter.tells:
            return Marginals(alone[:, :num_ranks], token_ids[:, :num_ranks])
        ranks = torch.empty((num_depths - 1, NUM_RANKS, NUM_RANKS), dtype=torch.int64)
        for depth, position in enumerate(positions[1:]):
            truth = position % NUM_RANKS
            others = [rank for rank in range(NUM_RANKS) if rank != truth]
            ranks[depth] = torch.tensor([*others[::-1], truth])
            ranks[depth, (position - 1) % NUM_RANKS] = torch.tensor([truth, *others])
        return Marginals(alone, token_ids, Transitions(_SURE.expand(ranks.shape), ranks))
