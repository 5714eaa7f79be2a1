"""Gumbel noise by seed and position, operation by operation.

The readable twin that defines `native/gumbel.c`. Both give the same bits on every machine whose
floats are IEEE 754's: integers, then additions and multiplications of float32 in this order, each
rounded for itself, and no mathematical library. Knows no logits.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32, Int32, UInt32
from numpy import ndarray

_LN_2 = np.float32(0.6931471824645996)
# log(1 + s) = s - s^2 / 2 + s^3 P(s), P fitted on [sqrt(1/2) - 1, sqrt(2) - 1]: one unit in the
# last place at most.
_COEFFICIENTS = np.array(
    [
        0.333333283662796,
        -0.25000298023223877,
        0.20001468062400818,
        -0.16642247140407562,
        0.14202174544334412,
        -0.12972238659858704,
        0.12712307274341583,
        -0.08101558685302734,
    ],
    np.float32,
)
# sqrt(1/2) as a float's bits: from here on, a number counts as of the next power of 2.
_SQRT_HALF = np.int32(0x3F3504F3)


def gumbel(seed: int, position: int, vocab_size: int) -> Float32[ndarray, " V"]:
    """G(v) ~ Gumbel(0, 1) iid over the vocabulary, for the token at one position.

    Args:
        seed: 0 <= seed < 2**64, the key of numpy's Philox generator.
        position: t >= 0, the second word of its counter: no two positions share bits.
        vocab_size: V.

    Source: counter-based generators, Salmon et al., SC 2011.

    >>> gumbel(0, 0, 4).round(2).tolist() == gumbel(0, 0, 5)[:4].round(2).tolist()
    True
    """
    generator = np.random.Philox(key=seed, counter=[0, position, 0, 0])
    words = generator.random_raw((vocab_size + 1) // 2)
    return from_bits(words.view(np.uint32)[:vocab_size])


def from_bits(bits: UInt32[ndarray, " V"]) -> Float32[ndarray, " V"]:
    """-log(-log(1 - u)) with u = (bits + 1/2) / 2**32: u near 0, where floats are finest, is rare.

    >>> [round(float(g), 4) for g in from_bits(np.array([0, 2**32 - 1], np.uint32))]
    [22.8739, -3.13]
    """
    half, scale = np.float32(0.5), np.float32(2.0**-32)
    u = (bits.astype(np.float32) + half) * scale
    power, s = _split((np.invert(bits).astype(np.float32) + half) * scale)
    # Near 1, 1 - u has lost what u still knows.
    exponential = -_log(power, np.where(power == 0, -u, s))
    return -_log(*_split(exponential))


def _split(x: Float32[ndarray, " V"]) -> tuple[Int32[ndarray, " V"], Float32[ndarray, " V"]]:
    """k and s with x = 2**k (1 + s), 1 + s from sqrt(1/2) to sqrt(2)."""
    bits = x.view(np.int32)
    power = (bits - _SQRT_HALF) >> 23
    return power, (bits - (power << 23)).view(np.float32) - np.float32(1.0)


def _log(power: Int32[ndarray, " V"], s: Float32[ndarray, " V"]) -> Float32[ndarray, " V"]:
    """The logarithm of 2**power (1 + s)."""
    c = _COEFFICIENTS
    s2 = s * s
    low = (c[0] + s * c[1]) + s2 * (c[2] + s * c[3])
    high = (c[4] + s * c[5]) + s2 * (c[6] + s * c[7])
    p = low + (s2 * s2) * high
    found: Float32[ndarray, " V"]
    found = power.astype(np.float32) * _LN_2 + (s + s2 * (s * p - np.float32(0.5)))
    return found
