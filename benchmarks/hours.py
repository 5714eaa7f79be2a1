"""What each hour of training bought: tau of every drafter so far over the hours behind it.

    python benchmarks/hours.py [--results benchmarks/results]

Reads evaluation.json and metrics.jsonl of every RESULTS/drafter-vN, which `ddtree train` wrote, and
writes hours.md and hours.png beside them. Nothing is run. Hours are those of stage fit alone; those
of the first drafter, v0, were made elsewhere and are not counted.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from matplotlib.figure import Figure

from ddtree.journal import whole_lines, write_whole


@dataclass(frozen=True)
class Drafter:
    """One training: minutes of stage fit, prompts a suite, and tau by suite and arm."""

    name: str
    minutes: float
    num_prompts: int
    taus: dict[str, float]
    suites: dict[str, dict[str, float]]


def read(folder: Path) -> Drafter:
    metrics = [json.loads(line) for line in whole_lines(folder / "metrics.jsonl")]
    found = json.loads((folder / "evaluation.json").read_text())
    arms = found["arms"]
    return Drafter(
        name=folder.name.removeprefix("drafter-"),
        minutes=seconds_of(metrics) / 60,
        num_prompts=found["suites"][0]["num_prompts"],
        taus=dict(zip(arms, found["taus"], strict=True)),
        suites={s["name"]: dict(zip(arms, s["taus"], strict=True)) for s in found["suites"]},
    )


def seconds_of(metrics: list[dict[str, float]]) -> float:
    """Of all processes that a training took: the clock begins anew with each."""
    ends = [
        before["seconds"]
        for before, line in pairwise(metrics)
        if line["seconds"] < before["seconds"]
    ]
    return sum(ends) + metrics[-1]["seconds"]


def page(drafters: list[Drafter]) -> str:
    lines = [
        "# What each hour of training bought",
        "",
        "Greedy, 64 tokens a prompt, the first prompts of each held-out suite, mean over suites"
        " (`ddtree train evaluate`). Minutes are of stage fit; those of"
        " v0, made elsewhere, are not in.",
        "",
        "| drafter | minutes | in all | chain | B = 16 | prompts a suite |",
        "|---|---|---|---|---|---|",
    ]
    total = 0.0
    for one in drafters:
        total += one.minutes
        taus = f"{one.taus['chain']:.2f} | {one.taus['16']:.2f}"
        lines.append(
            f"| {one.name} | {one.minutes:.0f} | {total:.0f} | {taus} | {one.num_prompts} |"
        )
    return "\n".join([*lines, "", "![tau over hours](hours.png)"]) + "\n"


def draw(drafters: list[Drafter], path: Path) -> None:
    figure = Figure(figsize=(12, 5), layout="constrained")
    hours, total = [], 0.0
    for one in drafters:
        total += one.minutes / 60
        hours.append(total)
    for axes, arm, title in zip(
        figure.subplots(1, 2), ("chain", "16"), ("chain", "tree, B = 16"), strict=True
    ):
        for suite in drafters[0].suites:
            taus = [one.suites[suite][arm] for one in drafters]
            axes.plot(hours, taus, marker="o", markersize=4, linewidth=1.2, label=suite)
        mean = [one.taus[arm] for one in drafters]
        axes.plot(hours, mean, color="black", marker="o", linewidth=2.5, label="mean over suites")
        for one, x, y in zip(drafters, hours, mean, strict=True):
            axes.annotate(one.name, (x, y), xytext=(0, 7), textcoords="offset points", ha="center")
        axes.set_xlabel("hours of stage fit behind it")
        axes.set_ylabel("tau, tokens per round")
        axes.set_title(title)
        axes.set_ylim(bottom=1)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=9, loc="lower right")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    results = parser.parse_args().results
    folders = sorted(results.glob("drafter-v*"), key=lambda f: int(f.name.rpartition("v")[2]))
    drafters = [read(folder) for folder in folders]
    write_whole(results / "hours.md", page(drafters))
    draw(drafters, results / "hours.png")
    print(page(drafters))


if __name__ == "__main__":
    main()
