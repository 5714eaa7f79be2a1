"""Charts of a benchmark as SVG; matplotlib is imported when one is drawn, and draws to files only.

A chart is one small panel, so that it can be read on a phone. What is not data (axes, words) has
one colour that a page can replace by its own text colour; colours of data are Okabe and Ito's,
which the colour-blind can tell apart, and every arm has a marker of its own besides.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ddtree.bench import panels
from ddtree.bench.report_tables import drafting
from ddtree.bench.summary import AtTemperature, Summary
from ddtree.errors import BackendError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT = 5.4, 4.2  # inches; at 72 points each about as many pixels as a phone has


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A chart.

    Args:
        name: of its file, without the ending; its first word is that of its section.
        title: what it shows, for those who do not see it.
        svg: the whole file; words are outlines, so that no font is needed.
    """

    name: str
    title: str
    svg: str


def check_installed() -> None:
    """Refuse before any work what would end without its charts.

    Raises:
        BackendError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise BackendError(
            "matplotlib",
            expected="an installed matplotlib to draw the charts with",
            got="none",
            remedy='Install it with: pip install "ddtree[bench]".',
        )


def draw_all(summary: Summary) -> tuple[Plot, ...]:
    """Every chart that the numbers give, in the order of the report."""
    styles = panels.arm_styles(summary)
    charts = [chart for at in summary.temperatures for chart in _charts_at(at, styles)]
    # The temperatures of one kind of chart side by side.
    kinds = list(dict.fromkeys(_kind(chart) for chart in charts))
    charts.sort(key=lambda chart: kinds.index(_kind(chart)))
    if summary.costs_by_rows:
        charts += [
            _Chart(
                "cost-rows", "Verify forward by rows", partial(panels.cost_by_rows, summary=summary)
            ),
            _Chart(
                "cost-context",
                "Verify forward by context",
                partial(panels.cost_by_context, summary=summary, styles=styles),
            ),
        ]
    return tuple(map(_draw, charts))


@dataclass(frozen=True)
class _Chart:
    """One that is not drawn yet: its name, its title, who draws it, and its height in inches."""

    name: str
    title: str
    draw: Callable[[Axes], None]
    height: float = _HEIGHT


def _kind(chart: _Chart) -> str:
    return chart.name.rpartition("-t")[0]


def _charts_at(at: AtTemperature, styles: Mapping[str, panels.Style]) -> Iterator[_Chart]:
    """Those of one temperature."""

    def chart(name: str, title: str, draw: Callable[..., None], num_bars: int = 0) -> _Chart:
        height = 1.7 + 0.33 * num_bars if num_bars else _HEIGHT
        said = f"{title}, temperature {at.temperature:g}"
        return _Chart(f"{name}-t{at.temperature:g}", said, partial(draw, at=at), height)

    def in_styles(draw: Callable[..., None]) -> Callable[..., None]:
        return partial(draw, styles=styles)

    if any(row.mean for row in at.rows[1:]):
        forest = in_styles(panels.forest)
        yield chart("headline-speedup", "Speed-up", forest, len(at.rows) - 1)
    # One budget is no curve.
    if sum(isinstance(row.arm.budget, int) and row.mean is not None for row in at.rows) > 1:
        yield chart("budget-speedup", "Speed-up", partial(panels.by_budget, figure="speedup"))
        yield chart("budget-tau", "tau", partial(panels.by_budget, figure="tau"))
    if drafting(at):
        yield chart("acceptance-tokens", "Tokens per round", in_styles(panels.tokens_per_round))
        yield chart("acceptance-depth", "Acceptance by depth", in_styles(panels.by_depth))
        yield chart("acceptance-rank", "Acceptance by rank", in_styles(panels.by_rank))
        yield chart("calibration", "Calibration of nodes", in_styles(panels.calibration))
    if at.rounds:
        yield chart("stages", "Time of a round", panels.stages, len(at.rounds))
    if len(at.predictions) > 1:
        number = len(at.predictions) - 1
        yield chart("prediction", "Predicted and measured", panels.prediction, number)


def on_paper(plot: Plot) -> str:
    """As a file of its own, which has white behind it whatever shows it."""
    paper = '<rect width="100%" height="100%" fill="#ffffff"/>'
    opened = plot.svg.index(">", plot.svg.index("<svg")) + 1
    return plot.svg[:opened] + paper + plot.svg[opened:]


def _draw(chart: _Chart) -> Plot:
    from matplotlib.figure import Figure

    with _look(chart.name):
        # A figure of its own, without pyplot: no window, no global state.
        figure = Figure(figsize=(_WIDTH, chart.height), layout="constrained")
        axes = figure.subplots()
        chart.draw(axes)
        axes.set_title(chart.title, fontsize=11)
        axes.grid(alpha=0.35, linewidth=0.6)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        return Plot(name=chart.name, title=chart.title, svg=_svg(figure, chart.name))


@contextmanager
def _look(name: str) -> Iterator[None]:
    from matplotlib import rc_context

    ink = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    options: dict[str, str | float] = dict.fromkeys(ink, panels.INK)
    fixed = {"font.size": 10, "svg.hashsalt": name, "svg.fonttype": "path", "grid.color": "#9a9a9a"}
    with rc_context({**options, **fixed}):  # type: ignore[dict-item]
        yield


def _svg(figure: Figure, name: str) -> str:
    """The same bytes for the same chart: no date; ids that no other chart on a page has."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    whole = buffer.getvalue()
    svg = whole[whole.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}.', svg)
    svg = re.sub(r'href="#', f'href="#{name}.', svg)
    return re.sub(r"url\(#", f"url(#{name}.", svg)
