"""Stage "respond": the target answers the prompts itself, so that a drafter learns what it says.

R requests decode side by side; a finished one makes room for the next at once. What is said depends
on the prompt, its temperature and its seed alone, not on its neighbours, so an interrupted run goes
on where it stopped and ends with the same responses.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from jaxtyping import Int64
from torch import Tensor

from ddtree.cache.batch import BatchCache
from ddtree.config import DecodeConfig
from ddtree.errors import CacheWriteError, CheckpointError, OptionError
from ddtree.models.target import Target
from ddtree.prompt import check_fits, encode
from ddtree.sampling.rule import Greedy, Sampling, rule_for
from ddtree.train.prompts import TrainingPrompt


@dataclass(frozen=True, kw_only=True)
class RespondConfig:
    """Options of the stage.

    Args:
        max_new_tokens: length limit of a response.
        num_rows: R, requests that decode side by side.
        temperature: of the sampled share of the responses.
        sampled_share: in [0, 1]; the others are greedy.
        samples_per_prompt: responses for each prompt; from the second on all are sampled.
        seed: decides which responses are sampled, and their noise.

    Raises:
        OptionError: an option outside its range.
    """

    max_new_tokens: int = 192
    num_rows: int = 32
    temperature: float = 0.8
    sampled_share: float = 0.4
    samples_per_prompt: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        # The decoder's own checks, for what the two have in common.
        DecodeConfig(
            max_new_tokens=self.max_new_tokens, temperature=self.temperature, seed=self.seed
        )
        for name in ("num_rows", "samples_per_prompt"):
            if getattr(self, name) < 1:
                raise OptionError(
                    name,
                    expected="a whole number >= 1",
                    got=getattr(self, name),
                    remedy="1 is the least.",
                )
        if not 0 <= self.sampled_share <= 1:
            raise OptionError(
                "sampled_share",
                expected="a number in [0, 1]",
                got=self.sampled_share,
                remedy="0.4 samples four responses in ten.",
            )


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


@dataclass
class _Request:
    """One response in the making."""

    index: int
    prompt: TrainingPrompt
    token_ids: list[int]
    num_prompt_tokens: int
    temperature: float
    rule: Greedy | Sampling

    @property
    def response_ids(self) -> tuple[int, ...]:
        """What has been answered so far."""
        return tuple(self.token_ids[self.num_prompt_tokens :])


def respond(
    target: Target,
    prompts: list[TrainingPrompt],
    config: RespondConfig,
    *,
    done: frozenset[int] = frozenset(),
) -> Iterator[Response]:
    """Answer all prompts, in the order in which the answers end.

    Args:
        target: with a tokenizer and a chat template.
        prompts: user messages.
        config: see `RespondConfig`.
        done: indices of requests that are answered already.

    Raises:
        PromptError: the target has no chat template.
        ContextLengthError: a prompt that does not fit.
    """
    waiting = [
        request for request in _requests(target, prompts, config) if request.index not in done
    ]
    if not waiting:
        return
    longest = max(request.num_prompt_tokens for request in waiting)
    capacity = longest + config.max_new_tokens
    num_rows = min(config.num_rows, len(waiting))
    batch = _Batch(target, num_rows, capacity, config.max_new_tokens)
    waiting.reverse()
    while waiting or batch.busy:
        for row in batch.free_rows:
            if waiting and (early := batch.fill(row, waiting.pop())) is not None:
                yield early
        yield from batch.step()


def _requests(
    target: Target, prompts: list[TrainingPrompt], config: RespondConfig
) -> Iterator[_Request]:
    for number, prompt in enumerate(prompts):
        ids = encode(prompt.prompt, target, raw=False)
        check_fits(len(ids), config.max_new_tokens, target)
        for sample in range(config.samples_per_prompt):
            index = number * config.samples_per_prompt + sample
            digest = hashlib.sha256(f"{config.seed} {index}".encode()).digest()
            sampled = sample > 0 or digest[8] / 256 < config.sampled_share
            decode = DecodeConfig(
                temperature=config.temperature if sampled else 0.0,
                seed=int.from_bytes(digest[:8], "little"),
            )
            rule = rule_for(decode)
            yield _Request(index, prompt, list(ids), len(ids), decode.temperature, rule)


class _Batch:
    """R rows, each with a request or free."""

    def __init__(self, target: Target, num_rows: int, capacity: int, max_new_tokens: int) -> None:
        self._target = target
        self._max_new_tokens = max_new_tokens
        self._cache = BatchCache(target.num_layers, num_rows, capacity, target.device)
        self._requests: list[_Request | None] = [None] * num_rows

    @property
    def busy(self) -> bool:
        """Whether any row holds a request."""
        return any(request is not None for request in self._requests)

    @property
    def free_rows(self) -> list[int]:
        """Rows without a request."""
        return [row for row, request in enumerate(self._requests) if request is None]

    @torch.inference_mode()
    def fill(self, row: int, request: _Request) -> Response | None:
        """Prefill a request into a free row; its response, if the first token ended it."""
        self._cache.filling = row
        ids = torch.tensor(request.token_ids, device=self._target.device)
        logits = self._target.run_batch(ids[None], self._cache)
        self._cache.filling = None
        self._cache.lengths[row] = request.num_prompt_tokens
        self._requests[row] = request
        return self._said(row, request, logits[0])

    @torch.inference_mode()
    def step(self) -> list[Response]:
        """One token for every row; the responses that ended."""
        if not self.busy:
            return []
        cache = self._cache
        last: Int64[Tensor, "R 1"] = torch.tensor(
            [[request.token_ids[-1] if request else 0] for request in self._requests],
            device=self._target.device,
        )
        logits = self._target.run_batch(last, cache)
        ended = []
        for row, request in enumerate(self._requests):
            if request is not None:
                cache.lengths[row] += 1
                if (response := self._said(row, request, logits[row])) is not None:
                    ended.append(response)
        return ended

    def _said(self, row: int, request: _Request, logits: Tensor) -> Response | None:
        """Decide a row's next token; its response, if that was the last."""
        token = int(request.rule.scores(logits, len(request.token_ids)).argmax())
        request.token_ids.append(token)
        finished = token in self._target.eos_token_ids
        num_new = len(request.token_ids) - request.num_prompt_tokens
        if not finished and num_new < self._max_new_tokens:
            return None
        self._requests[row] = None
        self._cache.lengths[row] = 0
        return Response(
            index=request.index,
            source=request.prompt.source,
            prompt=request.prompt.prompt,
            temperature=request.temperature,
            response_ids=request.response_ids,
            finished=finished,
        )


class ResponseFile:
    """Responses on disk, a JSON object a line, with the run's description beside them.

    A line is written whole and flushed; a last line that a kill cut short is dropped on opening.

    Args:
        folder: holds responses.jsonl and respond.json; made if it is not there.
        description: what decides the responses; a folder of another run is refused.

    Raises:
        CheckpointError: the folder belongs to a run with another description.
        CacheWriteError: it cannot be written.
    """

    def __init__(self, folder: Path, description: dict[str, object]) -> None:
        self.path = folder / "responses.jsonl"
        card = folder / "respond.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if card.exists():
                _check_same(card, description)
            else:
                partial = card.with_suffix(".partial")
                partial.write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
                partial.replace(card)
            self.responses = self._read_whole_lines()
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise _unwritable(folder, error) from error

    def append(self, response: Response) -> None:
        """Write one response."""
        try:
            self._file.write(json.dumps(asdict(response)) + "\n")
            self._file.flush()
        except OSError as error:
            raise _unwritable(self.path, error) from error
        self.responses.append(response)

    def close(self) -> None:
        """No more responses."""
        self._file.close()

    def _read_whole_lines(self) -> list[Response]:
        if not self.path.exists():
            return []
        raw = self.path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        if len(whole) < len(raw):
            with self.path.open("r+b") as file:
                file.truncate(len(whole))
        found = [json.loads(line) for line in whole.decode("utf-8").split("\n") if line]
        return [Response(**{**r, "response_ids": tuple(r["response_ids"])}) for r in found]


def _check_same(card: Path, description: dict[str, object]) -> None:
    before = json.loads(card.read_text(encoding="utf-8"))
    now = json.loads(json.dumps(description))
    changed = sorted(k for k in before.keys() | now.keys() if before.get(k) != now.get(k))
    if changed:
        raise CheckpointError(
            str(card.parent),
            expected="the folder of a run with the same target, prompts and options",
            got=f"other values of {', '.join(changed)}",
            remedy="Give another --out, or the options that are written in respond.json.",
        )


def _unwritable(path: Path, error: OSError) -> CacheWriteError:
    return CacheWriteError(
        str(path),
        expected="a writable folder with room",
        got=str(error),
        remedy="Free some space and run the same command again: nothing is lost.",
    )
