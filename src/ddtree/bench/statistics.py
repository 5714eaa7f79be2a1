"""Intervals by the paired bootstrap over prompts: what another draw of prompts would have shown.

Every figure here is a function of sums over prompts. A resample draws as many prompts as a suite
has, with replacement and each suite for itself, and forms the figure anew from the sums. All arms
of a suite see the same resamples, and a prompt brings all its arms and turns along: that is the
pairing. The draws depend on the seed, the suite's name and its number of prompts alone, so the same
results always give the same intervals.

Knows no arms and no files. The intervals are percentiles of the resamples; with few prompts they
come out somewhat narrow (about 90% instead of 95% with ten).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

# From sums [resamples, columns] to the figure of each resample.
Statistic = Callable[[Float64[ndarray, "R columns"]], Float64[ndarray, " R"]]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure and its interval.

    Args:
        value: of the prompts as they are.
        low, high: ends of the interval; None where a suite has one prompt, which says nothing about
            others.
    """

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Stratum:
    """What one suite's prompts add up to.

    Args:
        name: of the suite; decides the draws.
        sums: [prompts, columns], in the same order for every arm.
    """

    name: str
    sums: Float64[ndarray, "prompts columns"]


@dataclass(frozen=True, kw_only=True)
class Bootstrap:
    """How intervals are made.

    Args:
        num_resamples: draws of each suite.
        level: share of the resamples between the ends of an interval.
        seed: of the draws.
    """

    num_resamples: int = 10_000
    level: float = 0.95
    seed: int = 0
    _drawn: dict[tuple[str, int], Float64[ndarray, "R prompts"]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def counts(self, name: str, num_prompts: int) -> Float64[ndarray, "R prompts"]:
        """How often each resample has each prompt of a suite; rows add up to `num_prompts`."""
        key = (name, num_prompts)
        if key not in self._drawn:
            # crc32 and not hash(): the same in every process.
            generator = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
            even = np.full(num_prompts, 1 / num_prompts)
            drawn = generator.multinomial(num_prompts, even, size=self.num_resamples)
            self._drawn[key] = drawn.astype(np.float64)
        return self._drawn[key]

    def estimate(self, strata: Sequence[Stratum], statistic: Statistic) -> Estimate:
        """A figure, the mean over suites where there are several, and its interval.

        Args:
            strata: one suite, or several, each of which is resampled for itself.
            statistic: from sums over a suite's prompts to its figure.

        >>> sums = np.array([[1.0, 1.0], [3.0, 1.0]])
        >>> Bootstrap().estimate([Stratum(name="s", sums=sums)], ratio)
        Estimate(value=2.0, low=1.0, high=3.0)
        """
        value = np.mean([statistic(s.sums.sum(axis=0, keepdims=True))[0] for s in strata])
        if any(len(s.sums) < 2 for s in strata):
            return Estimate(value=float(value))
        drawn = [statistic(self.counts(s.name, len(s.sums)) @ s.sums) for s in strata]
        outside = (1 - self.level) / 2
        low, high = np.quantile(np.mean(drawn, axis=0), [outside, 1 - outside])
        return Estimate(value=float(value), low=float(low), high=float(high))


def ratio(sums: Float64[ndarray, "R 2"]) -> Float64[ndarray, " R"]:
    """The first column by the second."""
    quotient: Float64[ndarray, " R"] = sums[:, 0] / sums[:, 1]
    return quotient


def ratio_of_ratios(sums: Float64[ndarray, "R 4"]) -> Float64[ndarray, " R"]:
    """The ratio of the first two columns by that of the last two."""
    quotient: Float64[ndarray, " R"] = ratio(sums[:, :2]) / ratio(sums[:, 2:])
    return quotient


def difference_of_ratios(sums: Float64[ndarray, "R 4"]) -> Float64[ndarray, " R"]:
    """The ratio of the last two columns less that of the first two."""
    difference: Float64[ndarray, " R"] = ratio(sums[:, 2:]) - ratio(sums[:, :2])
    return difference
