"""Running a training stage for a person: files in, progress on the terminal, files out."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ddtree.models.target import Target
from ddtree.train.prompts import TrainingPrompt, read_prompts
from ddtree.train.respond import RespondConfig, ResponseFile, respond

_COLUMNS = (
    TextColumn("responses"),
    BarColumn(),
    MofNCompleteColumn(),
    TextColumn("{task.fields[speed]}"),
    TimeElapsedColumn(),
    TimeRemainingColumn(),
)


def run_respond(
    target: Target, files: Sequence[Path], out: Path, config: RespondConfig, console: Console
) -> None:
    """Answer the prompts of some files into a folder; goes on where an earlier run stopped.

    Raises:
        UserError: see `read_prompts`, `respond` and `ResponseFile`.
    """
    prompts = read_prompts(files)
    texts = "\n".join(f"{p.source}\t{p.prompt}" for p in prompts).encode()
    description = {
        "target": target.name,
        "dtype": str(target.dtype),
        "prompts_sha256": hashlib.sha256(texts).hexdigest(),
        # How many rows decode side by side changes rounding at most, so it may differ on resume.
        **{k: v for k, v in asdict(config).items() if k != "num_rows"},
    }
    total = len(prompts) * config.samples_per_prompt
    with closing(ResponseFile(out, description)) as file:
        if file.responses:
            console.print(f"{len(file.responses)} of {total} responses are there already.")
        _answer(target, prompts, config, file, Progress(*_COLUMNS, console=console), total)
    total_tokens = sum(len(response.response_ids) for response in file.responses)
    console.print(f"{len(file.responses)} responses, {total_tokens} tokens: {file.path}")


def _answer(
    target: Target,
    prompts: list[TrainingPrompt],
    config: RespondConfig,
    file: ResponseFile,
    progress: Progress,
    total: int,
) -> None:
    """Answer what is not answered yet, with a bar."""
    done = frozenset(response.index for response in file.responses)
    begin, num_tokens = time.perf_counter(), 0
    with progress:
        task = progress.add_task("", total=total, completed=len(done), speed="")
        for response in respond(target, prompts, config, done=done):
            file.append(response)
            num_tokens += len(response.response_ids)
            speed = num_tokens / (time.perf_counter() - begin)
            progress.update(task, advance=1, speed=f"{speed:.0f} tokens/s")
