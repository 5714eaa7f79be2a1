"""How often a drafter's marginals name what was said, and whether they believe it rightly.

Pure counting: marginals on one side, the text that followed on the other. Counts of several texts
add up, so a run can keep them per prompt and sum at the end. Knows no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from ddtree.overhear import Proposal

NUM_RANKS = 16
"""K, the ranks per depth that are looked at."""

TOP_RANKS = (1, 5, 16)
"""A depth is a hit at k if the token that was said is among its k most probable ones."""

# Equal steps in log-odds, 20 bins: fine near 0, where most tokens are, and near 1 alike.
_BIN_EDGES = 1 / (1 + np.exp(-np.arange(-9.0, 10.0)))
NUM_BINS = len(_BIN_EDGES) + 1

Table = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class HitCounts:
    """Hits by depth.

    Args:
        num_positions: [L], how often a token was said at this depth.
        num_hits: [len(TOP_RANKS)][L], how often it was among the k best.
    """

    num_positions: tuple[int, ...]
    num_hits: Table

    @classmethod
    def total(cls, parts: Sequence[HitCounts]) -> HitCounts:
        """The sum of at least one."""
        return cls(
            num_positions=_row(np.sum([part.num_positions for part in parts], axis=0)),
            num_hits=_table(np.sum([part.num_hits for part in parts], axis=0)),
        )

    def accuracy(self) -> DepthAccuracy:
        """Shares in place of counts."""
        positions = np.array(self.num_positions)
        shares = [_ratio(np.array(hits), positions) for hits in self.num_hits]
        return DepthAccuracy(
            num_positions=self.num_positions, top_1=shares[0], top_5=shares[1], top_16=shares[2]
        )


@dataclass(frozen=True, kw_only=True)
class DepthAccuracy:
    """Share of positions whose token is among the k most probable, by depth.

    Args:
        num_positions: [L], of the text.
        top_1: [L]; NaN at a depth without positions.
        top_5: [L].
        top_16: [L].
    """

    num_positions: tuple[int, ...]
    top_1: tuple[float, ...]
    top_5: tuple[float, ...]
    top_16: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class BinCounts:
    """Proposed tokens by depth and predicted probability.

    Args:
        num_tokens: [L][NUM_BINS].
        num_said: [L][NUM_BINS], how many of them were said.
        mass: [L][NUM_BINS], the sum of their predicted probabilities.
    """

    num_tokens: Table
    num_said: Table
    mass: tuple[tuple[float, ...], ...]

    @classmethod
    def total(cls, parts: Sequence[BinCounts]) -> BinCounts:
        """The sum of at least one."""
        return cls(
            num_tokens=_table(np.sum([part.num_tokens for part in parts], axis=0)),
            num_said=_table(np.sum([part.num_said for part in parts], axis=0)),
            mass=tuple(map(tuple, np.sum([part.mass for part in parts], axis=0).tolist())),
        )

    def calibration(self) -> Calibration:
        """Curves in place of counts."""
        tables = [np.array(t) for t in (self.num_tokens, self.num_said, self.mass)]
        return Calibration(
            pooled=_curve(*(table.sum(axis=0) for table in tables)),
            by_depth=tuple(_curve(*rows) for rows in zip(*tables, strict=True)),
        )


@dataclass(frozen=True, kw_only=True)
class CalibrationCurve:
    """Predicted against observed, by bin of predicted probability.

    Args:
        num_tokens: [NUM_BINS], proposed tokens.
        predicted: [NUM_BINS], their mean predicted probability; NaN in an empty bin.
        observed: [NUM_BINS], the share of them that was said; NaN in an empty bin.
        error: expected calibration error: the mean over tokens of |observed - predicted| of their
            bin; NaN without any.
    """

    num_tokens: tuple[int, ...]
    predicted: tuple[float, ...]
    observed: tuple[float, ...]
    error: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """One curve over all depths, and one for each."""

    pooled: CalibrationCurve
    by_depth: tuple[CalibrationCurve, ...]


def count_hits(
    proposals: Iterable[Proposal], token_ids: Sequence[int], num_depths: int
) -> HitCounts:
    """Compare proposals with the text that they were about.

    Args:
        proposals: of at most `num_depths` depths each.
        token_ids: the whole text, prompt included; depths beyond its end do not count.
        num_depths: L.
    """
    positions = np.zeros(num_depths, np.int64)
    hits = np.zeros((len(TOP_RANKS), num_depths), np.int64)
    for proposal in proposals:
        said = proposal.said(token_ids)
        depths = slice(0, said.shape[0])
        positions[depths] += 1
        for place, k in enumerate(TOP_RANKS):
            hits[place, depths] += said[:, :k].any(axis=1)
    return HitCounts(num_positions=_row(positions), num_hits=_table(hits))


def count_bins(
    proposals: Iterable[Proposal], token_ids: Sequence[int], num_depths: int, *, num_ranks: int
) -> BinCounts:
    """Sort proposed tokens into bins of predicted probability.

    Args:
        proposals: of at most `num_depths` depths each.
        token_ids: the whole text, prompt included; depths beyond its end do not count.
        num_depths: L.
        num_ranks: how many of the best tokens per depth to take.
    """
    shape = (num_depths, NUM_BINS)
    tokens, hits, mass = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape)
    for proposal in proposals:
        said = proposal.said(token_ids)[:, :num_ranks]
        log_probs = proposal.marginals.log_probs[: said.shape[0], :num_ranks]
        probabilities = np.exp(log_probs.astype(np.float64))
        bins = np.searchsorted(_BIN_EDGES, probabilities, side="right")
        place = (np.arange(said.shape[0])[:, None], bins)
        np.add.at(tokens, place, 1)
        np.add.at(hits, place, said)
        np.add.at(mass, place, probabilities)
    return BinCounts(
        num_tokens=_table(tokens), num_said=_table(hits), mass=tuple(map(tuple, mass.tolist()))
    )


def _curve(tokens: ndarray, said: ndarray, mass: ndarray) -> CalibrationCurve:
    total = tokens.sum()
    return CalibrationCurve(
        num_tokens=_row(tokens),
        predicted=_ratio(mass, tokens),
        observed=_ratio(said, tokens),
        error=float(np.abs(said - mass).sum() / total) if total else float("nan"),
    )


def _ratio(part: ndarray, whole: ndarray) -> tuple[float, ...]:
    """Part by whole; NaN where the whole is 0."""
    shares = np.divide(part, whole, out=np.full(len(whole), np.nan), where=whole > 0)
    return tuple(float(share) for share in shares)


def _row(counts: ndarray) -> tuple[int, ...]:
    return tuple(int(count) for count in counts)


def _table(counts: ndarray) -> Table:
    return tuple(_row(row) for row in counts)
