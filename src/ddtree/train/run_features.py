"""Stage "features" for a person: responses in, progress on the terminal, samples out."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from ddtree.errors import PromptError
from ddtree.progress import token_bar
from ddtree.train.features import (
    check_layers,
    check_same_responses,
    compute_samples,
    is_trainable,
    missing,
)
from ddtree.train.responses import Response, read_responses
from ddtree.train.samples import (
    MIN_RESPONSE_TOKENS,
    SampleSet,
    SampleWriter,
    claim_folder,
    samples_folder,
)
from ddtree.train.target_source import TargetSource
from ddtree.train.workers import check_workers, items_of


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
        check_workers(self.num_workers)


def run_features(job: FeaturesJob, console: Console) -> None:
    """Compute the samples that responses still want, into a folder; can be interrupted.

    Raises:
        UserError: see `read_responses`, `compute_samples`, `claim_folder`, `in_processes`.
    """
    responses = read_responses(job.responses)
    _check_some_trainable(responses, job.responses)
    job.target.fetch(console)
    check_layers(job.layer_ids, job.target.shape().num_layers)
    folder = samples_folder(job.out)
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
        with token_bar(console, "samples", total, total - num_missing) as advance:
            for num_tokens in items_of(work, job.num_workers):
                advance(num_tokens)
    console.print(f"{len(SampleSet(folder))} samples: {folder}")


def _sample_lengths(
    job: FeaturesJob, responses: list[Response], done: frozenset[int], part: tuple[int, int]
) -> Generator[int, None, None]:
    """Compute a part of the samples, which go to disk from here; the tokens of each."""
    target = job.target.load()
    with SampleWriter(samples_folder(job.out)) as writer:
        for sample in compute_samples(target, responses, job.layer_ids, done=done, part=part):
            writer.add(sample)
            yield sample.token_ids.shape[0]


def _check_some_trainable(responses: Sequence[Response], file: Path) -> None:
    if not any(map(is_trainable, responses)):
        raise PromptError(
            str(file),
            expected=f"a response of at least {MIN_RESPONSE_TOKENS} tokens",
            got=f"{len(responses)} shorter ones",
            remedy="Let the target answer with stage respond.",
        )
