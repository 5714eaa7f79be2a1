"""Trace files on disk: written by whole generations, read back with the line of every mistake.

What the lines say is in `trace`; the format for others is in docs/trace-format.md.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from ddtree.errors import TraceError, first_line
from ddtree.host_marginals import HostMarginals
from ddtree.journal import write_whole, writing
from ddtree.tracing.trace import (
    FORMAT,
    READABLE_VERSIONS,
    TraceCard,
    TracedGeneration,
    TracedRound,
    parse_marginals,
)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A whole trace file.

    Args:
        card: where it comes from.
        generations: in the order of the file.
        is_torn: whether a last generation was left out because its lines are not all there.
    """

    card: TraceCard
    generations: tuple[TracedGeneration, ...]
    is_torn: bool


class TraceWriter:
    """A trace file that grows by whole generations, each flushed as it is written.

    A file that is there already is gone on with: what a kill left unfinished at its end is cut off.

    Args:
        path: of the file, in a folder that exists.
        card: the first line of a new file.

    Raises:
        TraceError: what is there is no trace, or one of other models.
        CacheWriteError: it cannot be written.

    Attributes:
        ids: of the generations that are in the file.
    """

    def __init__(self, path: Path, card: TraceCard) -> None:
        self.path = path
        self.ids: set[str] = set()
        with writing(path):
            begun = path.exists() and path.stat().st_size > 0
        end = self._take_up(card) if begun else 0
        with writing(path):
            if begun:
                os.truncate(path, end)
            self._file: BinaryIO = path.open("ab")
        if end == 0:
            self._put(card.line())

    def write(self, traced: TracedGeneration) -> None:
        """Append one generation, whose id is a new one."""
        assert traced.id not in self.ids, "an id stands for one generation"
        self._put("".join(traced.lines()))
        self.ids.add(traced.id)

    def close(self) -> None:
        """No more generations."""
        # What a full disk did not take is still waiting, and closing tries again.
        with writing(self.path):
            self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _take_up(self, card: TraceCard) -> int:
        """Read what is there; returns where its last whole generation ends, in bytes."""
        reader = _Reader(self.path)
        if reader.card is None:  # a kill came before its first line was whole
            return 0
        if reader.card.models != card.models:
            raise TraceError(
                str(self.path),
                expected=f"a trace of {_models(card)}",
                got=f"one of {_models(reader.card)}",
                remedy="Give another file.",
            )
        self.ids = {traced.id for traced in reader.generations()}
        return reader.end

    def _put(self, lines: str) -> None:
        with writing(self.path):
            self._file.write(lines.encode("utf-8"))
            self._file.flush()


def write_trace(path: Path, card: TraceCard, generations: Iterable[TracedGeneration]) -> None:
    """Write a whole file, in the place of an older one.

    Raises:
        CacheWriteError: it cannot be written.
    """
    write_whole(path, card.line() + "".join(line for g in generations for line in g.lines()))


def read_trace(path: Path) -> Trace:
    """Read a trace file.

    Raises:
        TraceError: unreadable, of another format or version, or damaged: names the line.
    """
    reader = _Reader(path)
    if reader.card is None:
        raise _not_a_trace(path, "a file without a whole line")
    generations = tuple(reader.generations())
    return Trace(card=reader.card, generations=generations, is_torn=reader.is_torn)


class _Reader:
    """Goes through a file once.

    Attributes:
        card: None where the first line is not whole.
        end: bytes up to the end of the last whole generation.
        is_torn: known at the end.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._number, self._bytes = path, 0, 0
        self.end, self.is_torn = 0, False
        self._values = self._read()
        self.card: TraceCard | None = None
        value = next(self._values, None)
        if value is not None:
            self.card, self.end = self._card(value), self._bytes

    def generations(self) -> Iterator[TracedGeneration]:
        """The whole ones, one after another."""
        seen: set[str] = set()
        for value in self._values:
            number = self._number
            with self._damage(number):
                _expect(value, "generation")
                head = TracedGeneration.parse_head(value)
                num_rounds, num_along = int(value["num_rounds"]), int(value["num_along"])
                if head.id in seen:
                    raise ValueError(f"a second generation of id {head.id!r}")
            rounds = tuple(self._rounds(num_rounds))
            along = list(self._along(num_along))
            if len(rounds) < num_rounds or len(along) < num_along:
                self.is_torn = True
                return
            whole = replace(head, rounds=rounds, along=dict(along))
            with self._damage(number):
                if len(whole.along) < num_along:
                    raise ValueError("marginals twice at one position")
                whole.check()
            seen.add(whole.id)
            self.end = self._bytes
            yield whole

    def _rounds(self, count: int) -> Iterator[TracedRound]:
        for _, value in zip(range(count), self._values, strict=False):
            with self._damage(self._number):
                _expect(value, "round")
                yield TracedRound.parse(value)

    def _along(self, count: int) -> Iterator[tuple[int, HostMarginals]]:
        for _, value in zip(range(count), self._values, strict=False):
            with self._damage(self._number):
                _expect(value, "along")
                yield int(value["start"]), parse_marginals(value["marginals"])

    def _read(self) -> Iterator[Mapping[str, Any]]:
        """The lines that are whole, parsed."""
        try:
            with self._path.open("rb") as file:
                for raw in file:  # binary: cut at "\n" and nowhere else
                    if not raw.endswith(b"\n"):
                        self.is_torn = True
                        return
                    self._number += 1
                    self._bytes += len(raw)
                    yield self._parsed(raw)
        except OSError as error:
            raise TraceError(
                str(self._path),
                expected="a trace file that can be read",
                got=error.strerror or str(error),
                remedy="`ddtree generate --trace FILE` writes one.",
            ) from error

    def _parsed(self, raw: bytes) -> Mapping[str, Any]:
        with self._damage(self._number):
            value = json.loads(raw)
            if not isinstance(value, dict):
                raise TypeError("no JSON object")
            return value

    def _card(self, value: Mapping[str, Any]) -> TraceCard:
        if value.get("format") != FORMAT:
            raise _not_a_trace(self._path, f"format {value.get('format')!r}")
        if value.get("version") not in READABLE_VERSIONS:
            raise TraceError(
                str(self._path),
                expected=f"version {' or '.join(map(str, READABLE_VERSIONS))} of the format",
                got=f"version {value.get('version')!r}",
                remedy="Read it with the ddtree that wrote it, or record it again.",
            )
        with self._damage(self._number):
            return TraceCard.parse(value)

    @contextmanager
    def _damage(self, number: int) -> Iterator[None]:
        """Around the parsing of a line: what is wrong with it is the file's damage."""
        try:
            yield
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            if self._number == 1 and isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
                raise _not_a_trace(self._path, "a first line that is no JSON") from error
            missing = isinstance(error, KeyError)
            raise TraceError(
                f"{self._path}, line {number}",
                expected="a line as docs/trace-format.md describes it",
                got=f"a line without {error}" if missing else first_line(error),
                remedy="Record the trace again, or cut the file before that generation.",
            ) from error


def _expect(value: Mapping[str, Any], kind: str) -> None:
    if value.get("kind") != kind:
        raise ValueError(f"kind {value.get('kind')!r} where {kind!r} should come")


def _models(card: TraceCard) -> str:
    return f"{card.target} with drafter {card.drafter} in {card.dtype}"


def _not_a_trace(path: Path, got: str) -> TraceError:
    return TraceError(
        str(path),
        expected=f"a {FORMAT} file",
        got=got,
        remedy="`ddtree generate --trace FILE` writes one.",
    )
