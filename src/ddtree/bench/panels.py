"""The charts of a benchmark, each drawn onto axes that somebody else made; see `plots`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ddtree.bench.report_tables import RANK_RANGES, STAGES, drafting, rank_label, rank_shares
from ddtree.bench.statistics import Estimate
from ddtree.bench.summary import ArmRow, AtTemperature, Cell, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Of words and axes; nothing else has it, so that it can be found in the file.
INK = "#1b1f23"
# Okabe and Ito's, without the yellow that white paper swallows.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8c6d31", "#7f7f7f")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
_GREY = "#8a8a8a"


@dataclass(frozen=True, kw_only=True)
class Style:
    """How a series looks."""

    colour: str
    marker: str
    dashed: bool

    @classmethod
    def of(cls, place: int) -> Style:
        """The look of the series at a place, from 0."""
        return cls(
            colour=_COLOURS[place % len(_COLOURS)],
            marker=_MARKERS[place % len(_MARKERS)],
            dashed=place >= len(_COLOURS),
        )

    def line(self) -> dict[str, Any]:
        """As `Axes.plot` takes it."""
        return {
            "color": self.colour,
            "marker": self.marker,
            "markersize": 5,
            "linewidth": 1.4,
            "linestyle": "--" if self.dashed else "-",
        }


def arm_styles(summary: Summary) -> dict[str, Style]:
    """One look for each arm in all charts; plain decoding, the measure, has the ink."""
    first, *others = (arm.name for arm in summary.arms)
    plain = Style(colour=INK, marker="o", dashed=False)
    return {first: plain, **{name: Style.of(i) for i, name in enumerate(others)}}


def forest(axes: Axes, at: AtTemperature, styles: Mapping[str, Style]) -> None:
    """Speed-up of every arm: mean over suites with its interval, suites as ticks."""
    rows = [row for row in at.rows[1:] if row.mean is not None]
    for place, row in enumerate(rows):
        assert row.mean is not None, "only those are in"
        of_suites = [cell.speedup.value for cell in row.cells if cell is not None]
        axes.plot(of_suites, [place] * len(of_suites), "|", color=_GREY, markersize=9)
        style, mean = styles[row.arm.name], row.mean.speedup
        _with_bar(axes, mean, place, style)
    axes.axvline(1, color=INK, linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(rows)), [row.arm.name for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel("speed-up over ar (x); mean and interval, | suites")


def _with_bar(axes: Axes, mean: Estimate, place: int, style: Style) -> None:
    bar = None if mean.low is None or mean.high is None else _reach([mean])
    axes.errorbar([mean.value], [place], xerr=bar, fmt=style.marker, color=style.colour, capsize=3)


def _reach(estimates: Sequence[Estimate]) -> np.ndarray:
    """[2, n] distances from figures to the ends of their intervals; 0 where there are none."""
    lows = [0.0 if e.low is None else max(0.0, e.value - e.low) for e in estimates]
    highs = [0.0 if e.high is None else max(0.0, e.high - e.value) for e in estimates]
    return np.array([lows, highs])


def by_budget(axes: Axes, at: AtTemperature, figure: Literal["speedup", "tau"]) -> None:
    """A figure against the budget: suites, their mean, and where auto and the chain stand."""
    fixed = [(int(row.arm.budget), row) for row in at.rows if isinstance(row.arm.budget, int)]
    fixed.sort(key=lambda pair: pair[0])
    for place, suite in enumerate(at.suites if len(at.suites) > 1 else ()):
        found = [(budget, _figure(row.cells[place], figure)) for budget, row in fixed]
        points = [(budget, estimate.value) for budget, estimate in found if estimate is not None]
        look = Style.of(place)
        axes.plot(
            *_columns(points), label=suite, **{**look.line(), "linewidth": 1.0, "markersize": 4}
        )
    means = [(budget, _figure(row.mean, figure)) for budget, row in fixed]
    known = [(budget, estimate) for budget, estimate in means if estimate is not None]
    bars = _reach([estimate for _, estimate in known])
    points = [(budget, estimate.value) for budget, estimate in known]
    axes.errorbar(
        *_columns(points), yerr=bars, color=INK, marker="o", lw=2.4, capsize=3, label="mean"
    )
    nodes = {r.arm: r.nodes for r in at.rounds}
    for row in at.rows:
        if row.arm.name in nodes and (row.arm.budget == "auto" or row.arm.method == "dflash"):
            _mark(axes, nodes[row.arm.name], row, _figure(row.mean, figure), fixed[0][0])
    _budget_axis(axes, [budget for budget, _ in fixed])
    axes.set_ylabel("tau (tokens per round)" if figure == "tau" else "speed-up over ar (x)")
    if figure == "speedup":
        axes.axhline(1, color=INK, linewidth=0.8, linestyle=":")
    _legend_below(axes)


def _figure(cell: Cell | None, figure: Literal["speedup", "tau"]) -> Estimate | None:
    if cell is None:
        return None
    return cell.tau if figure == "tau" else cell.speedup


def _mark(axes: Axes, nodes: float, row: ArmRow, mean: Estimate | None, smallest: int) -> None:
    """An arm whose size is not chosen by hand, at its mean size."""
    if mean is None:
        return
    star = row.arm.budget == "auto"
    axes.errorbar(
        # Trees of hardly a node have no place on a logarithmic axis: the label says how many.
        [max(nodes, smallest / 2)],
        [mean.value],
        yerr=_reach([mean]),
        fmt="*" if star else "D",
        markersize=12 if star else 7,
        color=_COLOURS[3] if star else _GREY,
        markeredgecolor=INK,
        capsize=3,
        zorder=5,
        label=f"{row.arm.name} ({nodes:.1f})",
    )


def _budget_axis(axes: Axes, budgets: Sequence[int]) -> None:
    axes.set_xlabel("budget B (nodes)")
    if len(budgets) > 1 and min(budgets) > 0:
        axes.set_xscale("log", base=2)
        axes.set_xticks(budgets, [str(b) for b in budgets])
        axes.minorticks_off()


def tokens_per_round(axes: Axes, at: AtTemperature, styles: Mapping[str, Style]) -> None:
    """How many tokens rounds delivered, arm by arm."""
    for r in drafting(at):
        shares = [100 * n / r.num_rounds for n in r.histogram[1:]]
        axes.plot(range(1, len(shares) + 1), shares, label=r.arm, **styles[r.arm].line())
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens per round, bonus token included")
    axes.set_ylabel("share of rounds (%)")
    _whole_numbers(axes)
    _legend_below(axes)


def by_depth(axes: Axes, at: AtTemperature, styles: Mapping[str, Style]) -> None:
    """Share of rounds that accepted at least so many drafted tokens."""
    for r in drafting(at):
        shares = [100 * share for share in r.at_least]
        axes.plot(range(1, len(shares) + 1), shares, label=r.arm, **styles[r.arm].line())
    axes.set_ylim(bottom=0)
    axes.set_xlabel("d (drafted tokens)")
    axes.set_ylabel("rounds that accepted d or more (%)")
    _whole_numbers(axes)
    _legend_below(axes)


def by_rank(axes: Axes, at: AtTemperature, styles: Mapping[str, Style]) -> None:
    """Ranks of the accepted nodes."""
    labels = [rank_label(low, high) for low, high in RANK_RANGES]
    lowest = 100.0
    for r in drafting(at):
        # What never happened has no place on a logarithmic axis.
        seen = [(i, 100 * share) for i, share in enumerate(rank_shares(r)) if share > 0]
        lowest = min([lowest, *(share for _, share in seen)])
        axes.plot(*_columns(seen), label=r.arm, **styles[r.arm].line())
    axes.set_yscale("log")
    axes.set_xticks(range(len(labels)), labels)
    axes.set_xlabel("rank of the accepted node, 0 = most probable")
    axes.set_ylabel("share of accepted nodes (%)")
    _plain_percents(axes, lowest)
    _legend_below(axes)


def calibration(axes: Axes, at: AtTemperature, styles: Mapping[str, Style]) -> None:
    """Predicted against observed acceptance of the trees' nodes."""
    low = 1.0
    for r in drafting(at):
        assert r.calibration is not None, "they drafted"
        pairs = zip(r.calibration.predicted, r.calibration.observed, strict=True)
        seen = [(p, o) for p, o in pairs if o > 0]
        low = min([low, *(min(point) for point in seen)])
        label = f"{r.arm} (ece {r.calibration.error:.3f})"
        axes.plot(*_columns(seen), label=label, **styles[r.arm].line())
    axes.plot([low, 1], [low, 1], color=INK, linewidth=0.8, linestyle=":", label="as predicted")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("predicted probability of a node")
    axes.set_ylabel("share that was accepted")
    _legend_below(axes, num_columns=2)


def stages(axes: Axes, at: AtTemperature) -> None:
    """Where a round's time went, stages stacked."""
    places = range(len(at.rounds))
    left = np.zeros(len(at.rounds))
    for colour, stage in zip(_COLOURS, STAGES, strict=False):
        widths = np.array([getattr(r.ms, stage) for r in at.rounds])
        axes.barh(places, widths, left=left, color=colour, label=stage, height=0.7)
        left += widths
    for place, total in enumerate(left):
        axes.annotate(f" {total:.1f}", (total, place), va="center", fontsize=8, color=INK)
    axes.set_yticks(places, [r.arm for r in at.rounds])
    axes.set_ylim(len(at.rounds) - 0.4, -0.6)
    axes.set_xlim(0, 1.12 * left.max())
    axes.set_xlabel("ms per round")
    _legend_below(axes)


def prediction(axes: Axes, at: AtTemperature) -> None:
    """The cost model beside the measurement, a line for each arm."""
    drawn = at.predictions[1:]
    for place, p in enumerate(drawn):
        ends = [p.predicted_rounds_speedup, p.measured_rounds_speedup]
        axes.plot(ends, [place, place], color=_GREY, linewidth=2, zorder=1)
    for label, name, marker, colour in (
        ("predicted, rounds", "predicted_rounds_speedup", "D", "#e69f00"),
        ("measured, rounds", "measured_rounds_speedup", "o", "#0072b2"),
        ("measured, with prefill", "measured_speedup", "|", INK),
    ):
        values = [getattr(p, name) for p in drawn]
        axes.scatter(values, range(len(drawn)), marker=marker, color=colour, s=42, label=label)
    axes.axvline(1, color=INK, linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(drawn)), [p.arm for p in drawn])
    axes.set_ylim(len(drawn) - 0.4, -0.6)
    axes.set_xlabel("speed-up over ar (x), of totals")
    _legend_below(axes)


def cost_by_rows(axes: Axes, summary: Summary) -> None:
    """The verify stage against rows N, and the profile."""
    points = summary.costs_by_rows
    at = [p.at for p in points]
    bars = np.array([[p.median - p.low for p in points], [p.high - p.median for p in points]])
    axes.errorbar(
        at,
        [p.median for p in points],
        yerr=bars,
        fmt="o",
        color=_COLOURS[0],
        markersize=4,
        capsize=2,
        label="measured (median, quartiles)",
    )
    known = [(p.at, p.predicted) for p in points if p.predicted is not None]
    if known:
        axes.plot(*_columns(known), color=_COLOURS[3], linewidth=1.4, label="cost profile")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("rows N of the verify forward")
    axes.set_ylabel("verify (ms)")
    _legend_below(axes)


def cost_by_context(axes: Axes, summary: Summary, styles: Mapping[str, Style]) -> None:
    """The verify stage against context T, and the profile."""
    for curve in summary.costs_by_context:
        style = styles[curve.arm]
        at = [p.at for p in curve.points]
        axes.plot(at, [p.median for p in curve.points], label=curve.arm, **style.line())
        known = [(p.at, p.predicted) for p in curve.points if p.predicted is not None]
        axes.plot(*_columns(known), color=style.colour, linewidth=1, linestyle=":")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("context T (tokens); dotted: cost profile")
    axes.set_ylabel("verify (ms), median")
    _legend_below(axes)


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _whole_numbers(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _plain_percents(axes: Axes, lowest: float) -> None:
    """Whole decades from the one below the lowest share up, and no other labels."""
    from matplotlib.ticker import FormatStrFormatter, NullFormatter

    axes.set_ylim(10 ** np.floor(np.log10(lowest) - 0.05), 150)
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _legend_below(axes: Axes, num_columns: int = 3) -> None:
    """Below the axes, where it hides no data; constrained layout makes room for it."""
    figure = axes.get_figure(root=True)
    assert figure is not None, "axes are drawn in a figure"
    figure.legend(fontsize=8.5, loc="outside lower center", ncols=num_columns, frameon=False)
