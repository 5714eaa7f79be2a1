"""Prompt files: JSON lines with a `prompt`, or with `turns` of which the first is taken."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddtree.errors import PromptError


@dataclass(frozen=True, kw_only=True)
class TrainingPrompt:
    """A user message and where it comes from."""

    source: str
    prompt: str


def read_prompts(files: Sequence[Path]) -> list[TrainingPrompt]:
    """All prompts of some files, in order, each message once.

    Args:
        files: *.jsonl or *.jsonl.gz; `source` is taken from the line, else it is the file's name.

    Raises:
        PromptError: a file is missing, unreadable or empty, or a line is not as expected.
    """
    found: dict[str, TrainingPrompt] = {}
    for file in files:
        for prompt in _of_file(file):
            found.setdefault(prompt.prompt, prompt)
    return list(found.values())


def _of_file(file: Path) -> Iterator[TrainingPrompt]:
    num_prompts = 0
    for number, line in enumerate(read_lines(file), start=1):
        if line.strip():
            yield _parse(line, file, number)
            num_prompts += 1
    if num_prompts == 0:
        raise PromptError(
            str(file), expected="prompts", got="an empty file", remedy="One JSON object a line."
        )


def read_lines(file: Path) -> list[str]:
    """The lines of a file of JSON lines, unzipped if its name ends in .gz.

    Raises:
        PromptError: the file is missing or unreadable.
    """
    try:
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        # Not splitlines: it also cuts at U+2028 and the like, which JSON allows inside a string.
        return raw.decode("utf-8").split("\n")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise PromptError(
            str(file),
            expected="a readable file of JSON lines in UTF-8",
            got=str(error),
            remedy="Check the path and the content of the file.",
        ) from error


def _parse(line: str, file: Path, number: int) -> TrainingPrompt:
    def wrong(got: str) -> PromptError:
        return PromptError(
            f"{file}, line {number}",
            expected='an object with a "prompt" or "turns" of text',
            got=got,
            remedy='For example {"prompt": "Why is the sky blue?"}.',
        )

    try:
        item = json.loads(line)
    except json.JSONDecodeError as error:
        raise wrong(str(error)) from error
    if not isinstance(item, dict):
        raise wrong(f"{line[:60]!r}")
    turns = item.get("turns")
    first = turns[0] if isinstance(turns, list) and turns else None
    prompt = item.get("prompt", first)
    if not isinstance(prompt, str) or not prompt.strip():
        raise wrong(f"{line[:60]!r}")
    return TrainingPrompt(source=str(item.get("source", file.name.split(".")[0])), prompt=prompt)
