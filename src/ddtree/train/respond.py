"""Stage "respond": the target answers the prompts itself, so that a drafter learns what it says.

R requests decode side by side; a finished one makes room for the next at once, and what its prompt
begins with is taken over from a neighbour that begins alike. What is said depends on the prompt,
its temperature and its seed alone, and on its neighbours by rounding at most, so an interrupted run
goes on where it stopped and ends with the same responses. The features that a drafter will be
trained on pass by here anyway and can be kept, which saves a second pass of the target over all
text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ddtree.config import DecodeConfig
from ddtree.errors import OptionError
from ddtree.models.target import Target
from ddtree.prompt import check_fits, encode
from ddtree.sampling.rule import Greedy, Rule, rule_for
from ddtree.train.prompts import TrainingPrompt
from ddtree.train.responses import Response
from ddtree.train.samples import Sample, favourites, to_half
from ddtree.untested import check_side_by_side


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
class Answer:
    """A response, with its training sample where layers were captured."""

    response: Response
    sample: Sample | None


@dataclass
class _Recording:
    """What the target thought while it answered one request."""

    features: list[Tensor] = field(default_factory=list)
    top_ids: list[Tensor] = field(default_factory=list)
    top_log_probs: list[Tensor] = field(default_factory=list)


@dataclass
class _Request:
    """One response in the making."""

    index: int
    prompt: TrainingPrompt
    token_ids: list[int]
    num_prompt_tokens: int
    temperature: float
    rule: Rule
    recording: _Recording | None = None

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
    capture: Sequence[int] = (),
    part: tuple[int, int] = (0, 1),
) -> Iterator[Answer]:
    """Answer all prompts, in the order in which the answers end.

    Args:
        target: with a tokenizer and a chat template.
        prompts: user messages.
        config: see `RespondConfig`.
        done: indices of requests that are answered already.
        capture: 0-based ids of the layers to keep the outputs of; none: no samples.
        part: (i, n) answers every n-th request only, from the i-th on.

    Raises:
        PromptError: the target has no chat template.
        ContextLengthError: a prompt that does not fit.
        UnsupportedModelError: a target that is not in the table and gives other logits here.
    """
    place, num_parts = part
    waiting = [
        request
        for request in _requests(target, prompts, config)
        if request.index % num_parts == place and request.index not in done
    ]
    if not waiting:
        return
    if target.untested:
        check_side_by_side(target, waiting[0].token_ids)
    longest = max(request.num_prompt_tokens for request in waiting)
    capacity = longest + config.max_new_tokens
    num_rows = min(config.num_rows, len(waiting))
    batch = _Batch(target, num_rows, capacity, config.max_new_tokens, capture)
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

    def __init__(
        self,
        target: Target,
        num_rows: int,
        capacity: int,
        max_new_tokens: int,
        capture: Sequence[int],
    ) -> None:
        self._target = target
        self._max_new_tokens = max_new_tokens
        self._capture = capture
        self._cache = target.new_batch_cache(num_rows, capacity)
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
    def fill(self, row: int, request: _Request) -> Answer | None:
        """Prefill a request into a free row; its answer, if the first token ended it."""
        like, shared = self._alike(request)
        self._cache.begin_filling(row, like=like, shared=shared)
        ids = torch.tensor(request.token_ids[shared:], device=self._target.device)
        output = self._target.run_batch(ids[None], self._cache, capture=self._capture)
        self._cache.end_filling()
        self._cache.lengths[row] = request.num_prompt_tokens
        self._requests[row] = request
        if self._capture:
            features = [to_half(output.features).cpu()]
            if like is not None and (other := self._requests[like]) and other.recording:
                features.insert(0, other.recording.features[0][:shared])
            request.recording = _Recording([torch.cat(features)])
        ended = self._go_on([row], output.logits)
        return ended[0] if ended else None

    def _alike(self, request: _Request) -> tuple[int | None, int]:
        """A row whose prompt begins like this request's, and how many tokens they share.

        Chat templates begin alike, and samples of one prompt are the same up to their end, whose
        logits are needed.
        """
        if not self._cache.can_share:
            return None, 0
        ids = request.token_ids[:-1]
        lengths = [
            (_num_alike(ids, other.token_ids[: other.num_prompt_tokens]), row)
            for row, other in enumerate(self._requests)
            if other is not None
        ]
        shared, row = max(lengths, default=(0, 0))
        return (row, shared) if shared > 0 else (None, 0)

    @torch.inference_mode()
    def step(self) -> list[Answer]:
        """One token for every row; the answers that ended."""
        if not self.busy:
            return []
        last: Int64[Tensor, "R 1"] = torch.tensor(
            [[request.token_ids[-1] if request else 0] for request in self._requests],
            device=self._target.device,
        )
        output = self._target.run_batch(last, self._cache, capture=self._capture)
        rows = [row for row, request in enumerate(self._requests) if request is not None]
        self._cache.lengths[rows] += 1
        if self._capture:
            halves = torch.split(to_half(output.features).cpu(), 1)
            for request, half in zip(self._requests, halves, strict=True):
                if request is not None and request.recording is not None:
                    request.recording.features.append(half)
        return self._go_on(range(len(self._requests)), output.logits)

    def _go_on(self, rows: Sequence[int], logits: Float[Tensor, "M V"]) -> list[Answer]:
        """Decide the next token of some rows, free ones aside; the answers that ended."""
        if self._capture:
            self._record_favourites(rows, logits)
        most_probable = logits.argmax(dim=-1).tolist()
        ended = []
        for place, row in enumerate(rows):
            request = self._requests[row]
            if request is None:
                continue
            token = most_probable[place]
            if not isinstance(request.rule, Greedy):
                scores = request.rule.scores(logits[place], request.token_ids)
                token = int(scores.argmax())
            if (answer := self._said(row, request, token)) is not None:
                ended.append(answer)
        return ended

    def _record_favourites(self, rows: Sequence[int], logits: Float[Tensor, "M V"]) -> None:
        """Keep what the target held most probable at each row's next position."""
        ids, log_probs = (part.cpu() for part in favourites(logits.float()))
        for place, row in enumerate(rows):
            request = self._requests[row]
            if request is not None and request.recording is not None:
                request.recording.top_ids.append(ids[place])
                request.recording.top_log_probs.append(log_probs[place])

    def _said(self, row: int, request: _Request, token: int) -> Answer | None:
        """Take a row's next token; its answer, if that was the last."""
        request.token_ids.append(token)
        finished = token in self._target.eos_token_ids
        num_new = len(request.token_ids) - request.num_prompt_tokens
        if not finished and num_new < self._max_new_tokens:
            return None
        self._requests[row] = None
        self._cache.lengths[row] = 0
        response = Response(
            index=request.index,
            source=request.prompt.source,
            prompt=request.prompt.prompt,
            temperature=request.temperature,
            response_ids=request.response_ids,
            finished=finished,
        )
        return Answer(response=response, sample=_sample(request))


def _num_alike(ids: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens two texts have in common before they part."""
    apart = (i for i, (one, other) in enumerate(zip(ids, others, strict=False)) if one != other)
    return next(apart, min(len(ids), len(others)))


def _sample(request: _Request) -> Sample | None:
    """The training sample of a request that ended, if it was recorded."""
    recording = request.recording
    if recording is None:
        return None
    return Sample(
        index=request.index,
        token_ids=torch.tensor(request.token_ids, dtype=torch.int32),
        num_prompt_tokens=request.num_prompt_tokens,
        features=torch.cat(recording.features),
        top_ids=torch.stack(recording.top_ids),
        top_log_probs=torch.stack(recording.top_log_probs),
    )
