"""The ten suites of the paper on the Hugging Face hub: where they are, and what is asked.

The templates are those of the paper's benchmark in substance: mathematics with steps and a boxed
answer, HumanEval inside a request that names its tests, MBPP, MT-Bench and Alpaca as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from ddtree.errors import BackendError, DownloadError, first_line

Row = Mapping[str, object]

_BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True, kw_only=True)
class HubSuite:
    """Where a suite is, and how a row of it becomes a prompt.

    Args:
        repo: id of the data set.
        files: pattern of its files that hold the test split, *.parquet or *.jsonl.
        id: of a row, from the row and its place among all rows, from 0.
        turns: the user's messages.
    """

    repo: str
    files: str
    id: Callable[[Row, int], str]
    turns: Callable[[Row], Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class HubPrompt:
    """A row as a prompt: see `HubSuite`."""

    id: str
    turns: tuple[str, ...]


def _text(row: Row, key: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise TypeError(f"{key} is {type(value).__name__}")
    return value


def _humaneval(row: Row) -> list[str]:
    task = "Write a solution to the following problem and make sure that it passes the tests:"
    return [f"{task}\n```python\n{_text(row, 'prompt')}\n```"]


def _livecodebench(row: Row) -> list[str]:
    starter = row.get("starter_code")
    shape = (
        f"Complete this code:\n```python\n{starter}\n```"
        if starter
        else "Read from standard input and write to standard output."
    )
    return [
        "Solve this programming problem in Python. The program must do what the problem says and "
        f"pass all of its tests.\n\n{_text(row, 'question_content')}\n\n{shape}\n"
        "Answer with the program alone, in one ```python block."
    ]


def _swe_bench(row: Row) -> list[str]:
    return [f"Problem statement:\n{_text(row, 'problem_statement')}\nPlease fix this issue."]


def _alpaca(row: Row) -> list[str]:
    instruction = _text(row, "instruction")
    return [f"{instruction}\n\nInput:\n{row['input']}" if row.get("input") else instruction]


def _mt_bench(row: Row) -> list[str]:
    turns = row["prompt"]
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise TypeError("prompt is no list of text")
    return turns


def _math(key: str) -> Callable[[Row], list[str]]:
    return lambda row: [_text(row, key) + _BOXED]


# The ids are those of the packaged samples where there is one.
HUB_SUITES: Mapping[str, HubSuite] = {
    "gsm8k": HubSuite(
        repo="openai/gsm8k",
        files="main/test-*.parquet",
        id=lambda row, index: f"gsm8k/test/{index}",
        turns=_math("question"),
    ),
    "math500": HubSuite(
        repo="HuggingFaceH4/MATH-500",
        files="test.jsonl",
        id=lambda row, index: f"math500/{row['unique_id']}",
        turns=_math("problem"),
    ),
    "aime24": HubSuite(
        repo="HuggingFaceH4/aime_2024",
        files="data/train-*.parquet",
        id=lambda row, index: f"aime24/{index}",
        turns=_math("problem"),
    ),
    "aime25": HubSuite(
        repo="MathArena/aime_2025",
        files="data/train-*.parquet",
        id=lambda row, index: f"aime25/{index}",
        turns=_math("problem"),
    ),
    "humaneval": HubSuite(
        repo="openai/openai_humaneval",
        files="openai_humaneval/test-*.parquet",
        id=lambda row, index: str(row["task_id"]),
        turns=_humaneval,
    ),
    "mbpp": HubSuite(
        repo="google-research-datasets/mbpp",
        files="sanitized/test-*.parquet",
        id=lambda row, index: f"mbpp/{row['task_id']}",
        turns=lambda row: [_text(row, "prompt")],
    ),
    "livecodebench": HubSuite(
        repo="livecodebench/code_generation_lite",
        files="test*.jsonl",
        id=lambda row, index: f"livecodebench/{row['question_id']}",
        turns=_livecodebench,
    ),
    "swe-bench-lite": HubSuite(
        repo="princeton-nlp/SWE-bench_Lite",
        files="data/test-*.parquet",
        id=lambda row, index: str(row["instance_id"]),
        turns=_swe_bench,
    ),
    "mt-bench": HubSuite(
        repo="HuggingFaceH4/mt_bench_prompts",
        files="data/train-*.parquet",
        id=lambda row, index: f"mt-bench/{row['prompt_id']}",
        turns=_mt_bench,
    ),
    "alpaca": HubSuite(
        repo="tatsu-lab/alpaca",
        files="data/train-*.parquet",
        id=lambda row, index: f"alpaca/{index}",
        turns=_alpaca,
    ),
}


def fetch_rows(name: str) -> list[HubPrompt]:
    """All prompts of a suite from the hub, or from its local cache.

    Args:
        name: a key of `HUB_SUITES`.

    Raises:
        DownloadError: the hub cannot be reached, or its files are not as expected.
        BackendError: pyarrow, which reads parquet, is not installed.
    """
    suite = HUB_SUITES[name]
    if suite.files.endswith(".parquet") and find_spec("pyarrow") is None:
        raise BackendError(
            "pyarrow",
            expected=f"an installed pyarrow to read {name} from the hub with",
            got="none",
            remedy='Install it with: pip install "ddtree[bench]".',
        )
    files = _files(name)
    prompts: dict[str, HubPrompt] = {}
    index = 0
    try:
        for index, row in enumerate(_rows(suite, files)):
            prompt_id = suite.id(row, index)
            prompts.setdefault(prompt_id, HubPrompt(id=prompt_id, turns=tuple(suite.turns(row))))
    except (KeyError, TypeError, ValueError) as error:
        raise _unexpected(
            f"{name}, near row {index} of {suite.repo}", "the columns of this data set", error
        ) from error
    return list(prompts.values())


def _files(name: str) -> list[Path]:
    """The suite's files on this disk, downloaded if they are not there yet."""
    suite = HUB_SUITES[name]
    try:
        folder = Path(
            snapshot_download(suite.repo, repo_type="dataset", allow_patterns=[suite.files])
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise DownloadError(
            f"suite {name}",
            expected=f"the data set {suite.repo} from the hub or its local cache",
            got=first_line(error),
            remedy=f"Check the network (HF_ENDPOINT, HF_TOKEN), or give a file: {name}=FILE.jsonl.",
        ) from error
    every = sorted(path for path in folder.rglob("*") if path.is_file())
    files = [path for path in every if fnmatch(path.relative_to(folder).as_posix(), suite.files)]
    if not files:
        raise _unexpected(f"suite {name}", f"files {suite.files} in {suite.repo}", None)
    return files


def _rows(suite: HubSuite, files: Sequence[Path]) -> Iterator[Row]:
    for file in files:
        if suite.files.endswith(".parquet"):
            from pyarrow import parquet

            yield from parquet.read_table(file).to_pylist()
            continue
        # Line by line: LiveCodeBench has files of a gigabyte. newline="\n" as JSON lines want it.
        with file.open(encoding="utf-8", newline="\n") as lines:
            yield from (json.loads(line) for line in lines if line.strip())


def _unexpected(argument: str, expected: str, error: Exception | None) -> DownloadError:
    got = "none" if error is None else f"{type(error).__name__}: {first_line(error)}"
    return DownloadError(
        argument,
        expected=expected,
        got=got,
        remedy="The data set may have changed: give its prompts as a file, NAME=FILE.jsonl.",
    )
