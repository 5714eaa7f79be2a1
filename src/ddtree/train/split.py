"""Which samples are trained on and which are held out, by their prompts alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from ddtree.errors import PromptError
from ddtree.train.samples import MIN_RESPONSE_TOKENS, SampleSet
from ddtree.train.schedule import held_out


@dataclass(frozen=True, kw_only=True)
class Split:
    """Samples of two response tokens or more, by their places in the set.

    Args:
        training: to train on.
        validating: of the prompts that are held out.
        lengths: tokens of each sample to train on, its prompt included.
        said: all response tokens to train on, one after another.
        sha256: a digest of all samples, those that are too short included.
    """

    training: tuple[int, ...]
    validating: tuple[int, ...]
    lengths: tuple[int, ...]
    said: tuple[int, ...]
    sha256: str


def split_samples(samples: SampleSet, share: float) -> Split:
    """Hold out about this share of the prompts, the same ones in every run."""
    training: list[int] = []
    validating: list[int] = []
    lengths: list[int] = []
    said: list[int] = []
    digest = hashlib.sha256()
    for place, (index, prompt, response) in enumerate(sorted(samples.texts())):
        digest.update(f"{index} {prompt} {response}\n".encode())
        if len(response) < MIN_RESPONSE_TOKENS:
            continue
        if held_out(prompt, share):
            validating.append(place)
        else:
            training.append(place)
            lengths.append(len(prompt) + len(response))
            said.extend(response)
    return Split(
        training=tuple(training),
        validating=tuple(validating),
        lengths=tuple(lengths),
        said=tuple(said),
        sha256=digest.hexdigest(),
    )


def check_split(training: Sequence[int], validating: Sequence[int]) -> None:
    """Refuse a training without responses, or without any to validate on.

    Raises:
        PromptError: says how many there are.
    """
    if not training or not validating:
        raise PromptError(
            "samples",
            expected="responses of two tokens or more, some to train on and some to hold out",
            got=f"{len(training)} and {len(validating)}",
            remedy="Let the target answer more prompts, or raise validation_share.",
        )
