"""What a step of an engine costs: by the rows of its forward and the requests that are drafted for.

A step verifies the rows of all its requests in one forward, prompt chunks included, and may run a
drafter pass for the next trees. Both are measured when the engine starts and corrected by every
step that is timed. Knows no engine and no clock: seconds are arguments, so equal calls in equal
order leave equal costs, on whatever machine. Letters in shapes: P measured points, S places, F =
P + 1 factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

# Of the last steps, so many weigh on how slow the machine is thought to be.
_MEMORY_STEPS = 24
# The first steps compile, allocate and fill caches: until so many are known their median counts.
_FIRST_STEPS = 5
# One slow step, of a busy machine, must not weigh like ten.
_MOST_AT_ONCE = 2.0
# Variances, in units of a step's noise. Steps without a draft are few, so they are listened to. A
# measured point is as doubtful as a step, a drafter pass, a small part of one, by far more so.
_NOISE, _PLAIN_NOISE = 1.0, 0.2
_DOUBT, _DRAFT_DOUBT = 1.0, 25.0
# What one point is wrong by, its neighbours are by so much of it, until steps tell them apart.
_LIKENESS = 0.8
# Of the first doubt, so much comes back in each step: some 25 steps are then what counts.
_FORGETTING = 1.0 / 600
_LEAST_FACTOR, _MOST_FACTOR = 0.1, 10.0


@dataclass(frozen=True)
class _Curve:
    """Seconds between measured points: straight lines, carried on beyond the last.

    Args:
        points: what was measured, rising.
        seconds: of each.
    """

    points: Float64[ndarray, " P"]
    seconds: Float64[ndarray, " P"]

    @classmethod
    def measured(cls, points: Sequence[int], seconds: Sequence[float]) -> _Curve:
        """More never takes less: what looks so is noise."""
        x, y = np.array(points, np.float64), np.array(seconds, np.float64)
        assert len(x) == len(y) > 0, "as many seconds as points"
        assert x[0] >= 1, "points of one row or request and more"
        assert bool(np.all(np.diff(x) > 0)), "points that rise"
        assert bool(np.all(np.isfinite(y))), "seconds that are numbers"
        assert bool(np.all(y > 0)), "seconds above 0"
        return cls(x, np.maximum.accumulate(y))

    def at(self, place: int) -> float:
        """Seconds at a place."""
        return float(self.along(np.array([place], np.float64))[0])

    def along(self, places: Float64[ndarray, " S"]) -> Float64[ndarray, " S"]:
        """Seconds at each place; below the first point as there."""
        found: Float64[ndarray, " S"] = np.interp(places, self.points, self.seconds)
        if len(self.points) > 1:
            rise = (self.seconds[-1] - self.seconds[-2]) / (self.points[-1] - self.points[-2])
            found += max(0.0, float(rise)) * np.maximum(places - self.points[-1], 0.0)
        return found

    def parts(self, place: int) -> Float64[ndarray, " P"]:
        """The seconds at a place as a sum over the points, of which at most two are not 0."""
        found = np.zeros(len(self.points))
        right = min(int(np.searchsorted(self.points, place)), len(self.points) - 1)
        if place <= self.points[0] or right == 0:
            found[0] = self.seconds[0]
            return found
        x0, x1 = self.points[right - 1], self.points[right]
        along = (place - x0) / (x1 - x0)  # above 1 beyond the last point
        found[right - 1 : right + 1] = self.seconds[right - 1 : right + 1] * [1.0 - along, along]
        return found


class StepCosts:
    """Seconds of a step, as measured and as corrected by steps since; see `measured`.

    Only ratios are learnt: a machine that slows down as a whole, or contexts that grow, change all
    costs alike and so no decision. What a step takes beyond that is laid on its parts, the two
    measured points around its rows and the drafter pass, by how large and how doubtful each is: a
    Kalman filter of the factors that these are to be multiplied by.

    Tensor-parallel ranks: measure on rank 0 and send the object (it is picklable) to the others,
    then give every rank rank 0's seconds of each step.
    """

    def __init__(self, verify: _Curve, draft: _Curve) -> None:
        self._measured, self._measured_draft = verify, draft
        # What each point's seconds, and last a drafter pass's, are multiplied by.
        self._factors = np.ones(len(verify.points) + 1)
        self._first_doubt = self._doubt = _first_doubt(len(verify.points))
        self._first_ratios: list[float] = []
        self._num_steps, self._slowness = 0, 1.0
        self._corrected = verify

    @classmethod
    def measured(
        cls,
        rows: Sequence[int],
        seconds: Sequence[float],
        *,
        draft_requests: Sequence[int],
        draft_seconds: Sequence[float],
    ) -> StepCosts:
        """From a few timed forwards and drafter passes.

        Args:
            rows: of each forward, rising. The last two say how costs go on beyond.
            seconds: of a forward with its walk, for each of `rows`. Where more rows took less, the
                larger number counts.
            draft_requests: how many requests each drafter pass was for, rising.
            draft_seconds: of such a pass with its top-k.

        >>> costs = StepCosts.measured(
        ...     [1, 9, 17], [0.010, 0.012, 0.020], draft_requests=[1], draft_seconds=[0.002]
        ... )
        >>> costs.verify_s(13), costs.verify_s(25), costs.draft_s(3), costs.draft_s(0)
        (0.016, 0.028, 0.002, 0.0)
        """
        return cls(_Curve.measured(rows, seconds), _Curve.measured(draft_requests, draft_seconds))

    @property
    def slowness(self) -> float:
        """Seconds that steps took lately over what was measured for them."""
        return self._slowness

    def verify_s(self, num_rows: int) -> float:
        """Seconds of a forward of so many rows, on the machine as it was measured."""
        return self._corrected.at(num_rows)

    def verify_by_rows(self, first: int, count: int) -> Float64[ndarray, " count"]:
        """Seconds of a forward of `first`, `first` + 1, ... rows, of which more never cost less."""
        rows = np.arange(first, first + count, dtype=np.float64)
        found: Float64[ndarray, " count"] = np.maximum.accumulate(self._corrected.along(rows))
        return found

    def draft_s(self, num_requests: int) -> float:
        """Seconds of a drafter pass for so many requests; for none there is no pass."""
        if num_requests == 0:
            return 0.0
        return float(self._factors[-1]) * self._measured_draft.at(num_requests)

    def observe(self, *, num_rows: int, num_drafted: int, seconds: float) -> None:
        """Learn from a step.

        Args:
            num_rows: of its forward: roots, nodes and prompt chunks.
            num_drafted: requests of the drafter pass in these seconds; 0 where there was none.
            seconds: how long it took, above 0.
        """
        assert seconds > 0, "a clock that stands still"
        parts = np.append(self._measured.parts(num_rows), 0.0)
        if num_drafted > 0:
            parts[-1] = self._measured_draft.at(num_drafted)
        took = self._relative(seconds / float(parts.sum()))
        parts /= parts.sum()

        doubt = (1.0 - _FORGETTING) * self._doubt + _FORGETTING * self._first_doubt
        shared = doubt @ parts
        gains = shared / (parts @ shared + (_NOISE if num_drafted > 0 else _PLAIN_NOISE))
        factors = self._factors + gains * (took - parts @ self._factors)
        self._doubt = doubt - np.outer(gains, shared)
        self._factors = factors.clip(_LEAST_FACTOR, _MOST_FACTOR)
        corrected = self._measured.seconds * self._factors[:-1]
        self._corrected = _Curve(self._measured.points, corrected)

    def _relative(self, ratio: float) -> float:
        """A step's seconds over those measured, relative to what is usual; learns what is usual."""
        self._num_steps += 1
        if self._num_steps <= _FIRST_STEPS:
            self._first_ratios.append(ratio)
            self._slowness = sorted(self._first_ratios)[(self._num_steps - 1) // 2]
            return min(ratio / self._slowness, _MOST_AT_ONCE)
        ratio = min(ratio, _MOST_AT_ONCE * self._slowness)
        self._slowness += (ratio - self._slowness) / min(self._num_steps, _MEMORY_STEPS)
        return ratio / self._slowness


def _first_doubt(num_points: int) -> Float64[ndarray, "F F"]:
    """Covariances of the factors before any step: of the points, and last of the drafter pass."""
    places = np.arange(num_points)
    found = np.zeros((num_points + 1, num_points + 1))
    found[:-1, :-1] = _DOUBT * _LIKENESS ** np.abs(places[:, None] - places)
    found[-1, -1] = _DRAFT_DOUBT
    return found
