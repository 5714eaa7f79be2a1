"""What every section of the run is given: where and how large, and whom to tell what it finds."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

Json = dict[str, object]
# Takes a kind of message and its content.
Send = Callable[[tuple[str, object]], None]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Where and how large.

    Args:
        device: of the models.
        small: tiny shapes and few repeats: does it run at all?
    """

    device: str
    small: bool

    @property
    def on_cuda(self) -> bool:
        """Whether there are graphs, a profiler of kernels, and something to wait for."""
        return self.device.startswith("cuda")

    @property
    def repeats(self) -> int:
        """Of every timed point."""
        return 2 if self.small else 11

    @property
    def contexts(self) -> tuple[int, ...]:
        """T of the verify forwards."""
        return (8, 24) if self.small else (200, 4000)

    @property
    def rows(self) -> tuple[int, ...]:
        """N of the verify forwards."""
        return (1, 4) if self.small else (1, 2, 4, 8, 16, 32, 64, 128, 256)

    def wait(self) -> None:
        """Until the device is done."""
        if self.on_cuda:
            torch.cuda.synchronize()


class Report:
    """What a section finds, told as it comes: what is told survives the section.

    Args:
        send: takes a kind of message and its content.
        deadline: on `time.monotonic`, when to stop between cases.
    """

    def __init__(self, send: Send, deadline: float) -> None:
        self._send = send
        self._deadline = deadline

    def card(self, facts: Mapping[str, object]) -> None:
        """Facts about the whole run."""
        self._send(("card", dict(facts)))

    def note(self, text: str) -> None:
        """A sentence for the reader."""
        self._send(("note", text))

    def row(self, title: str, **facts: object) -> None:
        """A row of a table; three floats are low quartile, median and high quartile in ms."""
        self._send(("row", (title, facts)))

    def check(self, title: str, ok: bool, **facts: object) -> None:
        """A row that says whether something holds; one that does not fails the section."""
        self.row(title, **facts, ok=ok)

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """An exception inside is written down, and what follows the block goes on."""
        try:
            yield
        except Exception:  # noqa: BLE001, one broken case must not take the lease with it
            self._send(("failure", {"case": name, "traceback": traceback.format_exc()}))

    def late(self, what: str) -> bool:
        """Whether the section's time is over; then `what` is on record as left out."""
        if time.monotonic() < self._deadline:
            return False
        self._send(("skipped", what))
        return True
