"""Gumbel noise that depends on the seed and the position alone (DESIGN 5).

Which rows a round verified, and how many rounds there were, leave no trace in it: that is why one
seed gives one text, whatever the method. Knows no logits.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor


def gumbel_noise(
    seed: int, position: int, vocab_size: int, device: torch.device | str = "cpu"
) -> Float32[Tensor, " V"]:
    """Draw G_t(v) ~ Gumbel(0, 1) iid over the vocabulary for the token at one position.

    Bits come from numpy's Philox generator, keyed by the seed and counted from `position`: its raw
    stream is fixed across numpy versions and machines. The logarithms are always taken on the CPU,
    so a device gets the very values that its host's CPU has; two kinds of CPU may differ in the
    last bit.

    Args:
        seed: 0 <= seed < 2**64.
        position: t >= 0, counted from the first token of the prompt.
        vocab_size: V.
        device: where the result is wanted.

    Source: counter-based generators, Salmon et al., SC 2011.

    >>> bool((gumbel_noise(3, 10, 5) == gumbel_noise(3, 10, 5)).all())
    True
    """
    # The counter's second word holds the position, so that positions can never overlap.
    bits = np.random.Philox(key=seed, counter=[0, position, 0, 0]).random_raw((vocab_size + 1) // 2)
    noise = torch.from_numpy(bits.view(np.uint32)[:vocab_size].astype(np.float32))
    # -u: u near 0 is the rare end and float32 is finest there; u that rounded to 1 would give -inf.
    noise.add_(0.5).mul_(-(2.0**-32)).clamp_(min=-(1 - 2.0**-24))
    return noise.log1p_().neg_().log_().neg_().to(device)


class Noise:
    """The noise of one request: drawn once per position, and kept until it is forgotten.

    A position is drafted in several rounds and walked in the last of them; all see one row.

    Args:
        seed: 0 <= seed < 2**64.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._rows: dict[int, Float32[Tensor, " V"]] = {}

    def row(
        self, position: int, vocab_size: int, device: torch.device | str = "cpu"
    ) -> Float32[Tensor, " V"]:
        """As `gumbel_noise` of this seed; not to be written to."""
        row = self._rows.get(position)
        if row is None or row.shape[0] != vocab_size or row.device != torch.device(device):
            row = self._rows[position] = gumbel_noise(self.seed, position, vocab_size, device)
        return row

    def forget_before(self, position: int) -> None:
        """Drop the rows of positions that are decided."""
        for decided in [t for t in self._rows if t < position]:
            del self._rows[decided]
