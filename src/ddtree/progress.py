"""The progress bar of the stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

# Items may take minutes each; rich would forget how long after half a minute.
_SPEED_WINDOW_S = 3600.0


def stage_progress(console: Console, what: str) -> Progress:
    """A bar with counts, a description and the time left.

    Args:
        console: to draw on.
        what: is counted.
    """
    return Progress(
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        speed_estimate_period=_SPEED_WINDOW_S,
    )


@contextmanager
def token_bar(
    console: Console, what: str, total: int, completed: int
) -> Iterator[Callable[[int], None]]:
    """A bar that says tokens/s; call what it gives with the tokens of each item that is done."""
    begin, num_tokens = time.perf_counter(), 0
    with stage_progress(console, what) as progress:
        task = progress.add_task("", total=total, completed=completed)

        def advance(tokens: int) -> None:
            nonlocal num_tokens
            num_tokens += tokens
            speed = num_tokens / (time.perf_counter() - begin)
            progress.update(task, advance=1, description=f"{speed:.0f} tokens/s")

        yield advance
