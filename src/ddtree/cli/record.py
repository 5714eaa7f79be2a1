"""The files that `ddtree generate` writes beside its text: a trace and a profile."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddtree.errors import OptionError

if TYPE_CHECKING:
    from ddtree.config import DecodeConfig
    from ddtree.decode import Stages
    from ddtree.pair import Pair
    from ddtree.tracing.recording import Recording
    from ddtree.types import Generation

TraceOption = Annotated[
    Path | None, typer.Option(help="Record rounds and marginals here, for `ddtree replay`.")
]
TraceRanksOption = Annotated[
    int | None,
    typer.Option(help="Tokens kept of each drafted position, at least.", show_default="64"),
]
ProfileOption = Annotated[
    Path | None, typer.Option(help="Write a timeline of the stages here, for ui.perfetto.dev.")
]


@dataclass(frozen=True, kw_only=True)
class RecordFiles:
    """Where to, as asked for; checked before any work.

    Args:
        trace, profile: files, or None.
        num_ranks: K of the trace, or None.

    Raises:
        OptionError: a file that could not be written, or ranks that nobody would see.
    """

    trace: Path | None
    profile: Path | None
    num_ranks: int | None

    def __post_init__(self) -> None:
        for option, path in (("--trace", self.trace), ("--profile", self.profile)):
            if path is not None:
                _check_place(option, path)
        places = [path.resolve() for path in (self.trace, self.profile) if path is not None]
        if len(set(places)) < len(places):
            raise OptionError(
                "--profile",
                expected="another file than that of --trace",
                got=str(self.profile),
                remedy="Give them two names.",
            )
        if self.num_ranks is not None and (self.trace is None or self.num_ranks < 1):
            raise OptionError(
                "--trace-ranks",
                expected="a whole number >= 1, with --trace",
                got=str(self.num_ranks) + (" without it" if self.trace is None else ""),
                remedy="64 are enough for budgets up to 64.",
            )

    def refuse_compare(self) -> None:
        """One generation is recorded, not three.

        Raises:
            OptionError: a file is wanted.
        """
        for option, path in (("--trace", self.trace), ("--profile", self.profile)):
            if path is not None:
                raise OptionError(
                    option,
                    expected="one generation, without --compare",
                    got=str(path),
                    remedy="Run each --method with a file of its own.",
                )

    def recording(self, pair: Pair, config: DecodeConfig) -> Recording | None:
        """Hears what the files need; None where none is wanted."""
        if self.trace is None and self.profile is None:
            return None
        from ddtree.tracing.recording import Recording

        return Recording(pair, config, proposals=self.trace is not None)

    def write(
        self,
        pair: Pair,
        recording: Recording,
        generation: Generation,
        *,
        say: Callable[[str], None],
    ) -> None:
        """Write what was asked for, and say so.

        Raises:
            CacheWriteError: no room on the disk, or no permission.
        """
        from ddtree.tracing.chrome_trace import write_profile
        from ddtree.tracing.recording import NUM_RANKS, card_of
        from ddtree.tracing.trace_file import write_trace

        if self.profile is not None:
            write_profile(self.profile, generation, len(recording.prompt_ids))
            say(f"Profile in {self.profile}: open it in ui.perfetto.dev.")
        if self.trace is not None:
            ranks = NUM_RANKS if self.num_ranks is None else self.num_ranks
            traced = recording.traced(generation, id="0", num_ranks=ranks)
            write_trace(self.trace, card_of(pair), [traced])
            say(f"Trace of {len(traced.rounds)} rounds in {self.trace}: see `ddtree replay`.")


def observer(recording: Recording | None) -> Callable[[Stages], Stages] | None:
    """For `Pair.run`."""
    return None if recording is None else recording.observe


def _check_place(option: str, path: Path) -> None:
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise OptionError(
            option,
            expected="a file in a folder that is there and can be written",
            got=str(path),
            remedy="Make the folder first, or give another place.",
        )
