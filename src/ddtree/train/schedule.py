"""Which samples a step sees, and at which learning rate: functions of the seed and the step alone.

That is what makes a resumed run the same run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

_STEPS_PER_GROUP = 8


class BatchPlan:
    """Every sample once an epoch, in random order, similar lengths together to pad little.

    Args:
        lengths: of each sample, at least one.
        batch_size: samples of one step, at most as many as there are.
        seed: of the order.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        self._lengths = lengths
        self._batch_size = min(batch_size, len(lengths))
        self._seed = seed
        self._epoch = -1
        self._batches: list[list[int]] = []

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in one epoch; what does not fill one waits for the next epoch's order."""
        return len(self._lengths) // self._batch_size

    def batch(self, step: int) -> tuple[int, list[int]]:
        """The epoch of a step and the places of its samples."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._order(epoch)
        return epoch, self._batches[place]

    def _order(self, epoch: int) -> list[list[int]]:
        generator = generator_of(f"order {self._seed} {epoch}")
        order = torch.randperm(len(self._lengths), generator=generator).tolist()
        size = self._batch_size
        order = order[: self.steps_per_epoch * size]
        batches = []
        for begin in range(0, len(order), size * _STEPS_PER_GROUP):
            group = sorted(order[begin : begin + size * _STEPS_PER_GROUP], key=self._length)
            batches += [group[i : i + size] for i in range(0, len(group), size)]
        shuffled = torch.randperm(len(batches), generator=generator).tolist()
        return [batches[i] for i in shuffled]

    def _length(self, place: int) -> tuple[int, int]:
        return self._lengths[place], place


def held_out(prompt_ids: Sequence[int], share: float) -> bool:
    """Whether a prompt is kept for validation; all its responses are, in every run.

    >>> held_out([1, 2, 3], 1.0), held_out([1, 2, 3], 0.0)
    (True, False)
    """
    digest = hashlib.sha256(" ".join(map(str, prompt_ids)).encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def learning_rate(step: int, *, peak: float, warmup: int, total: int, decay_share: float) -> float:
    """Linear warm-up, then constant, then linear to a fiftieth of the peak over the last share.

    A constant middle lets a run be prolonged: only the decay moves.

    >>> [learning_rate(s, peak=1.0, warmup=2, total=10, decay_share=0.5) for s in (0, 1, 4)]
    [0.5, 1.0, 1.0]
    """
    rising = min(1.0, (step + 1) / max(warmup, 1))
    decay_steps = max(1, round(total * decay_share))
    left = min(1.0, (total - step) / decay_steps)
    return peak * rising * (0.02 + 0.98 * left)


def short_reach(weights: Float[Tensor, " L"], step: int, seed: int) -> int:
    """Depths of a step of shortened blocks: at least k with the probability that is k's weight."""
    digest = hashlib.sha256(f"reach {seed} {step}".encode()).digest()
    drawn = int.from_bytes(digest[:7], "big") / 2**56
    return int((weights > drawn).sum())


def generator_of(words: str) -> torch.Generator:
    """A generator whose draws depend on some words alone, on every machine."""
    digest = hashlib.sha256(words.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
