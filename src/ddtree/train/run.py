"""Running a training stage for a person: files in, progress on the terminal, files out."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from transformers.utils import logging as transformers_logging

from ddtree.errors import OptionError, PromptError
from ddtree.models.folder import read_config, resolve_folder
from ddtree.models.loading import load_target, read_target_shape
from ddtree.models.target import Target, TargetShape, pick_device, pick_dtype
from ddtree.train.features import (
    check_layers,
    check_same_responses,
    compute_samples,
    is_trainable,
    missing,
)
from ddtree.train.journal import Journal
from ddtree.train.prompts import TrainingPrompt, read_prompts
from ddtree.train.respond import RespondConfig, respond
from ddtree.train.responses import Response, read_responses
from ddtree.train.samples import (
    MIN_RESPONSE_TOKENS,
    NUM_FAVOURITES,
    SampleSet,
    SampleWriter,
    claim_folder,
)
from ddtree.train.workers import Item, Work, in_processes

_NUM_SLICES = 64
_SLICE_BYTES = 2**14


@dataclass(frozen=True, kw_only=True)
class TargetSource:
    """A target by name, not loaded.

    Args:
        name: hub id, folder or alias.
        device: as for `load_target`.
        dtype: as for `load_target`.
    """

    name: str
    device: str = "auto"
    dtype: str = "auto"

    def load(self) -> Target:
        """The target itself, in this process."""
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        return load_target(self.name, device=self.device, dtype=self.dtype)

    def fetch(self, say: Callable[[str], None] | None = None) -> Path:
        """Its folder, fetched where it is not here: before the workers start, and not by each."""
        return resolve_folder(self.name, argument="target", say=say)

    def shape(self) -> TargetShape:
        """Its sizes, read from its configuration."""
        return read_target_shape(self.name)

    def description(self) -> dict[str, object]:
        """Its name and the dtype that it will run in."""
        config = read_config(self.fetch(), "target")
        declared = getattr(torch, str(config.get("dtype", config.get("torch_dtype"))), None)
        known = declared if isinstance(declared, torch.dtype) else None
        dtype = pick_dtype(self.dtype, pick_device(self.device), known)
        return {"target": self.name, "dtype": str(dtype)}

    def samples_description(self, layer_ids: Sequence[int]) -> dict[str, object]:
        """What decides a sample, its response aside."""
        return {
            **self.description(),
            "weights_sha256": _weights_sha256(self.fetch()),
            "layer_ids": list(layer_ids),
            "num_favourites": NUM_FAVOURITES,
        }


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
        _check_workers(self.num_workers)


@dataclass(frozen=True, kw_only=True)
class FeaturesJob:
    """A run of stage "features".

    Args:
        target: whose features.
        responses: a file, see `read_responses`.
        out: samples go to its folder "samples", as those of `RespondJob` do.
        layer_ids: 0-based ids of the layers to keep.
        num_workers: processes.

    Raises:
        OptionError: no workers.
    """

    target: TargetSource
    responses: Path
    out: Path
    layer_ids: tuple[int, ...]
    num_workers: int = 1

    def __post_init__(self) -> None:
        _check_workers(self.num_workers)


def run_respond(job: RespondJob, console: Console) -> None:
    """Answer the prompts of some files into a folder; goes on where an earlier run stopped.

    Raises:
        UserError: see `read_prompts`, `respond`, `Journal`, `claim_folder`, `in_processes`.
    """
    prompts = read_prompts(job.prompt_files)
    job.target.fetch(_saying(console))
    if job.layer_ids:
        check_layers(job.layer_ids, read_target_shape(job.target.name).num_layers)
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
            claim_folder(_samples(job.out), job.target.samples_description(job.layer_ids))
        done = frozenset(response.index for response in file.records)
        if done:
            console.print(f"{len(done)} of {total} responses are there already.")
        if len(done) < total:
            work = partial(_answers, job, prompts, done)
            with _bar(console, "responses", total, len(done)) as advance:
                for response in _items(work, job.num_workers):
                    file.append(response)
                    advance(len(response.response_ids))
    total_tokens = sum(len(response.response_ids) for response in file.records)
    console.print(f"{len(file.records)} responses, {total_tokens} tokens: {file.path}")


def run_features(job: FeaturesJob, console: Console) -> None:
    """Compute the samples that responses still want, into a folder; can be interrupted.

    Raises:
        UserError: see `read_responses`, `compute_samples`, `claim_folder`, `in_processes`.
    """
    responses = read_responses(job.responses)
    _check_some_trainable(responses, job.responses)
    job.target.fetch(_saying(console))
    check_layers(job.layer_ids, read_target_shape(job.target.name).num_layers)
    folder = _samples(job.out)
    claim_folder(folder, job.target.samples_description(job.layer_ids))
    samples = SampleSet(folder)
    check_same_responses(samples, responses)
    done = frozenset(samples.indices)
    num_short = sum(not is_trainable(response) for response in responses)
    total, num_missing = len(responses) - num_short, len(missing(responses, done))
    if num_short:
        console.print(f"{num_short} responses of under {MIN_RESPONSE_TOKENS} tokens are left out.")
    if num_missing < total:
        console.print(f"{total - num_missing} of {total} samples are there already.")
    if num_missing:
        work = partial(_sample_lengths, job, responses, done)
        with _bar(console, "samples", total, total - num_missing) as advance:
            for num_tokens in _items(work, job.num_workers):
                advance(num_tokens)
    console.print(f"{len(SampleSet(folder))} samples: {folder}")


def _answers(
    job: RespondJob, prompts: list[TrainingPrompt], done: frozenset[int], part: tuple[int, int]
) -> Generator[Response, None, None]:
    """Answer a part of the prompts; samples go to disk from here."""
    target = job.target.load()
    found = respond(target, prompts, job.config, done=done, capture=job.layer_ids, part=part)
    with SampleWriter(_samples(job.out)) as writer:
        for answer in found:
            if answer.sample is not None and is_trainable(answer.response):
                writer.add(answer.sample)
            yield answer.response


def _sample_lengths(
    job: FeaturesJob, responses: list[Response], done: frozenset[int], part: tuple[int, int]
) -> Generator[int, None, None]:
    """Compute a part of the samples, which go to disk from here; the tokens of each."""
    target = job.target.load()
    with SampleWriter(_samples(job.out)) as writer:
        for sample in compute_samples(target, responses, job.layer_ids, done=done, part=part):
            writer.add(sample)
            yield sample.token_ids.shape[0]


def _items(work: Work[Item], num_workers: int) -> Iterator[Item]:
    """What the parts give: in this process, or in several."""
    items = work((0, 1)) if num_workers == 1 else in_processes(work, num_workers)
    with closing(items):
        yield from items


@contextmanager
def _bar(
    console: Console, what: str, total: int, completed: int
) -> Iterator[Callable[[int], None]]:
    """A progress bar; call what it gives with the tokens of each item that is done."""
    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    begin, num_tokens = time.perf_counter(), 0
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=total, completed=completed, speed="")

        def advance(tokens: int) -> None:
            nonlocal num_tokens
            num_tokens += tokens
            speed = num_tokens / (time.perf_counter() - begin)
            progress.update(task, advance=1, speed=f"{speed:.0f} tokens/s")

        yield advance


def _journal(out: Path, description: Mapping[str, object]) -> Journal[Response]:
    return Journal(
        out / "responses.jsonl",
        card="respond.json",
        description=description,
        parse=Response.parse,
    )


def _samples(out: Path) -> Path:
    return out / "samples"


def _saying(console: Console) -> Callable[[str], None]:
    return partial(console.print, style="dim", soft_wrap=True, markup=False)


def _check_workers(num_workers: int) -> None:
    if num_workers < 1:
        raise OptionError(
            "num_workers",
            expected="a whole number >= 1",
            got=num_workers,
            remedy="1 works in this very process.",
        )


def _check_some_trainable(responses: Sequence[Response], file: Path) -> None:
    if not any(map(is_trainable, responses)):
        raise PromptError(
            str(file),
            expected=f"a response of at least {MIN_RESPONSE_TOKENS} tokens",
            got=f"{len(responses)} shorter ones",
            remedy="Let the target answer with stage respond.",
        )


def _weights_sha256(folder: Path) -> str:
    """A digest of slices of all weight files, spread evenly: tells a target from its fine-tune."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(str(size).encode())
        with path.open("rb") as file:
            for number in range(_NUM_SLICES):
                file.seek(size * number // _NUM_SLICES)
                digest.update(file.read(_SLICE_BYTES))
    return digest.hexdigest()
