"""Gumbel noise that depends on the seed and the position alone (DESIGN 5).

Which rows a round verified, and how many rounds there were, leave no trace in it: that is why one
seed gives one text, whatever the method.
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
    stream is fixed across numpy versions and machines. The two logarithms may differ between
    devices in the last bit.

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
    uniform = bits.view(np.uint32)[:vocab_size].astype(np.float32)
    uniform = (uniform + np.float32(0.5)) * np.float32(2.0**-32)
    # u near 0 is the rare end and float32 is finest there; u that rounded to 1 would give -inf.
    exponential = -torch.log1p(-torch.from_numpy(uniform).clamp_(max=1 - 2.0**-24))
    return -torch.log(exponential).to(device)
