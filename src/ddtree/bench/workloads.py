"""The suites of prompts that a benchmark runs: packaged samples, the hub's, or your own files.

Ten suites are known by name: those of the paper's experiments. Knows no tokenizer and no model.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

from ddtree.bench.hub import HUB_SUITES, fetch_rows
from ddtree.errors import OptionError, PromptError
from ddtree.train.prompts import read_lines

SUITES = tuple(HUB_SUITES)
# A sample of forty prompts each, with their licences, in assets/prompts.
PACKAGED_SUITES = ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench")

Source = Literal["packaged", "hub"]
SOURCES: tuple[Source, ...] = ("packaged", "hub")


@dataclass(frozen=True, kw_only=True)
class BenchPrompt:
    """A conversation to have.

    Args:
        id: unique in its suite.
        turns: the user's messages, one or more; the answers between them are the model's own.
    """

    id: str
    turns: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Prompts of one kind.

    Args:
        name: as the command line has it.
        source: where the prompts come from, for the card.
        prompts: in order; no id occurs twice.
    """

    name: str
    source: str
    prompts: tuple[BenchPrompt, ...]

    @property
    def sha256(self) -> str:
        """Of all ids and turns: another digest is another workload."""
        items = [[prompt.id, *prompt.turns] for prompt in self.prompts]
        return hashlib.sha256(json.dumps(items).encode()).hexdigest()


def read_suites(wanted: Sequence[str], source: Source | None = None) -> tuple[Suite, ...]:
    """The suites that the command line asks for.

    Args:
        wanted: names of known suites, or NAME=PATH for a file of JSON lines; several with commas
            between them may be one string.
        source: of suites without a path; None takes the packaged sample where there is one.

    Raises:
        OptionError: an unknown suite or source, a name twice, or no packaged sample.
        PromptError: a file that is missing, unreadable or empty, or a line that is no prompt.
        DownloadError, BackendError: see `fetch_rows`.
    """
    if source is not None and source not in SOURCES:
        raise OptionError(
            "source",
            expected=f"one of {', '.join(SOURCES)}",
            got=repr(source),
            remedy="Leave it out to take the packaged sample where there is one, else the hub's.",
        )
    items = [item.strip() for part in wanted for item in part.split(",")]
    names = [item.partition("=")[0] for item in items]
    for name, times in Counter(names).items():
        if times > 1:
            raise OptionError(
                "suite",
                expected="every name once",
                got=f"{name} {times} times",
                remedy="Give a file a name of its own: other=path/to/file.jsonl.",
            )
    # All names before any file or download.
    plans = [_plan(item, source) for item in items]
    return tuple(_read(name, path) for name, path in plans)


def read_jsonl(file: Path, name: str) -> tuple[BenchPrompt, ...]:
    """The prompts of a file: objects with "turns" or "prompt", and an "id" if they like.

    Args:
        file: JSON lines in UTF-8; .gz too.
        name: of the suite; with the line's number it is the id of a prompt without one.

    Raises:
        PromptError: unreadable, no prompt in it, or a line (named) that is none.
    """
    found: dict[str, BenchPrompt] = {}
    for number, line in enumerate(read_lines(file), start=1):
        if not line.strip():
            continue
        prompt = _parse(line, file, number, name)
        if prompt.id in found:
            raise _wrong_line(file, number, f"{prompt.id!r} for the second time", "Rename one.")
        found[prompt.id] = prompt
    if not found:
        raise PromptError(
            str(file),
            expected=f"prompts of suite {name}",
            got="an empty file",
            remedy='One object a line, for example {"prompt": "Why is the sky blue?"}.',
        )
    return tuple(found.values())


def _plan(item: str, source: Source | None) -> tuple[str, Path | None]:
    """The name of a suite, and its file; None for the hub."""
    name, given, path = item.partition("=")
    if given and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) and path:
        return name, Path(path).expanduser()
    if given or name not in SUITES:
        raise OptionError(
            "suite",
            expected=f"one of {', '.join(SUITES)}, or NAME=FILE.jsonl",
            got=repr(item),
            remedy="Check the spelling; a name has letters, digits and - _ . in it.",
        )
    if source == "hub" or (source is None and name not in PACKAGED_SUITES):
        return name, None
    if name not in PACKAGED_SUITES:
        raise OptionError(
            "suite",
            expected=f"one of {', '.join(PACKAGED_SUITES)} with --source packaged",
            got=repr(name),
            remedy=f"Use --source hub, or a file: {name}=path/to/file.jsonl.",
        )
    assets = Path(str(resources.files("ddtree"))) / "assets"
    return name, assets / "prompts" / f"{name}.jsonl"


def _read(name: str, path: Path | None) -> Suite:
    if path is None:
        rows = fetch_rows(name)
        prompts = tuple(BenchPrompt(id=row.id, turns=row.turns) for row in rows)
        return Suite(name=name, source=f"hub {HUB_SUITES[name].repo}", prompts=prompts)
    packaged = path.parent.parent.name == "assets" and name in PACKAGED_SUITES
    source = "packaged sample" if packaged else f"file {path}"
    return Suite(name=name, source=source, prompts=read_jsonl(path, name))


def _parse(line: str, file: Path, number: int, name: str) -> BenchPrompt:
    try:
        item = json.loads(line)
    except json.JSONDecodeError as error:
        raise _wrong_line(file, number, str(error)) from error
    if not isinstance(item, dict):
        raise _wrong_line(file, number, f"{line[:60]!r}")
    turns = item.get("turns", [item.get("prompt")])
    fine = isinstance(turns, list) and len(turns) > 0 and all(map(_is_text, turns))
    prompt_id = item.get("id", f"{name}/{number}")
    if not fine or not _is_text(str(prompt_id)):
        raise _wrong_line(file, number, f"{line[:60]!r}")
    return BenchPrompt(id=str(prompt_id), turns=tuple(turns))


def _is_text(value: object) -> bool:
    """Whether it says something, in characters that UTF-8 has (JSON also allows half of one)."""
    if not isinstance(value, str) or not value.strip():
        return False
    return not re.search("[\ud800-\udfff]", value)


def _wrong_line(
    file: Path,
    number: int,
    got: str,
    remedy: str = 'For example {"prompt": "Why is the sky blue?"}.',
) -> PromptError:
    return PromptError(
        f"{file}, line {number}",
        expected='an object with a "prompt" or "turns" of text, and an id of its own',
        got=got,
        remedy=remedy,
    )
