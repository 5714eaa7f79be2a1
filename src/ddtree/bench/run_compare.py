"""`ddtree bench compare`: two runs side by side on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ddtree.bench.records import read_run
from ddtree.bench.report_tables import Table, temperature_label
from ddtree.bench.run_pairs import ChangeRow, ChangesAt, changes_between, differing_conditions
from ddtree.bench.run_report import rich_table
from ddtree.bench.statistics import Bootstrap, Estimate
from ddtree.errors import OptionError


def compare_runs(a: Path, b: Path, console: Console) -> None:
    """Print what changed from run `a` to run `b`, paired by prompt.

    Args:
        a, b: folders of finished runs.
        console: for the tables.

    Raises:
        CheckpointError: no results in one of the folders.
        OptionError: the runs have no prompt in common.
    """
    before, after = read_run(a), read_run(b)
    bootstrap = Bootstrap()
    every = changes_between(before, after, bootstrap)
    if not any(at.plain_speeds for at in every):
        raise OptionError(
            "compare",
            expected="two runs with prompts of the same suites, ids and temperatures",
            got="none in common",
            remedy="Run both with the same --suite and --temperature.",
        )
    console.print(f"A: {a}\nB: {b}", markup=False, highlight=False, soft_wrap=True)
    for line in differing_conditions(before, after):
        console.print(f"Not alike (A | B): {line}", style="yellow", markup=False)
    for at in every:
        _show(at, console)
    console.print(
        f"In brackets: {bootstrap.level:.0%} intervals of the difference by the paired bootstrap "
        "over prompts; a conversation's turns are drawn together, and every suite for itself. "
        "Each run's speed-up is over its own plain decoding.",
        style="dim",
    )


def _show(at: ChangesAt, console: Console) -> None:
    label = temperature_label(at.temperature)
    for title, rows in (
        (f"Speed-up over ar, {label}", at.speedups),
        (f"tau, {label}", at.taus),
        (f"Tokens/s of plain decoding, {label}", at.plain_speeds),
    ):
        if rows:
            console.print(rich_table(_table(title, rows)))
            console.print()
    for note in at.notes:
        style = "yellow" if "refused" in note else "dim"
        console.print(note, style=style, markup=False, highlight=False)
    console.print()


def _table(title: str, rows: Sequence[ChangeRow]) -> Table:
    return Table(
        title=title,
        headings=("arm", "suite", "A", "B", "B - A"),
        rows=tuple(
            (
                # Said once: the suites of an arm stand together.
                row.arm if i == 0 or rows[i - 1].arm != row.arm else "",
                row.suite,
                f"{row.figure.before:.2f}",
                f"{row.figure.after:.2f}",
                _signed(row.figure.change),
            )
            for i, row in enumerate(rows)
        ),
        num_words=2,
    )


def _signed(change: Estimate) -> str:
    if change.low is None or change.high is None:
        return f"{change.value:+.2f}"
    return f"{change.value:+.2f} [{change.low:+.2f}, {change.high:+.2f}]"
