"""Responses on disk: JSON lines, written one at a time, read back with their mistakes named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ddtree.errors import PromptError
from ddtree.train.prompts import read_lines
from ddtree.train.samples import keep_card, unwritable


@dataclass(frozen=True, kw_only=True)
class Response:
    """What the target answered.

    Args:
        index: of the request, counted over all prompts and samples.
        source: where the prompt comes from.
        prompt: the user message, without the chat template.
        temperature: 0 for greedy.
        response_ids: the new tokens, the stop token included when finished.
        finished: whether a stop token ended it.
    """

    index: int
    source: str
    prompt: str
    temperature: float
    response_ids: tuple[int, ...]
    finished: bool


class ResponseFile:
    """Responses on disk, a JSON object a line, with the run's description beside them.

    A line is written whole and flushed; a last line that a kill cut short is dropped on opening.

    Args:
        folder: holds responses.jsonl and respond.json; made if it is not there.
        description: what decides the responses; a folder of another run is refused.

    Raises:
        CheckpointError: the folder belongs to a run with another description.
        PromptError: a line that is not a response.
        CacheWriteError: it cannot be written.
    """

    def __init__(self, folder: Path, description: Mapping[str, object]) -> None:
        self.path = folder / "responses.jsonl"
        keep_card(
            folder / "respond.json",
            description,
            expected="the folder of a run with the same target, prompts and options",
            remedy="Give another --out, or the options that are written in respond.json.",
        )
        try:
            self.responses = read_responses(self.path) if self._num_whole_bytes() else []
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise unwritable(folder, error) from error

    def append(self, response: Response) -> None:
        """Write one response."""
        try:
            self._file.write(json.dumps(asdict(response)) + "\n")
            self._file.flush()
        except OSError as error:
            raise unwritable(self.path, error) from error
        self.responses.append(response)

    def close(self) -> None:
        """No more responses."""
        self._file.close()

    def _num_whole_bytes(self) -> int:
        """Size of the file, after a last line that was cut short is dropped."""
        if not self.path.exists():
            return 0
        raw = self.path.read_bytes()
        num_whole = raw.rfind(b"\n") + 1
        if num_whole < len(raw):
            with self.path.open("r+b") as file:
                file.truncate(num_whole)
        return num_whole


def read_responses(file: Path) -> list[Response]:
    """All responses of a file, in order.

    Args:
        file: *.jsonl or *.jsonl.gz, a JSON object a line with at least `prompt` and `response_ids`;
            where there is no `index`, it is the number of the line, from 0.

    Raises:
        PromptError: the file is missing, unreadable or empty, a line is not as expected, or an
            index comes twice.
    """
    found: dict[int, Response] = {}
    for number, line in enumerate(read_lines(file)):
        if line.strip():
            response = _parse(line, file, number)
            if response.index in found:
                raise _wrong(file, number, f"index {response.index} for the second time")
            found[response.index] = response
    if not found:
        raise PromptError(
            str(file), expected="responses", got="an empty file", remedy="Run stage respond first."
        )
    return list(found.values())


def _parse(line: str, file: Path, number: int) -> Response:
    try:
        item = json.loads(line)
    except json.JSONDecodeError as error:
        raise _wrong(file, number, str(error)) from error
    if not isinstance(item, dict):
        raise _wrong(file, number, f"{line[:60]!r}")
    prompt, ids, index = item.get("prompt"), item.get("response_ids"), item.get("index", number)
    if not isinstance(prompt, str) or not prompt.strip():
        raise _wrong(file, number, f"prompt {prompt!r:.60}")
    if not _is_count(index):
        raise _wrong(file, number, f"index {index!r:.60}")
    if not isinstance(ids, list) or not ids or not all(map(_is_count, ids)):
        raise _wrong(file, number, f"response_ids {ids!r:.60}")
    temperature = item.get("temperature", 0.0)
    if not isinstance(temperature, int | float):
        raise _wrong(file, number, f"temperature {temperature!r:.60}")
    return Response(
        index=index,
        source=str(item.get("source", file.name.split(".")[0])),
        prompt=prompt,
        temperature=temperature,
        response_ids=tuple(ids),
        finished=bool(item.get("finished", False)),
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _wrong(file: Path, number: int, got: str) -> PromptError:
    return PromptError(
        f"{file}, line {number + 1}",
        expected='a response: an object with "prompt" (text) and "response_ids" (token ids)',
        got=got,
        remedy="Stage respond writes such files; run it again if a line was cut short.",
    )
