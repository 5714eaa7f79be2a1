"""Charts of a training run; matplotlib is imported when one is drawn, and draws to files only."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from ddtree.errors import BackendError
from ddtree.train.accuracy import CalibrationCurve
from ddtree.train.evaluation import Evaluation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI = 120
_GREY = "0.55"


def check_installed() -> None:
    """Refuse before any work what would end without its chart.

    Raises:
        BackendError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise BackendError(
            "matplotlib",
            expected="an installed matplotlib to draw the charts with",
            got="none",
            remedy='Install it with: pip install "ddtree[train]".',
        )


def plot_evaluation(evaluation: Evaluation, title: str) -> bytes:
    """Draw tau by budget, accuracy by depth and calibration side by side.

    Args:
        evaluation: what was found.
        title: of the whole chart.

    Returns:
        A PNG image.
    """
    figure, (tau, accuracy, calibration) = _three_panels(title)
    _draw_tau(tau, evaluation)
    _draw_accuracy(accuracy, evaluation)
    _draw_calibration(calibration, evaluation)
    return _png(figure)


def plot_curve(metrics: Sequence[Mapping[str, Any]], title: str) -> bytes:
    """Draw the loss and the held-out accuracy and chain tau of a training over its steps.

    Args:
        metrics: the lines of metrics.jsonl.
        title: of the whole chart.

    Returns:
        A PNG image.
    """
    figure, (loss, accuracy, tau) = _three_panels(title)
    validated = [line for line in metrics if line["validation"] is not None]
    steps = [line["step"] for line in validated]
    found = [line["validation"] for line in validated]
    loss.plot([m["step"] for m in metrics], [m["loss"] for m in metrics], label="training", lw=0.8)
    loss.plot(steps, [f["loss"] for f in found], marker="o", markersize=3, label="held out")
    loss.set_title("Loss")
    for depth in range(len(found[0]["accuracy"]) if found else 0):
        shares = [f["accuracy"][depth] for f in found]
        accuracy.plot(steps, shares, marker="o", markersize=3, label=f"depth {depth + 1}")
    accuracy.set_title("Held-out accuracy, random anchors")
    tau.plot(steps, [f["chain_tau"] for f in found], marker="o", markersize=3, label="chain")
    tau.set_title("Held-out tau, random anchors")
    for axes in (loss, accuracy, tau):
        axes.set_xlabel("step")
        _finish(axes)
    # Seven lines leave no corner free.
    accuracy.legend(fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return _png(figure)


def _three_panels(title: str) -> tuple[Figure, tuple[Axes, Axes, Axes]]:
    from matplotlib.figure import Figure

    # A figure of its own, without pyplot: no window, no global state.
    figure = Figure(figsize=(16, 5.2), layout="constrained")
    figure.suptitle(title)
    left, middle, right = figure.subplots(1, 3)
    return figure, (left, middle, right)


def _draw_tau(axes: Axes, evaluation: Evaluation) -> None:
    places = range(len(evaluation.arms))
    for suite in evaluation.suites:
        axes.plot(places, suite.taus, marker="o", markersize=4, linewidth=1.2, label=suite.name)
    axes.plot(
        places, evaluation.taus, color="black", marker="o", linewidth=2.5, label="mean over suites"
    )
    axes.set_xticks(places, [evaluation.arms[0], *(f"B={arm}" for arm in evaluation.arms[1:])])
    axes.set_ylim(bottom=1)
    axes.set_ylabel("tau, tokens per round")
    axes.set_title("Acceptance length")
    _finish(axes)


def _draw_accuracy(axes: Axes, evaluation: Evaluation) -> None:
    along, rounds = evaluation.along, evaluation.in_rounds
    depths = range(1, len(along.top_1) + 1)
    for name, shares, style in (
        ("top 1", along.top_1, {"color": "C0", "marker": "o"}),
        ("top 5", along.top_5, {"color": "C1", "marker": "o"}),
        ("top 16", along.top_16, {"color": "C2", "marker": "o"}),
        ("top 1, in the chain's rounds", rounds.top_1, {"color": "C0", "linestyle": "--"}),
    ):
        axes.plot(depths, shares, markersize=4, label=name, **style)  # type: ignore[arg-type]
    axes.set_xticks(depths)
    axes.set_ylim(0, 1)
    axes.set_xlabel("depth")
    axes.set_ylabel("share of positions")
    axes.set_title("Accuracy along responses")
    _finish(axes)


def _draw_calibration(axes: Axes, evaluation: Evaluation) -> None:
    low = 5e-5
    axes.plot([low, 1], [low, 1], color=_GREY, linewidth=1, label="as predicted")
    for name, curve, style in (
        ("best 16 tokens", evaluation.calibration.pooled, {"color": "C2", "marker": "o"}),
        ("best token", evaluation.first_calibration.pooled, {"color": "C0", "marker": "s"}),
    ):
        label = f"{name} (error {curve.error:.4f})"
        axes.plot(*_said(curve), markersize=4, linewidth=1.2, label=label, **style)  # type: ignore[arg-type]
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, 1.3)
    axes.set_ylim(low, 1.3)
    axes.set_xlabel("predicted probability")
    axes.set_ylabel("share that was said")
    axes.set_title("Calibration, all depths")
    _finish(axes)


def _said(curve: CalibrationCurve) -> tuple[np.ndarray, np.ndarray]:
    """Points of a curve; bins of which nothing was said have no place on a logarithmic axis."""
    predicted, observed = np.array(curve.predicted), np.array(curve.observed)
    seen = observed > 0
    return predicted[seen], observed[seen]


def _finish(axes: Axes) -> None:
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()
