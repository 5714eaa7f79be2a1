"""Responses on disk: JSON lines, read back with their mistakes named."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ddtree.errors import PromptError
from ddtree.train.prompts import read_lines


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

    @classmethod
    def parse(cls, line: str) -> Response:
        """From a line of JSON, as `dataclasses.asdict` gives it."""
        raw = json.loads(line)
        return cls(**{**raw, "response_ids": tuple(raw["response_ids"])})


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
