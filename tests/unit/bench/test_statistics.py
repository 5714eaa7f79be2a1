"""Intervals: the bootstrap against cases whose distribution is known."""

from __future__ import annotations

from collections import Counter
from math import factorial

import numpy as np
import pytest

from ddtree.bench.statistics import (
    Bootstrap,
    Estimate,
    Stratum,
    difference_of_ratios,
    ratio,
    ratio_of_ratios,
)


def suite(values: list[float] | np.ndarray, name: str = "s") -> Stratum:
    """Rows whose ratio is a mean."""
    return Stratum(name=name, sums=np.stack([values, np.ones(len(values))], axis=1))


def test_resamples_are_multinomial() -> None:
    drawn = Counter(map(tuple, Bootstrap().counts("s", 3).astype(int).tolist()))
    assert len(drawn) == 10  # every way to draw three times from three
    for counts, number in drawn.items():
        ways = factorial(3) / np.prod([factorial(n) for n in counts])
        expected = ways / 27
        assert number / 10_000 == pytest.approx(expected, abs=5 * np.sqrt(expected / 10_000))


def test_two_prompts_give_the_ends_that_enumeration_gives() -> None:
    # Means 2, 3, 4 with probabilities 1/4, 1/2, 1/4.
    two = [suite([2.0, 4.0])]
    assert Bootstrap(level=0.95).estimate(two, ratio) == Estimate(value=3.0, low=2.0, high=4.0)
    assert Bootstrap(level=0.40).estimate(two, ratio) == Estimate(value=3.0, low=3.0, high=3.0)


def test_three_prompts_give_the_ends_that_enumeration_gives() -> None:
    # Sums of three draws from 0, 1, 5, of 27: 0 once, 1 and 2 three times each, ... 10 and 11
    # three times each, 15 once. Below 1/27 is 0, below 4/27 is 1: 10% lies among the 1s.
    three = [suite([0.0, 1.0, 5.0])]
    assert Bootstrap(level=0.80).estimate(three, ratio) == Estimate(
        value=2.0, low=pytest.approx(1 / 3), high=pytest.approx(11 / 3)
    )
    assert Bootstrap(level=0.95).estimate(three, ratio) == Estimate(value=2.0, low=0.0, high=5.0)


def test_a_ratio_is_formed_anew_from_the_sums_of_each_resample() -> None:
    # 10 tokens in 10 rounds, 30 in 5: 40 / 15, not the mean of 1 and 6; drawn twice, 1 and 6.
    sums = np.array([[10.0, 10.0], [30.0, 5.0]])
    found = Bootstrap().estimate([Stratum(name="s", sums=sums)], ratio)
    assert (found.value, found.low, found.high) == (pytest.approx(40 / 15), 1.0, 6.0)


def test_ratios_of_totals_and_differences_are_what_they_say() -> None:
    sums = np.array([[8.0, 2.0, 4.0, 4.0]])
    assert ratio_of_ratios(sums).tolist() == [4.0]
    assert difference_of_ratios(sums).tolist() == [-3.0]


def test_intervals_cover_the_mean_of_a_normal_as_often_as_they_say() -> None:
    generator = np.random.default_rng(1)
    bootstrap = Bootstrap(num_resamples=1_000)
    covered = 0
    for _ in range(400):
        found = bootstrap.estimate([suite(generator.normal(3.0, 2.0, 40))], ratio)
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 3.0 <= found.high
    assert 0.91 <= covered / 400 <= 0.97


def test_a_width_is_that_of_the_standard_error() -> None:
    values = np.random.default_rng(2).normal(0.0, 1.0, 200)
    found = Bootstrap().estimate([suite(values)], ratio)
    assert found.high is not None
    assert found.low is not None
    expected = 2 * 1.96 * values.std() / np.sqrt(200)
    assert found.high - found.low == pytest.approx(expected, rel=0.05)


def test_pairing_shrinks_the_interval_of_a_difference() -> None:
    generator = np.random.default_rng(3)
    hard = generator.normal(5.0, 2.0, 50)
    faster = hard + 0.1 + generator.normal(0.0, 0.05, 50)
    ones = np.ones(50)

    def width(after: np.ndarray) -> float:
        sums = np.stack([hard, ones, after, ones], axis=1)
        found = Bootstrap().estimate([Stratum(name="s", sums=sums)], difference_of_ratios)
        assert found.low is not None
        assert found.high is not None
        return found.high - found.low

    assert 20 * width(faster) < width(generator.permutation(faster))


def test_the_mean_over_suites_draws_each_suite_for_itself() -> None:
    # Means 0, 1, 2 and 10, 11, 12, each with 1/4, 1/2, 1/4: the lowest of both has 1/16.
    suites = [suite([0.0, 2.0], "a"), suite([10.0, 12.0], "b")]
    found = Bootstrap(level=0.95).estimate(suites, ratio)
    assert found == Estimate(value=6.0, low=5.0, high=7.0)
    # If both were drawn alike, 5 would have 1/4 and be the 20% quantile too.
    assert Bootstrap(level=0.6).estimate(suites, ratio) == Estimate(value=6.0, low=5.5, high=6.5)


def test_one_prompt_gives_no_interval_alone_or_among_suites() -> None:
    alone = [suite([4.0])]
    assert Bootstrap().estimate(alone, ratio) == Estimate(value=4.0)
    assert Bootstrap().estimate([*alone, suite([0.0, 2.0], "b")], ratio) == Estimate(value=2.5)


def test_prompts_that_are_all_alike_give_an_interval_without_width() -> None:
    found = Bootstrap().estimate([suite([1.5] * 4)], ratio)
    assert found == Estimate(value=1.5, low=1.5, high=1.5)


def test_the_same_seed_gives_the_same_interval_and_another_seed_another() -> None:
    values = [suite(np.random.default_rng(4).normal(0.0, 1.0, 30))]
    found = Bootstrap().estimate(values, ratio)
    assert Bootstrap().estimate(values, ratio) == found
    assert Bootstrap(seed=1).estimate(values, ratio) != found
