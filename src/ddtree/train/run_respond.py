"""Stage "respond" for a person: prompts in, progress on the terminal, responses and samples out."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from ddtree.journal import Journal
from ddtree.progress import token_bar
from ddtree.train.features import check_layers, is_trainable
from ddtree.train.prompts import TrainingPrompt, read_prompts
from ddtree.train.respond import RespondConfig, respond
from ddtree.train.responses import Response
from ddtree.train.samples import SampleWriter, claim_folder, samples_folder
from ddtree.train.target_source import TargetSource
from ddtree.train.workers import check_workers, items_of


@dataclass(frozen=True, kw_only=True)
class RespondJob:
    """A run of stage "respond".

    Args:
        target: who answers.
        prompt_files: see `read_prompts`.
        out: folder for responses.jsonl, and for samples where layers are recorded.
        config: see `RespondConfig`.
        layer_ids: 0-based ids of the layers to record; none: no samples.
        num_workers: processes, each with `num_rows` rows.

    Raises:
        OptionError: no workers.
    """

    target: TargetSource
    prompt_files: Sequence[Path]
    out: Path
    config: RespondConfig
    layer_ids: tuple[int, ...] = ()
    num_workers: int = 1

    def __post_init__(self) -> None:
        check_workers(self.num_workers)


def run_respond(job: RespondJob, console: Console) -> None:
    """Answer the prompts of some files into a folder; goes on where an earlier run stopped.

    Raises:
        UserError: see `read_prompts`, `respond`, `Journal`, `claim_folder`, `in_processes`.
    """
    prompts = read_prompts(job.prompt_files)
    job.target.fetch(console)
    if job.layer_ids:
        check_layers(job.layer_ids, job.target.shape().num_layers)
    texts = "\n".join(f"{p.source}\t{p.prompt}" for p in prompts).encode()
    description = {
        **job.target.description(),
        "prompts_sha256": hashlib.sha256(texts).hexdigest(),
        # How many rows decode side by side changes rounding at most, so it may differ on resume.
        **{k: v for k, v in asdict(job.config).items() if k != "num_rows"},
        "layer_ids": list(job.layer_ids),
    }
    total = len(prompts) * job.config.samples_per_prompt
    with closing(_journal(job.out, description)) as file:
        if job.layer_ids:
            claim_folder(samples_folder(job.out), job.target.samples_description(job.layer_ids))
        done = frozenset(response.index for response in file.records)
        if done:
            console.print(f"{len(done)} of {total} responses are there already.")
        if len(done) < total:
            work = partial(_answers, job, prompts, done)
            with token_bar(console, "responses", total, len(done)) as advance:
                for response in items_of(work, job.num_workers):
                    file.append(response)
                    advance(len(response.response_ids))
    total_tokens = sum(len(response.response_ids) for response in file.records)
    console.print(f"{len(file.records)} responses, {total_tokens} tokens: {file.path}")


def _answers(
    job: RespondJob, prompts: list[TrainingPrompt], done: frozenset[int], part: tuple[int, int]
) -> Generator[Response, None, None]:
    """Answer a part of the prompts; samples go to disk from here."""
    target = job.target.load()
    found = respond(target, prompts, job.config, done=done, capture=job.layer_ids, part=part)
    with SampleWriter(samples_folder(job.out)) as writer:
        for answer in found:
            if answer.sample is not None and is_trainable(answer.response):
                writer.add(answer.sample)
            yield answer.response


def _journal(out: Path, description: Mapping[str, object]) -> Journal[Response]:
    return Journal(
        out / "responses.jsonl",
        card="respond.json",
        description=description,
        parse=Response.parse,
    )
