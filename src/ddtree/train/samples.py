"""Training samples on disk: a response with the target's features and its favourite tokens.

Shards of safetensors, each written in one move, read one sample at a time through a memory map: the
whole set is never in memory. features.json beside them says whose features they are. Knows neither
models nor prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from jaxtyping import Float16, Float32, Int32
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ddtree.errors import CacheWriteError, CheckpointError, first_line
from ddtree.journal import keep_card, unwritable

NUM_FAVOURITES = 16
"""k, the ranks of the target's own distribution that are kept for every response token."""

CARD = "features.json"

MIN_RESPONSE_TOKENS = 2
"""Of a shorter response nothing can be learnt: a block needs a token behind its anchor."""

SAMPLES_PER_SHARD = 64
_SHARD_BYTES = 128 * 2**20  # what a writer holds at most before it writes, long samples or short
_FIELDS = ("token_ids", "num_prompt_tokens", "features", "top_ids", "top_log_probs")
_HALF_MAX = 65504.0


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One prompt with its response, as the target saw it.

    Args:
        index: of the response in responses.jsonl.
        token_ids: [T], prompt and response.
        num_prompt_tokens: how many of them are the prompt.
        features: [T - 1, F], the captured layers at every position but the last.
        top_ids: [T - num_prompt_tokens, k], the tokens that the target held most probable at each
            response position, given all before it, best first.
        top_log_probs: their log-probabilities at temperature 1.
    """

    index: int
    token_ids: Int32[Tensor, " T"]
    num_prompt_tokens: int
    features: Float16[Tensor, "S F"]
    top_ids: Int32[Tensor, "G k"]
    top_log_probs: Float16[Tensor, "G k"]

    @property
    def num_response_tokens(self) -> int:
        """Tokens of the response."""
        return self.token_ids.shape[0] - self.num_prompt_tokens


def to_half(features: Tensor) -> Tensor:
    """In half precision; what lies beyond its range is clamped, since infinity would spread."""
    return features.clamp(-_HALF_MAX, _HALF_MAX).to(torch.float16)


def favourites(logits: Float32[Tensor, "M V"]) -> tuple[Tensor, Tensor]:
    """The k best tokens per row (int32) and their log-probabilities (float16), best first."""
    top = torch.topk(logits, min(NUM_FAVOURITES, logits.shape[-1]), dim=-1)
    log_probs = top.values - torch.logsumexp(logits, dim=-1, keepdim=True)
    return top.indices.to(torch.int32), log_probs.to(torch.float16)


class SampleWriter:
    """Collects samples and writes them in shards; leaving its `with` block writes the last ones.

    Args:
        folder: made with the first shard.

    Raises:
        CacheWriteError: the folder cannot be written; what is written stays.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: list[Sample] = []
        self._num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Also after an interruption: what was computed is not lost. A full disk is not tried again.
        if not isinstance(error, CacheWriteError):
            self.flush()

    def add(self, sample: Sample) -> None:
        """Take a sample; every so many are written."""
        self._waiting.append(sample)
        self._num_bytes += sample.features.nbytes
        if len(self._waiting) >= SAMPLES_PER_SHARD or self._num_bytes >= _SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is waiting."""
        if not self._waiting:
            return
        tensors = {}
        for sample in self._waiting:
            for field in _FIELDS:
                value = getattr(sample, field)
                value = torch.tensor(value) if isinstance(value, int) else value.contiguous()
                tensors[f"{sample.index}.{field}"] = value
        path = self._free_path(self._waiting[0].index)
        partial = path.with_suffix(".partial")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            save_file(tensors, partial)
            partial.replace(path)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                partial.unlink()
            raise unwritable(path, error) from error
        self._waiting, self._num_bytes = [], 0

    def _free_path(self, index: int) -> Path:
        """Named by a sample that no other writer has, so that writers need not agree on numbers.

        A response that is answered twice, because a kill came before it was written, must not push
        out the shard of the first time.
        """
        name = f"samples-{index:08d}"
        paths = (self._folder / f"{name}{more}.safetensors" for more in _endings())
        return next(path for path in paths if not path.exists())


class SampleSet(Sequence[Sample]):
    """The samples of a folder, sorted by index and read when asked for.

    Args:
        folder: with samples-*.safetensors; may be missing or empty.

    Raises:
        CheckpointError: a shard that cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._shard_of: dict[int, Path] = {}
        for path in sorted(folder.glob("samples-*.safetensors")):
            for name in _names(path):
                self._shard_of[int(name.split(".")[0])] = path
        self.indices = sorted(self._shard_of)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, place: int) -> Sample:  # type: ignore[override]
        index = self.indices[place]
        with safe_open(self._shard_of[index], framework="pt") as opened:
            values = {field: opened.get_tensor(f"{index}.{field}") for field in _FIELDS}
        return Sample(index=index, **{**values, "num_prompt_tokens": int(values[_FIELDS[1]])})

    def __iter__(self) -> Iterator[Sample]:
        return (self[place] for place in range(len(self)))

    def response_ids(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Index and response tokens of every sample, shard by shard; features are not read."""
        return ((index, response) for index, _, response in self.texts())

    def texts(self) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """Index, prompt tokens and response tokens of every sample; features are not read."""
        indices_of: dict[Path, list[int]] = {}
        for index, path in self._shard_of.items():
            indices_of.setdefault(path, []).append(index)
        for path, indices in indices_of.items():
            with safe_open(path, framework="pt") as opened:
                for index in indices:
                    num_prompt_tokens = int(opened.get_tensor(f"{index}.num_prompt_tokens"))
                    token_ids = tuple(opened.get_tensor(f"{index}.token_ids").tolist())
                    yield index, token_ids[:num_prompt_tokens], token_ids[num_prompt_tokens:]


def samples_folder(out: Path) -> Path:
    """Where stages respond and features put the samples of a run."""
    return out / "samples"


def _endings() -> Iterator[str]:
    yield ""
    yield from (f"-{number}" for number in count(1))


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as opened:
            return list(opened.keys())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            str(path),
            expected="a shard of training samples",
            got=first_line(error),
            remedy="Delete the file and run stage features again: it makes what is missing.",
        ) from error


def claim_folder(folder: Path, description: Mapping[str, object]) -> None:
    """Say in features.json whose samples a folder holds, or check that it says the same already.

    Args:
        folder: for the shards; made if it is not there.
        description: what decides the content of a sample, the response aside.

    Raises:
        CheckpointError: samples of another target or other layers, or of unknown ones.
        CacheWriteError: it cannot be written.
    """
    card = folder / CARD
    if not card.exists() and any(folder.glob("samples-*.safetensors")):
        raise CheckpointError(
            str(folder),
            expected=f"a {CARD} beside the samples, which says whose they are",
            got="none",
            remedy="Give another --out, or put the file back.",
        )
    keep_card(
        card,
        description,
        expected="a folder of samples of the same target, dtype and layers",
        remedy=f"Give another --out, or the options that are written in {CARD}.",
    )
