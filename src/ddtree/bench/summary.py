"""Every number of a report, from the records of a run; knows no pictures and no files.

A speed-up is a prompt's tokens per second by those of plain decoding on the same prompt, and a
suite's is the mean over its records. tau is tokens by rounds, both summed over a suite. What stands
for several suites is the mean of theirs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from ddtree.bench.anatomy import (
    ArmRounds,
    ContextCurve,
    CostPoint,
    Prediction,
    arm_rounds,
    costs_by_context,
    costs_by_rows,
    predictions,
)
from ddtree.bench.measures import SuitePrompts, Sums, find, speedup_of, suites_at, tau, totals_of
from ddtree.bench.records import Arm, Run
from ddtree.bench.statistics import Bootstrap, Estimate, Statistic, ratio, ratio_of_ratios
from ddtree.costs import CostProfile

FORMAT = "ddtree-bench-report"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One arm on one suite, or on several.

    Args:
        speedup: mean over records of the arm's tokens/s by plain decoding's on the same prompt.
        total_speedup: all tokens by all seconds, relative to those of plain decoding.
        tau: tokens by rounds, both summed over a suite; None for arms without rounds.
        num_prompts: conversations count once.
    """

    speedup: Estimate
    total_speedup: Estimate
    tau: Estimate | None
    num_prompts: int


@dataclass(frozen=True, kw_only=True)
class ArmRow:
    """One arm on every suite; None where it did not run.

    Args:
        arm: the arm.
        cells: in the order of the suites.
        mean: over suites; None unless it ran on all.
    """

    arm: Arm
    cells: tuple[Cell | None, ...]
    mean: Cell | None


@dataclass(frozen=True, kw_only=True)
class PaperRow:
    """A row in the paper's layout, on the prompts that nothing was chosen on.

    Args:
        label: of the method.
        budgets: per suite, where one was chosen on the other half; else empty.
        cells: in the order of the table's suites.
        mean: over them; None unless the method ran on all.
    """

    label: str
    budgets: tuple[int, ...]
    cells: tuple[Cell | None, ...]
    mean: Cell | None


@dataclass(frozen=True, kw_only=True)
class PaperTable:
    """Methods by suites on the prompts of odd index.

    Args:
        suites: that have prompts of both halves.
        left_out: those that have not: no budget can be chosen and reported on one prompt.
        rows: methods.
    """

    suites: tuple[str, ...]
    left_out: tuple[str, ...]
    rows: tuple[PaperRow, ...]


@dataclass(frozen=True, kw_only=True)
class AtTemperature:
    """What was found at one temperature.

    Args:
        temperature: 0 is greedy.
        suites: names.
        num_prompts: of each.
        rows: every arm that ran.
        paper: the paper's layout.
        rounds: what happened inside; arms whose rounds nobody sees are left out.
        predictions: the cost model beside the measurement; empty without a cost profile.
    """

    temperature: float
    suites: tuple[str, ...]
    num_prompts: tuple[int, ...]
    rows: tuple[ArmRow, ...]
    paper: PaperTable
    rounds: tuple[ArmRounds, ...]
    predictions: tuple[Prediction, ...]


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """An arm that did not say what plain decoding said.

    Args:
        suite, id, turn, temperature: the prompt.
        arm: which arm.
        first_difference: place of the first other token among the new ones, from 0.
    """

    suite: str
    id: str
    turn: int
    temperature: float
    arm: str
    first_difference: int


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A whole report.

    Args:
        card: of the run.
        arms: in order; the first is plain decoding.
        bootstrap: how the intervals were made.
        temperatures: from low to high.
        costs_by_rows, costs_by_context: the verify stage, all temperatures together.
        num_records: prompts, or turns of conversations, at all temperatures.
        disagreements: every one; empty where all arms said the same everywhere.
    """

    card: Mapping[str, object]
    arms: tuple[Arm, ...]
    bootstrap: Bootstrap
    temperatures: tuple[AtTemperature, ...]
    costs_by_rows: tuple[CostPoint, ...]
    costs_by_context: tuple[ContextCurve, ...]
    num_records: int
    disagreements: tuple[Disagreement, ...]

    @property
    def num_agreed(self) -> int:
        """Records on which all arms said the same."""
        apart = {(d.suite, d.id, d.turn, d.temperature) for d in self.disagreements}
        return self.num_records - len(apart)

    def as_json(self) -> str:
        """What report.json holds."""
        bootstrap = {
            "num_resamples": self.bootstrap.num_resamples,
            "level": self.bootstrap.level,
            "seed": self.bootstrap.seed,
        }
        numbers = asdict(replace(self, bootstrap=Bootstrap()))
        whole = {"format": FORMAT, "version": VERSION, **numbers, "bootstrap": bootstrap}
        return json.dumps(whole, allow_nan=False, indent=1) + "\n"


def summarise(run: Run, bootstrap: Bootstrap) -> Summary:
    """Work out a report.

    Args:
        run: with at least one prompt.
        bootstrap: how to make intervals.
    """
    assert run.prompts, "a run without prompts has no report"
    profile = cost_profile(run.card)
    temperatures = sorted({record.temperature for record in run.prompts})
    return Summary(
        card=run.card,
        arms=run.arms,
        bootstrap=bootstrap,
        temperatures=tuple(_at(run, t, profile, bootstrap) for t in temperatures),
        costs_by_rows=costs_by_rows(run, profile),
        costs_by_context=costs_by_context(run, profile),
        num_records=len(run.prompts),
        disagreements=_disagreements(run),
    )


def cost_profile(card: Mapping[str, object]) -> CostProfile | None:
    """The costs that were measured before the run; None where it has none."""
    raw = card.get("cost_profile")
    if not isinstance(raw, Mapping):
        return None
    return CostProfile(
        contexts=tuple(raw["contexts"]),
        rows=tuple(raw["rows"]),
        verify=tuple(tuple(costs) for costs in raw["verify"]),
        draft=raw["draft"],
    )


def _at(
    run: Run, temperature: float, profile: CostProfile | None, bootstrap: Bootstrap
) -> AtTemperature:
    suites = suites_at(run, temperature)
    cells = _Cells(bootstrap, run.arms[0].name)
    rows = tuple(
        ArmRow(
            arm=arm,
            cells=tuple(cells.of([(suite, arm.name)]) for suite in suites),
            mean=cells.of([(suite, arm.name) for suite in suites]),
        )
        for arm in run.arms
    )
    return AtTemperature(
        temperature=temperature,
        suites=tuple(suite.suite for suite in suites),
        num_prompts=tuple(len(suite.prompts) for suite in suites),
        rows=tuple(row for row in rows if any(row.cells)),
        paper=_paper(run, suites, cells),
        rounds=arm_rounds(run, temperature),
        predictions=() if profile is None else predictions(run, profile, temperature),
    )


@dataclass(frozen=True)
class _Cells:
    """Makes cells against one baseline."""

    bootstrap: Bootstrap
    baseline: str

    def of(self, parts: Sequence[tuple[SuitePrompts, str]]) -> Cell | None:
        """The cell of an arm on each of some suites; None unless it ran on all of them."""
        speedup = self._estimate(parts, speedup_of(self.baseline), ratio)
        total = self._estimate(parts, totals_of(self.baseline), ratio_of_ratios)
        if speedup is None or total is None:
            return None
        ran = [turns for suite, arm in parts for turns in suite.prompts if find(turns[0], arm)]
        return Cell(
            speedup=speedup,
            total_speedup=total,
            tau=self._estimate(parts, tau, ratio),
            num_prompts=len(ran),
        )

    def _estimate(
        self, parts: Sequence[tuple[SuitePrompts, str]], sums: Sums, statistic: Statistic
    ) -> Estimate | None:
        strata = [stratum for suite, arm in parts if (stratum := suite.stratum(sums, arm))]
        return self.bootstrap.estimate(strata, statistic) if len(strata) == len(parts) > 0 else None


def _paper(run: Run, suites: Sequence[SuitePrompts], cells: _Cells) -> PaperTable:
    """Every method on the prompts of odd index; budgets are chosen on those of even index."""
    halves = [(suite, suite.half(odd=False), suite.half(odd=True)) for suite in suites]
    whole = [half for half in halves if half[1].prompts and half[2].prompts]
    chosen_on, reported = [half[1] for half in whole], [half[2] for half in whole]
    trees = [arm for arm in run.arms if arm.method == "ddtree" and arm.budget != "auto"]
    rows = [
        _paper_row(arm.name, [(suite, arm.name) for suite in reported], cells)
        for arm in run.arms
        if arm not in trees
    ]
    if trees and whole:
        best = [_best(trees, [suite], cells.baseline) for suite in chosen_on]
        one = [_best(trees, chosen_on, cells.baseline)] * len(whole)
        for label, arms in (("ddtree, one budget", one), ("ddtree, budget per suite", best)):
            named = [a for a in arms if a is not None]
            if len(named) == len(whole):
                parts = [(suite, arm.name) for suite, arm in zip(reported, named, strict=True)]
                row = _paper_row(label, parts, cells)
                rows.append(replace(row, budgets=tuple(int(a.budget or 0) for a in named)))
    return PaperTable(
        suites=tuple(half[0].suite for half in whole),
        left_out=tuple(half[0].suite for half in halves if half not in whole),
        rows=tuple(row for row in rows if any(row.cells)),
    )


def _paper_row(label: str, parts: Sequence[tuple[SuitePrompts, str]], cells: _Cells) -> PaperRow:
    return PaperRow(
        label=label,
        budgets=(),
        cells=tuple(cells.of([part]) for part in parts),
        mean=cells.of(parts),
    )


def _best(trees: Sequence[Arm], suites: Sequence[SuitePrompts], baseline: str) -> Arm | None:
    """The arm of the highest mean speed-up among those that ran on all the suites."""
    sums = speedup_of(baseline)
    found: list[tuple[float, Arm]] = []
    for arm in trees:
        strata = [s for suite in suites if (s := suite.stratum(sums, arm.name)) is not None]
        if len(strata) == len(suites):
            speedups = [float(ratio(s.sums.sum(axis=0, keepdims=True))[0]) for s in strata]
            found.append((sum(speedups) / len(speedups), arm))
    return max(found, key=lambda pair: pair[0])[1] if found else None


def _disagreements(run: Run) -> tuple[Disagreement, ...]:
    return tuple(
        Disagreement(
            suite=record.suite,
            id=record.id,
            turn=record.turn,
            temperature=record.temperature,
            arm=name,
            first_difference=_first_difference(
                record.arms[0].token_ids, record.arm(name).token_ids
            ),
        )
        for record in run.prompts
        for name in record.disagreeing
    )


def _first_difference(expected: Sequence[int], got: Sequence[int]) -> int:
    pairs = zip(expected, got, strict=False)
    shorter = min(len(expected), len(got))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
