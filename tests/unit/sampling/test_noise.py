"""Gumbel noise: a function of seed and position alone, with the right distribution."""

import hashlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddtree.sampling import gumbel
from ddtree.sampling import noise as noise_module
from ddtree.sampling.noise import Noise, gumbel_noise
from ddtree.tree import native

seeds = st.integers(0, 2**64 - 1)
positions = st.integers(0, 2**40)

MASK = 2**64 - 1
EULER_GAMMA = 0.5772156649


def philox(key: int, counter: int) -> list[int]:
    """Philox 4x64 with 10 rounds, written out from Salmon et al. (SC 2011)."""
    words = [(counter >> (64 * i)) & MASK for i in range(4)]
    key_0, key_1 = key, 0
    for _ in range(10):
        left, right = 0xD2E7470EE14C6C93 * words[0], 0xCA5A826395121157 * words[2]
        words = [
            (right >> 64) ^ words[1] ^ key_0,
            right & MASK,
            (left >> 64) ^ words[3] ^ key_1,
            left & MASK,
        ]
        key_0 = (key_0 + 0x9E3779B97F4A7C15) & MASK
        key_1 = (key_1 + 0xBB67AE8584CAA73B) & MASK
    return words


def uniforms_by_hand(seed: int, position: int, vocab_size: int) -> list[float]:
    halves: list[int] = []
    block = 0
    while len(halves) < vocab_size:
        block += 1  # the generator counts up before it draws
        for word in philox(seed, (position << 64) + block):
            halves += [word & 0xFFFFFFFF, word >> 32]
    return [(half + 0.5) / 2**32 for half in halves[:vocab_size]]


@pytest.fixture(scope="module")
def draws() -> torch.Tensor:
    return torch.cat([gumbel_noise(11, position, 20_000) for position in range(10)]).double()


@pytest.mark.parametrize(
    ("seed", "position", "expected"),
    [
        (0, 0, [3.3421806, 4.4555495, 0.0548557, 1.2856264, 0.7877029]),
        (0, 1, [-1.2468372, 1.4351529, 1.2848611, 1.4156527, 0.2054756]),
        (1, 0, [0.4886145, 1.0167047, -0.2679981, -0.6358085, 0.4694133]),
        (2**64 - 1, 1000, [-1.0055372, 1.7748323, 3.2000626, 2.3298579, 1.3176107]),
    ],
)
def test_first_values_are_the_ones_written_here(
    seed: int, position: int, expected: list[float]
) -> None:
    actual = gumbel_noise(seed, position, len(expected)).tolist()
    assert actual == pytest.approx(expected, abs=1e-6)


@given(seeds, positions, st.integers(1, 40))
def test_noise_is_philox_of_seed_and_position_written_out(
    seed: int, position: int, vocab_size: int
) -> None:
    uniforms = uniforms_by_hand(seed, position, vocab_size)
    for actual, u in zip(gumbel_noise(seed, position, vocab_size).tolist(), uniforms, strict=True):
        exponential = -math.log1p(-u)
        # float32 keeps 24 bits of u; the logarithms magnify that where u is near 1.
        rounding = 2**-24 / ((1 - u) * exponential) if u > 0.5 else 0.0
        assert actual == pytest.approx(-math.log(exponential), rel=1e-6, abs=1e-6 + rounding)


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype == np.float32 and one.tobytes() == other.tobytes()


@pytest.mark.skipif(not native.AVAILABLE, reason="no compiled core here")
@given(seeds, positions, st.sampled_from([1, 5, 8, 255, 256, 257, 1000, 49_152]))
def test_the_compiled_noise_is_its_twins_bit_for_bit(
    seed: int, position: int, vocab_size: int
) -> None:
    compiled = native.gumbel(seed, position, vocab_size)
    assert same_bits(compiled, gumbel.gumbel(seed, position, vocab_size))


@pytest.mark.parametrize(
    ("seed", "position", "digest"),
    [(0, 0, "05ed2b8a0de57559"), (2**64 - 1, 2**40, "08b44078bda2d68b")],
)
def test_noise_has_the_bits_that_it_has_on_every_machine(
    seed: int, position: int, digest: str
) -> None:
    noise = gumbel_noise(seed, position, 49_152).numpy()
    assert hashlib.sha256(noise.astype("<f4").tobytes()).hexdigest()[:16] == digest


def test_no_draw_is_further_from_the_true_value_than_floats_are() -> None:
    steps = np.arange(0, 2**32, 4801, dtype=np.uint64)
    edges = np.concatenate([np.arange(500), 2**32 - 1 - np.arange(500)])
    bits = np.concatenate([steps, edges.astype(np.uint64)])
    u = (bits + 0.5) / 2**32
    expected = -np.log(-np.log1p(-u))
    found = gumbel.from_bits(bits.astype(np.uint32))
    # Where the exponential is near 1 its last bit counts in full, elsewhere that of the result.
    assert (abs(found - expected) <= 3 * 2**-24 * np.maximum(abs(expected), 4)).all()


@given(seeds, positions, st.integers(1, 300))
def test_asking_again_gives_the_same_noise_whatever_was_drawn_between(
    seed: int, position: int, vocab_size: int
) -> None:
    first = gumbel_noise(seed, position, vocab_size)
    torch.rand(3)
    gumbel_noise(seed ^ 1, position + 1, vocab_size + 1)
    assert torch.equal(gumbel_noise(seed, position, vocab_size), first)


def test_noise_leaves_the_global_generators_alone() -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    gumbel_noise(3, 4, 100)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert (np.random.get_state()[1] == numpy_state).all()


@given(st.tuples(seeds, positions), st.tuples(seeds, positions))
def test_other_seeds_or_positions_give_other_noise(
    one: tuple[int, int], other: tuple[int, int]
) -> None:
    same = torch.equal(gumbel_noise(*one, 8), gumbel_noise(*other, 8))
    assert same == (one == other)


@pytest.mark.parametrize("other", [(4, 10), (3, 11), (10, 3), (3 + 2**63, 10), (3, 10 + 2**32)])
def test_near_and_far_seeds_and_positions_are_uncorrelated(other: tuple[int, int]) -> None:
    pair = torch.stack([gumbel_noise(3, 10, 40_000), gumbel_noise(*other, 40_000)])
    # Standard error 0.005; four of them.
    assert abs(torch.corrcoef(pair)[0, 1].item()) < 0.02


@given(seeds, positions, st.integers(1, 200), st.integers(1, 200))
def test_a_larger_vocabulary_begins_with_the_noise_of_a_smaller_one(
    seed: int, position: int, one: int, other: int
) -> None:
    small, large = sorted([one, other])
    expected = gumbel_noise(seed, position, small)
    torch.testing.assert_close(
        gumbel_noise(seed, position, large)[:small], expected, rtol=0, atol=1e-6
    )


def test_mean_and_variance_are_those_of_the_gumbel_distribution(draws: torch.Tensor) -> None:
    # 200,000 draws: standard errors 0.0029 and 0.0077, so tolerances of about four.
    assert draws.mean().item() == pytest.approx(EULER_GAMMA, abs=0.012)
    assert draws.var().item() == pytest.approx(math.pi**2 / 6, abs=0.031)


def test_distribution_function_is_that_of_the_gumbel_distribution(draws: torch.Tensor) -> None:
    expected = torch.exp(-torch.exp(-draws.sort().values))
    empirical = (torch.arange(len(draws), dtype=torch.float64) + 0.5) / len(draws)
    # Kolmogorov-Smirnov at p = 0.001.
    assert (expected - empirical).abs().max().item() < 1.95 / math.sqrt(len(draws))


def test_noise_is_finite_for_the_most_extreme_bits() -> None:
    noise = gumbel.from_bits(np.array([0, 1, 2**31, 2**32 - 2, 2**32 - 1], np.uint32))
    assert np.isfinite(noise).all()
    assert (noise[:-1] > noise[1:]).all()


def test_noise_is_finite_over_many_draws(draws: torch.Tensor) -> None:
    assert torch.isfinite(draws).all()


def test_noise_is_float32_of_the_vocabularys_size_even_if_odd() -> None:
    for vocab_size in (1, 2, 3, 7, 8, 9):
        noise = gumbel_noise(0, 0, vocab_size)
        assert noise.dtype == torch.float32
        assert noise.shape == (vocab_size,)


# What is kept.


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The positions that were drawn, in order."""
    positions: list[int] = []

    def counted(seed: int, position: int, vocab_size: int, device: object) -> torch.Tensor:
        positions.append(position)
        return gumbel_noise(seed, position, vocab_size)

    monkeypatch.setattr(noise_module, "gumbel_noise", counted)
    return positions


def test_a_kept_row_is_the_noise_of_its_seed_and_position() -> None:
    noise = Noise(7)
    for position in (3, 4, 3, 900):
        assert torch.equal(noise.row(position, 50), gumbel_noise(7, position, 50))


def test_a_row_is_drawn_once_until_its_position_is_decided(drawn: list[int]) -> None:
    noise = Noise(7)
    for _ in range(3):
        for position in (5, 6, 7):
            noise.row(position, 50)
    noise.forget_before(7)
    noise.row(7, 50)
    assert drawn == [5, 6, 7]
    noise.row(6, 50)
    assert drawn == [5, 6, 7, 6]


def test_a_row_of_another_size_is_drawn_anew(drawn: list[int]) -> None:
    noise = Noise(7)
    assert [noise.row(5, size).shape[0] for size in (50, 60, 60, 50)] == [50, 60, 60, 50]
    assert drawn == [5, 5, 5]
