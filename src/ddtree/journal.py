"""Results of a long run on disk, one a line, so that the run can go on where it was stopped.

Knows nothing of what the records say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ddtree.errors import CacheWriteError, CheckpointError, first_line

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Record = TypeVar("Record", bound="DataclassInstance")


class Journal(Generic[Record]):
    """Records on disk, a JSON object a line, with the run's description beside them.

    A line is written whole and flushed; a last line that a kill cut short is dropped on opening.

    Args:
        path: of the lines; its folder is made if it is not there.
        card: name of the file beside it that holds the description.
        description: what decides the records; the folder of another run is refused.
        parse: from a line to its record.

    Raises:
        CheckpointError: the folder belongs to a run with another description, or is damaged.
        CacheWriteError: it cannot be written.
    """

    def __init__(
        self,
        path: Path,
        *,
        card: str,
        description: Mapping[str, object],
        parse: Callable[[str], Record],
    ) -> None:
        self.path = path
        beside = path.parent / card
        if path.exists() and not beside.exists():
            raise CheckpointError(
                str(path.parent),
                expected=f"a {card} beside {path.name}, which says of which run it is",
                got="none",
                remedy="Give another --out, or delete the folder to start again.",
            )
        keep_card(
            beside,
            description,
            expected="the folder of a run with the same models, prompts and options",
            remedy=f"Give another --out, or the options that are written in {card}.",
        )
        self.records = [
            _parsed(parse, line, path, number)
            for number, line in enumerate(whole_lines(path), start=1)
        ]
        with writing(path):
            self._file = path.open("a", encoding="utf-8")

    def append(self, record: Record) -> None:
        """Write one record."""
        line = json.dumps(asdict(record), allow_nan=False) + "\n"
        with writing(self.path):
            self._file.write(line)
            self._file.flush()
        self.records.append(record)

    def close(self) -> None:
        """No more records."""
        # What a full disk did not take is still waiting, and closing tries again.
        with writing(self.path):
            self._file.close()


def tuples_of(value: Any) -> Any:
    """What JSON gave, with tuples in place of lists, as frozen records have them.

    >>> tuples_of({"a": [1, [2]]})
    {'a': (1, (2,))}
    """
    if isinstance(value, dict):
        return {key: tuples_of(item) for key, item in value.items()}
    return tuple(map(tuples_of, value)) if isinstance(value, list | tuple) else value


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around whatever a long run writes: a full disk is a user's matter, not a bug of ours.

    Args:
        path: what is written, for the message.

    Raises:
        CacheWriteError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise unwritable(path, error) from error


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file beside its place and move it there: a kill leaves the old one whole.

    Raises:
        CacheWriteError: it cannot be written.
    """
    partial = path.with_name(f"{path.name}.partial")
    with writing(path):
        partial.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        partial.replace(path)


def keep_card(card: Path, description: Mapping[str, object], *, expected: str, remedy: str) -> None:
    """Write a run's description as JSON, or compare it with the one that is there.

    Raises:
        CheckpointError: another description, or an unreadable one.
        CacheWriteError: it cannot be written.
    """
    with writing(card.parent):
        card.parent.mkdir(parents=True, exist_ok=True)
        if not card.exists():
            write_whole(card, json.dumps(description, indent=1) + "\n")
            return
        written = card.read_bytes()
    try:
        before = dict(json.loads(written))
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            str(card), expected="a JSON object", got=first_line(error), remedy="Give another --out."
        ) from error
    changed = changed_names(before, description)
    if changed:
        raise CheckpointError(
            str(card.parent),
            expected=expected,
            got=f"other values of {', '.join(changed)}",
            remedy=remedy,
        )


def changed_names(before: Mapping[str, object], description: Mapping[str, object]) -> list[str]:
    """What differs between a description that was read from JSON and one of today."""
    now = json.loads(json.dumps(description))  # as it would be read back: tuples become lists
    return sorted(k for k in before.keys() | now.keys() if before.get(k) != now.get(k))


def unwritable(path: Path, error: Exception) -> CacheWriteError:
    """The error for results that cannot be written."""
    return CacheWriteError(
        str(path),
        expected="a writable folder with room",
        got=str(error),
        remedy="Free some space and run the same command again: nothing is lost.",
    )


def whole_lines(path: Path) -> list[str]:
    """The lines that were written whole; a torn last one is cut off the file.

    Raises:
        CacheWriteError: it cannot be read or cut.
    """
    if not path.exists():
        return []
    with writing(path):
        raw = path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        if len(whole) < len(raw):
            with path.open("r+b") as file:
                file.truncate(len(whole))
    # Not splitlines: it also cuts at U+2028 and the like, which JSON allows inside a string.
    return whole.decode("utf-8", errors="replace").split("\n")[:-1]


def _parsed(parse: Callable[[str], Record], line: str, path: Path, number: int) -> Record:
    try:
        return parse(line)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}, line {number}",
            expected="a result of this run",
            got=f"{type(error).__name__}: {first_line(error)}",
            remedy="Delete the line: what is missing is made again.",
        ) from error
