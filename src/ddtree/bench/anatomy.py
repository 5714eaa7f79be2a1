"""What happened inside the rounds: acceptance, calibration, stage times, costs, and their model.

All suites of a run together, an arm at a temperature each. Knows no intervals and no pictures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from statistics import fmean

import numpy as np

from ddtree.bench.measures import find
from ddtree.bench.records import NUM_BINS, ArmRecord, PromptRecord, RoundRecord, Run
from ddtree.costs import CostProfile
from ddtree.types import StageSeconds

# Fewer rounds than this give no point of a cost curve, where others have more.
_FEW_ROUNDS = 5
_CONTEXT_BINS = 10


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Predicted against observed acceptance of tree nodes, by bins of predicted probability.

    Args:
        predicted: mean probability that the drafter gave the nodes of a bin; empty bins are left
            out.
        observed: share of them that was accepted.
        num_nodes: in the bin.
        error: the expected calibration error: mean difference of the two, weighted by nodes.
    """

    predicted: tuple[float, ...]
    observed: tuple[float, ...]
    num_nodes: tuple[int, ...]
    error: float


@dataclass(frozen=True, kw_only=True)
class RoundMs:
    """Mean milliseconds of a round by stage.

    Args:
        draft, build, verify, walk, commit: the stages.
        other: what a generation took outside of them and of its prefill, shared over its rounds.
    """

    draft: float
    build: float
    verify: float
    walk: float
    commit: float
    other: float

    @property
    def total(self) -> float:
        """All together."""
        return float(sum(getattr(self, f.name) for f in fields(self)))


@dataclass(frozen=True, kw_only=True)
class ArmRounds:
    """The rounds of one arm at one temperature, all suites together.

    Args:
        arm: its name.
        num_rounds: verify forwards.
        drafted: share of them for which the drafter was asked.
        nodes: mean size of the tree, the root not counted, rounds without a draft included.
        promised: mean of the tokens that the trees' own probabilities let expect.
        delivered: mean tokens per round, bonus token included.
        histogram: entry i counts the rounds that delivered i tokens; entry 0 is 0.
        at_least: entry d - 1 is the share of rounds that accepted d drafted tokens or more.
        ranks: entry r counts the accepted nodes of rank r; 0 is the drafter's most probable token.
        calibration: None where nothing was drafted.
        ms: where a round's time went.
    """

    arm: str
    num_rounds: int
    drafted: float
    nodes: float
    promised: float
    delivered: float
    histogram: tuple[int, ...]
    at_least: tuple[float, ...]
    ranks: tuple[int, ...]
    calibration: Calibration | None
    ms: RoundMs


@dataclass(frozen=True, kw_only=True)
class CostPoint:
    """The verify stage over rounds of a kind.

    Args:
        at: rows N of the forward, or mean context T in tokens.
        num_rounds: how many.
        low, median, high: milliseconds; the ends are the quartiles.
        predicted: mean milliseconds by the cost profile; None without one.
    """

    at: float
    num_rounds: int
    low: float
    median: float
    high: float
    predicted: float | None


@dataclass(frozen=True, kw_only=True)
class ContextCurve:
    """One arm's verify stage against the length of the context."""

    arm: str
    points: tuple[CostPoint, ...]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The cost model beside the measurement for one arm at one temperature, all suites together.

    Args:
        arm: its name.
        tau: tokens per round, measured; the model does not foretell it.
        predicted_ms: of a round: the profile's drafter pass, where drafted, and its verify forward.
        measured_ms: of a round: everything but the prefill.
        predicted_rounds_speedup: tau x predicted plain round / predicted round: no prefill.
        measured_rounds_speedup: tokens of rounds by their time, relative to plain decoding.
        predicted_speedup: rounds as predicted behind the prefill as measured.
        measured_speedup: all tokens by all time, relative to plain decoding.
    """

    arm: str
    tau: float
    predicted_ms: float
    measured_ms: float
    predicted_rounds_speedup: float
    measured_rounds_speedup: float
    predicted_speedup: float
    measured_speedup: float


def arm_rounds(run: Run, temperature: float) -> tuple[ArmRounds, ...]:
    """Every arm that has rounds at a temperature, in the run's order."""
    parts = ((arm.name, _records(run, arm.name, temperature)) for arm in run.arms)
    return tuple(_arm_rounds(name, records) for name, records in parts if _rounds(records))


def costs_by_rows(run: Run, profile: CostProfile | None) -> tuple[CostPoint, ...]:
    """The verify stage by rows N, all arms and temperatures together."""
    by_rows: dict[int, list[RoundRecord]] = {}
    for done in _rounds(_records(run)):
        by_rows.setdefault(done.nodes + 1, []).append(done)
    points = [_point(n, by_rows[n], profile) for n in sorted(by_rows)]
    return _well_filled(points)


def costs_by_context(run: Run, profile: CostProfile | None) -> tuple[ContextCurve, ...]:
    """The verify stage by context T: a curve for each arm whose rounds are all of one size."""
    curves = []
    for arm in run.arms:
        rounds = _rounds(_records(run, arm.name))
        if not rounds or arm.budget == "auto":
            continue
        by_bin: dict[int, list[RoundRecord]] = {}
        width = _bin_width([done.context for done in rounds])
        for done in rounds:
            by_bin.setdefault(done.context // width, []).append(done)
        points = [
            _point(fmean(r.context for r in by_bin[i]), by_bin[i], profile) for i in sorted(by_bin)
        ]
        curves.append(ContextCurve(arm=arm.name, points=_well_filled(points)))
    return tuple(curves)


def predictions(run: Run, profile: CostProfile, temperature: float) -> tuple[Prediction, ...]:
    """The cost model beside what was measured, for every arm with rounds; the first is plain."""
    baseline = run.arms[0].name
    found = []
    for arm in run.arms:
        pairs = [
            (own, plain)
            for prompt in run.prompts
            if prompt.temperature == temperature
            and (own := find(prompt, arm.name)) is not None
            and (plain := find(prompt, baseline)) is not None
            and own.rounds
            and plain.rounds
        ]
        if pairs:
            ours, base = zip(*pairs, strict=True)
            found.append(_predict(arm.name, ours, base, profile))
    return tuple(found)


def _predict(
    arm: str, own: Sequence[ArmRecord], plain: Sequence[ArmRecord], profile: CostProfile
) -> Prediction:
    ours, base = _Totals.of(own, profile), _Totals.of(plain, profile)
    return Prediction(
        arm=arm,
        tau=ours.round_tokens / ours.num_rounds,
        predicted_ms=1000 * ours.predicted_s / ours.num_rounds,
        measured_ms=1000 * ours.rounds_s / ours.num_rounds,
        predicted_rounds_speedup=(ours.round_tokens / ours.predicted_s)
        / (base.round_tokens / base.predicted_s),
        measured_rounds_speedup=(ours.round_tokens / ours.rounds_s)
        / (base.round_tokens / base.rounds_s),
        predicted_speedup=(ours.tokens / (ours.prefill_s + ours.predicted_s))
        / (base.tokens / (base.prefill_s + base.predicted_s)),
        measured_speedup=(ours.tokens / (ours.prefill_s + ours.rounds_s))
        / (base.tokens / (base.prefill_s + base.rounds_s)),
    )


@dataclass(frozen=True, kw_only=True)
class _Totals:
    tokens: int
    round_tokens: int
    num_rounds: int
    prefill_s: float
    rounds_s: float
    predicted_s: float

    @classmethod
    def of(cls, records: Sequence[ArmRecord], profile: CostProfile) -> _Totals:
        prefill_s = sum(record.prefill_s or 0.0 for record in records)
        return cls(
            tokens=sum(len(record.token_ids) for record in records),
            round_tokens=sum(record.round_tokens for record in records),
            num_rounds=sum(len(record.rounds) for record in records),
            prefill_s=prefill_s,
            rounds_s=sum(record.elapsed_s for record in records) - prefill_s,
            predicted_s=sum(_predicted_s(done, profile) for done in _rounds(records)),
        )


def _predicted_s(done: RoundRecord, profile: CostProfile) -> float:
    """What the profile says of a round: a root-only tree may have cost a drafter pass too."""
    drafted = done.seconds.draft > 0
    return _verify_s(profile, done.nodes + 1, done.context) + (profile.draft if drafted else 0.0)


@lru_cache(maxsize=1 << 16)  # a run has a hundred thousand rounds, of few sizes and contexts
def _verify_s(profile: CostProfile, num_rows: int, context: int) -> float:
    return profile.verify_s(num_rows, context)


def _arm_rounds(name: str, records: Sequence[ArmRecord]) -> ArmRounds:
    rounds = _rounds(records)
    accepted = np.array([len(done.ranks) for done in rounds])
    ranks = [rank for done in rounds for rank in done.ranks]
    return ArmRounds(
        arm=name,
        num_rounds=len(rounds),
        drafted=fmean(done.seconds.draft > 0 for done in rounds),
        nodes=fmean(done.nodes for done in rounds),
        promised=fmean(done.promised for done in rounds),
        delivered=fmean(done.tokens for done in rounds),
        histogram=_counts([done.tokens for done in rounds]),
        at_least=tuple(float((accepted >= d).mean()) for d in range(1, accepted.max() + 1)),
        ranks=_counts(ranks),
        calibration=_calibration(records),
        ms=_round_ms(records, rounds),
    )


def _calibration(records: Sequence[ArmRecord]) -> Calibration | None:
    bins = np.zeros((NUM_BINS, 3))
    for record in records:
        bins += np.array(record.node_bins, np.float64).reshape(-1, 3) if record.node_bins else 0.0
    num_nodes, promised, hits = bins[bins[:, 0] > 0].T
    if num_nodes.size == 0:
        return None
    predicted, observed = promised / num_nodes, hits / num_nodes
    return Calibration(
        predicted=tuple(predicted.tolist()),
        observed=tuple(observed.tolist()),
        num_nodes=tuple(num_nodes.astype(int).tolist()),
        error=float(np.average(np.abs(predicted - observed), weights=num_nodes)),
    )


def _round_ms(records: Sequence[ArmRecord], rounds: Sequence[RoundRecord]) -> RoundMs:
    stages = [f.name for f in fields(StageSeconds) if f.name != "prefill"]
    ms = {name: 1000 * fmean(getattr(done.seconds, name) for done in rounds) for name in stages}
    # A text that ended with its prefill had no round to share its time with.
    spent = sum(r.elapsed_s - (r.prefill_s or 0.0) for r in records if r.rounds)
    return RoundMs(**ms, other=max(0.0, 1000 * spent / len(rounds) - sum(ms.values())))


def _point(at: float, rounds: Sequence[RoundRecord], profile: CostProfile | None) -> CostPoint:
    low, median, high = np.quantile([1000 * r.seconds.verify for r in rounds], [0.25, 0.5, 0.75])
    predicted = None
    if profile is not None:
        predicted = 1000 * fmean(_verify_s(profile, r.nodes + 1, r.context) for r in rounds)
    return CostPoint(
        at=float(at),
        num_rounds=len(rounds),
        low=float(low),
        median=float(median),
        high=float(high),
        predicted=predicted,
    )


def _well_filled(points: Sequence[CostPoint]) -> tuple[CostPoint, ...]:
    enough = tuple(point for point in points if point.num_rounds >= _FEW_ROUNDS)
    return enough or tuple(points)


def _bin_width(contexts: Sequence[int]) -> int:
    """A power of two that cuts the contexts into about ten."""
    span = max(contexts) - min(contexts) + 1
    return 1 << max(4, int(np.ceil(np.log2(span / _CONTEXT_BINS))))


def _counts(numbers: Sequence[int]) -> tuple[int, ...]:
    return tuple(np.bincount(numbers).tolist()) if numbers else ()


def _records(run: Run, arm: str | None = None, temperature: float | None = None) -> list[ArmRecord]:
    """Records of an arm at a temperature; of every one where it is not said."""
    prompts: Iterable[PromptRecord] = run.prompts
    return [
        record
        for prompt in prompts
        if temperature is None or prompt.temperature == temperature
        for record in prompt.arms
        if arm is None or record.arm == arm
    ]


def _rounds(records: Iterable[ArmRecord]) -> list[RoundRecord]:
    return [done for record in records for done in record.rounds]
