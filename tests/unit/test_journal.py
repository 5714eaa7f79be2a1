"""The journal: what was written whole comes back, and no run goes on in another's folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddtree.errors import CacheWriteError, CheckpointError
from ddtree.journal import Journal, write_whole
from tests.support.disk import fill_disk

DESCRIPTION = {"seed": 0, "budgets": (8, 16)}


@dataclass(frozen=True)
class Note:
    name: str
    value: float


def journal(folder: Path, **changes: object) -> Journal[Note]:
    return Journal(
        folder / "notes.jsonl",
        card="run.json",
        description={**DESCRIPTION, **changes},
        parse=lambda line: Note(**json.loads(line)),
    )


def write(folder: Path, *notes: Note) -> None:
    with closing(journal(folder)) as opened:
        for note in notes:
            opened.append(note)


FIRST, SECOND = Note("first", 0.1), Note("with\u2028a separator\x85", 2.0)


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    write(tmp_path / "new" / "folder", FIRST)
    write(tmp_path / "new" / "folder", SECOND)
    with closing(journal(tmp_path / "new" / "folder")) as opened:
        assert opened.records == [FIRST, SECOND]


@pytest.mark.parametrize("cut", range(1, 31))
def test_a_torn_last_line_is_dropped_and_the_next_starts_afresh(tmp_path: Path, cut: int) -> None:
    write(tmp_path, FIRST, SECOND)
    file = tmp_path / "notes.jsonl"
    file.write_bytes(file.read_bytes()[:-cut])
    write(tmp_path, FIRST)
    with closing(journal(tmp_path)) as opened:
        assert opened.records == [FIRST, FIRST]


def test_a_record_is_on_disk_before_the_journal_is_closed(tmp_path: Path) -> None:
    with closing(journal(tmp_path)) as opened:
        opened.append(FIRST)
        assert (tmp_path / "notes.jsonl").read_bytes().endswith(b"\n")


def test_the_folder_of_another_run_is_refused_by_what_changed(tmp_path: Path) -> None:
    write(tmp_path, FIRST)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(CheckpointError, match=r"other values of limit, seed\. .* in run\.json"):
        journal(tmp_path, seed=1, limit=3)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: (folder / "run.json").unlink(), "expected a run.json beside notes.jsonl"),
    (lambda folder: (folder / "run.json").write_text("{"), "run.json: expected a JSON object"),
    (lambda folder: (folder / "run.json").write_text("[1]"), "run.json: expected a JSON object"),
    (lambda folder: (folder / "notes.jsonl").write_text("{\n"), "line 1: expected a result"),
    (lambda folder: (folder / "notes.jsonl").write_text('{"name": "x"}\n'), "line 1: expected"),
    (lambda folder: (folder / "notes.jsonl").write_bytes(b"\xff\n"), "line 1: expected"),
]


@pytest.mark.parametrize(("damage", "named"), DAMAGE)
def test_a_damaged_folder_is_named(
    damage: Callable[[Path], object], named: str, tmp_path: Path
) -> None:
    write(tmp_path, FIRST)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=named):
        journal(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CacheWriteError, match="a writable folder"):
        journal(tmp_path / "file")


def test_a_full_disk_is_named_and_what_was_written_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, FIRST)
    with monkeypatch.context() as full:
        fill_disk(full, "notes.jsonl")
        with pytest.raises(CacheWriteError, match=r"notes\.jsonl: .* No space left .* Free some"):
            write(tmp_path, SECOND)
    write(tmp_path, SECOND)
    with closing(journal(tmp_path)) as opened:
        assert opened.records == [FIRST, SECOND]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(tmp_path / "file.txt", "old")
    fill_disk(monkeypatch, "file.txt.partial")
    with pytest.raises(CacheWriteError, match=r"file\.txt: .* No space left .* Free some space"):
        write_whole(tmp_path / "file.txt", "new")
    assert (tmp_path / "file.txt").read_text() == "old"


def test_a_card_that_a_full_disk_does_not_take_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_disk(monkeypatch, "run.json.partial")
    with pytest.raises(CacheWriteError, match="No space left"):
        journal(tmp_path)


def test_a_file_is_replaced_in_one_move(tmp_path: Path) -> None:
    for content in ("old", b"new"):
        write_whole(tmp_path / "file.txt", content)
    assert [file.name for file in tmp_path.iterdir()] == ["file.txt"]
    assert (tmp_path / "file.txt").read_text() == "new"
