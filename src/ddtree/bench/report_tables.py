"""The tables of a report, as rows of text for whatever shows them: Markdown, HTML or a terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from ddtree.bench.anatomy import ArmRounds, RoundMs
from ddtree.bench.statistics import Estimate
from ddtree.bench.summary import ArmRow, AtTemperature, Cell, PaperRow, Summary

NONE = "-"
# Ranks that the table and the plot count together, as half-open ranges.
RANK_RANGES = ((0, 1), (1, 2), (2, 3), (3, 4), (4, 8), (8, 16), (16, None))
STAGES = tuple(field.name for field in fields(RoundMs))


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under headings: a few columns of words, then figures.

    Args:
        title: what it shows.
        headings: of the columns.
        rows: each as long as the headings.
        num_words: columns of words.
    """

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_words: int = 1


def temperature_label(temperature: float) -> str:
    """As headings have it.

    >>> temperature_label(0.0), temperature_label(0.6)
    ('temperature 0 (greedy)', 'temperature 0.6')
    """
    return f"temperature {temperature:g}" + (" (greedy)" if temperature == 0 else "")


def with_interval(estimate: Estimate | None, unit: str = "") -> str:
    """A figure and its interval.

    >>> with_interval(Estimate(value=1.5, low=1.25, high=1.75), "x")
    '1.50x [1.25, 1.75]'
    """
    if estimate is None:
        return NONE
    said = f"{estimate.value:.2f}{unit}"
    # What cannot vary, as ar over itself, has no interval to speak of.
    if estimate.low is None or estimate.high is None or estimate.low == estimate.high:
        return said
    return f"{said} [{estimate.low:.2f}, {estimate.high:.2f}]"


def rank_label(low: int, high: int | None) -> str:
    """Of a range of ranks.

    >>> rank_label(2, 3), rank_label(4, 8), rank_label(16, None)
    ('2', '4-7', '16+')
    """
    if high is None:
        return f"{low}+"
    return str(low) if high == low + 1 else f"{low}-{high - 1}"


def rank_shares(arm: ArmRounds) -> tuple[float, ...]:
    """Share of the accepted nodes in each of `RANK_RANGES`; all 0 where none was accepted."""
    total = max(1, sum(arm.ranks))
    return tuple(sum(arm.ranks[low:high]) / total for low, high in RANK_RANGES)


def drafting(at: AtTemperature) -> list[ArmRounds]:
    """Arms that drafted: the others accept nothing and have no nodes."""
    return [r for r in at.rounds if r.calibration is not None]


def headline_table(at: AtTemperature) -> Table:
    """Arms by figures: means over suites."""
    rounds = {r.arm: r for r in at.rounds}
    rows = []
    for row in at.rows:
        inside = rounds.get(row.arm.name)
        cell = row.mean
        rows.append(
            (
                row.arm.name,
                with_interval(None if cell is None else cell.speedup, "x"),
                with_interval(None if cell is None else cell.total_speedup, "x"),
                with_interval(None if cell is None else cell.tau),
                NONE if inside is None else f"{inside.nodes:.1f}",
            )
        )
    return Table(
        title=f"Mean over suites, {temperature_label(at.temperature)}",
        headings=("arm", "speed-up", "of totals", "tau", "nodes"),
        rows=tuple(rows),
    )


def suite_table(at: AtTemperature, figure: Literal["speedup", "tau"]) -> Table:
    """Arms by suites: speed-up or tau."""
    unit = {"speedup": "x", "tau": ""}[figure]
    name = {"speedup": "Speed-up", "tau": "tau"}[figure]

    def cells(row: ArmRow) -> tuple[str, ...]:
        return tuple(
            NONE if cell is None else with_interval(getattr(cell, figure), unit)
            for cell in (*row.cells, row.mean)
        )

    sizes = [
        f"{suite} ({num_prompts})"
        for suite, num_prompts in zip(at.suites, at.num_prompts, strict=True)
    ]
    return Table(
        title=f"{name} by suite (prompts), {temperature_label(at.temperature)}",
        headings=("arm", *sizes, "mean"),
        rows=tuple((row.arm.name, *cells(row)) for row in at.rows),
    )


def paper_table(at: AtTemperature) -> Table:
    """Methods by suites, on the odd prompts."""

    def text(row: PaperRow, place: int) -> str:
        cell = row.cells[place]
        chosen = f" @{row.budgets[place]}" if row.budgets else ""
        return NONE if cell is None else _plain(cell) + chosen

    rows = tuple(
        (
            row.label,
            *(text(row, place) for place in range(len(at.paper.suites))),
            with_interval(None if row.mean is None else row.mean.speedup, "x"),
            with_interval(None if row.mean is None else row.mean.tau),
        )
        for row in at.paper.rows
    )
    return Table(
        title=f"Speed-up, tau and @budget, {temperature_label(at.temperature)}, odd prompts",
        headings=("method", *at.paper.suites, "average speed-up", "average tau"),
        rows=rows,
    )


def tokens_table(at: AtTemperature) -> Table:
    """How many tokens rounds delivered."""
    arms = drafting(at)
    most = max(len(r.histogram) for r in arms)
    return Table(
        title=f"Share of rounds by tokens per round, {temperature_label(at.temperature)}",
        headings=("arm", "rounds", *(str(i) for i in range(1, most))),
        rows=tuple(
            (r.arm, str(r.num_rounds), *_shares(r.histogram[1:], r.num_rounds, most - 1))
            for r in arms
        ),
    )


def depth_table(at: AtTemperature) -> Table:
    """How deep acceptance goes."""
    arms = drafting(at)
    depth = max(len(r.at_least) for r in arms)
    label = temperature_label(at.temperature)
    return Table(
        title=f"Share of rounds that accepted at least d drafted tokens, {label}",
        headings=("arm", "drafted", *(f"d={i}" for i in range(1, depth + 1))),
        rows=tuple((r.arm, _percent(r.drafted), *_shares(r.at_least, 1, depth)) for r in arms),
    )


def rank_table(at: AtTemperature) -> Table:
    """Which of the drafter's tokens were accepted."""
    return Table(
        title=f"Share of accepted nodes by rank, {temperature_label(at.temperature)}",
        headings=("arm", "accepted", *(rank_label(low, high) for low, high in RANK_RANGES)),
        rows=tuple(
            (r.arm, str(sum(r.ranks)), *map(_percent, rank_shares(r))) for r in drafting(at)
        ),
    )


def calibration_table(at: AtTemperature) -> Table:
    """What the trees promised and what came."""
    rows = []
    for r in drafting(at):
        assert r.calibration is not None, "they drafted"
        said = (f"{r.calibration.error:.4f}", f"{r.promised:.2f}", f"{r.delivered:.2f}")
        rows.append((r.arm, str(sum(r.calibration.num_nodes)), *said))
    return Table(
        title=f"Calibration, {temperature_label(at.temperature)}",
        headings=("arm", "nodes", "ece", "promised", "delivered"),
        rows=tuple(rows),
    )


def stages_table(at: AtTemperature) -> Table:
    """Where a round's time went."""
    return Table(
        title=f"Milliseconds per round, {temperature_label(at.temperature)}",
        headings=("arm", *STAGES, "round"),
        rows=tuple(
            (r.arm, *(f"{getattr(r.ms, stage):.2f}" for stage in STAGES), f"{r.ms.total:.2f}")
            for r in at.rounds
        ),
    )


def prediction_table(at: AtTemperature) -> Table:
    """The cost model beside the measurement."""
    return Table(
        title=f"Predicted and measured, {temperature_label(at.temperature)}",
        headings=(
            "arm",
            "tau",
            "predicted ms",
            "measured ms",
            "predicted, rounds",
            "measured, rounds",
            "predicted, with prefill",
            "measured, with prefill",
        ),
        rows=tuple(
            (
                p.arm,
                f"{p.tau:.2f}",
                f"{p.predicted_ms:.2f}",
                f"{p.measured_ms:.2f}",
                f"{p.predicted_rounds_speedup:.2f}x",
                f"{p.measured_rounds_speedup:.2f}x",
                f"{p.predicted_speedup:.2f}x",
                f"{p.measured_speedup:.2f}x",
            )
            for p in at.predictions
        ),
    )


def card_table(card: Mapping[str, object]) -> Table:
    """The costs are in a plot; all else is said."""
    rows = []
    for key, value in card.items():
        if key == "cost_profile":
            continue
        if isinstance(value, Mapping):
            rows += [(f"{key}: {name}", _said(item)) for name, item in value.items()]
        else:
            rows.append((key, _said(value)))
    headings = ("what", "value")
    return Table(title="Where the run comes from", headings=headings, rows=tuple(rows), num_words=2)


def disagreement_table(summary: Summary) -> Table:
    """Every arm that said something else."""
    return Table(
        title=f"Other tokens than {summary.arms[0].name} said",
        headings=("suite", "prompt", "turn", "temperature", "arm", "first other token"),
        rows=tuple(
            (d.suite, d.id, str(d.turn), f"{d.temperature:g}", d.arm, str(d.first_difference))
            for d in summary.disagreements
        ),
        num_words=5,
    )


def _plain(cell: Cell) -> str:
    tau = NONE if cell.tau is None else f"{cell.tau.value:.2f}"
    return f"{cell.speedup.value:.2f}x {tau}"


def _said(value: object) -> str:
    if isinstance(value, str):
        return value
    return NONE if value is None else json.dumps(value)


def _shares(counts: Sequence[float], total: float, length: int) -> tuple[str, ...]:
    said = [_percent(count / total) for count in counts]
    return tuple(said + [NONE] * (length - len(said)))


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"
