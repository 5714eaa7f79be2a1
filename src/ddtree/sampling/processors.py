"""What changes the logits before the rule decides: biases, penalties, bans, a user's processors.

Each processor sees one row of logits with the tokens of that row's own path (`History`), so what
depends on the text so far is exact inside a draft tree. Knows no tree, no noise, no temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ddtree.config import DecodeConfig
from ddtree.errors import OptionError

# As in transformers: all token ids so far [1, T] and scores [1, V] in, scores [1, V] out.
LogitsProcessor = Callable[[Tensor, Tensor], Tensor]


class History:
    """The tokens up to a row, and what processors ask of them.

    Everything is brought up to date from the tokens that came since it was last asked for, so a
    long context costs nothing per row.

    Args:
        num_prompt_tokens: so many of the tokens are the prompt.
        vocab_size: V.
        device: where the logits are.

    >>> history = History(num_prompt_tokens=1, vocab_size=4, device="cpu")
    >>> history.follow([3, 0, 0])
    >>> history.seen.tolist(), history.counts.tolist()
    ([True, False, False, True], [2.0, 0.0, 0.0, 0.0])
    """

    def __init__(
        self, *, num_prompt_tokens: int, vocab_size: int, device: torch.device | str
    ) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._token_ids: Sequence[int] = ()
        # How many tokens the text has, and how many of them each tensor below knows of.
        self._length = self._num_ids = self._num_seen = 0
        self._num_counted = num_prompt_tokens
        self._buffer = torch.empty(0, dtype=torch.int64, device=device)
        self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self._counts = torch.zeros(vocab_size, device=device)

    def follow(self, token_ids: Sequence[int]) -> None:
        """Go to the row behind these tokens: the ones followed before, and those since."""
        assert len(token_ids) >= self._length, "a history follows one text, forwards"
        self._token_ids, self._length = token_ids, len(token_ids)

    @property
    def num_new_tokens(self) -> int:
        """Tokens behind the prompt."""
        return self._length - self._num_prompt_tokens

    def last(self, count: int) -> tuple[int, ...]:
        """The last `count` tokens, the prompt's among them; fewer where there are not so many."""
        return tuple(self._token_ids[max(self._length - count, 0) : self._length])

    def new_from(self, index: int) -> list[int]:
        """The tokens behind the prompt from this place among them on."""
        return list(self._token_ids[self._num_prompt_tokens + index : self._length])

    @property
    def ids(self) -> Int64[Tensor, " T"]:
        """All tokens."""
        if self._length > self._buffer.shape[0]:
            grown = self._buffer.new_empty(2 * self._length)
            grown[: self._num_ids] = self._buffer[: self._num_ids]
            self._buffer = grown
        if self._length > self._num_ids:
            new = list(self._token_ids[self._num_ids : self._length])
            self._buffer[self._num_ids : self._length] = torch.tensor(new, dtype=torch.int64)
            self._num_ids = self._length
        return self._buffer[: self._length]

    @property
    def seen(self) -> Bool[Tensor, " V"]:
        """Which tokens occur, the prompt included."""
        if self._length > self._num_seen:
            self._seen.index_fill_(0, self.ids[self._num_seen :], True)
            self._num_seen = self._length
        return self._seen

    @property
    def counts(self) -> Float32[Tensor, " V"]:
        """How often each token occurs behind the prompt."""
        if self._length > self._num_counted:
            new = self.ids[self._num_counted :]
            self._counts.index_add_(0, new, torch.ones_like(new, dtype=torch.float32))
            self._num_counted = self._length
        return self._counts


@runtime_checkable
class Processor(Protocol):
    """Changes the logits of one row, given the tokens up to it."""

    def __call__(self, logits: Float[Tensor, " V"], history: History) -> Float[Tensor, " V"]:
        """The changed logits, float32; the given ones stay as they are."""
        ...


@dataclass(frozen=True, eq=False)
class LogitBias:
    """Adds a number to the logits of some tokens: transformers' sequence bias of length 1."""

    token_ids: Int64[Tensor, " n"]
    values: Float32[Tensor, " n"]

    def __call__(self, logits: Float[Tensor, " V"], history: History) -> Float[Tensor, " V"]:
        """See `Processor`."""
        return logits.index_add(0, self.token_ids, self.values)


@dataclass(frozen=True)
class RepetitionPenalty:
    """Divides positive logits of tokens that occur already, and multiplies negative ones.

    The prompt counts, as in transformers.
    """

    penalty: float

    def __call__(self, logits: Float[Tensor, " V"], history: History) -> Float[Tensor, " V"]:
        """See `Processor`."""
        changed = torch.where(logits < 0, logits * self.penalty, logits / self.penalty)
        return torch.where(history.seen, changed, logits)


@dataclass(frozen=True)
class CountPenalty:
    """Takes from a token's logit what its occurrences in the new text cost, as OpenAI's API does.

    Args:
        presence: once, if it occurs.
        frequency: for every time it occurs.
    """

    presence: float
    frequency: float

    def __call__(self, logits: Float[Tensor, " V"], history: History) -> Float[Tensor, " V"]:
        """See `Processor`."""
        counts = history.counts
        return logits - self.frequency * counts - self.presence * (counts > 0)


@dataclass(frozen=True, eq=False)
class Banned:
    """Bans tokens always: suppressed tokens, and bad words of one token."""

    token_ids: Int64[Tensor, " n"]

    def __call__(self, logits: Float[Tensor, " V"], history: History) -> Float[Tensor, " V"]:
        """See `Processor`."""
        return logits.index_fill(0, self.token_ids, -torch.inf)


@dataclass(frozen=True)
class BadWords:
    """Bans the last token of each sequence behind its other tokens."""

    sequences: tuple[tuple[int, ...], ...]
    # What each beginning bans, and the lengths of the beginnings.
    _endings: dict[tuple[int, ...], list[int]] = field(init=False, repr=False, compare=False)
    _lengths: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        endings: dict[tuple[int, ...], list[int]] = {}
        for *beginning, last in self.sequences:
            endings.setdefault(tuple(beginning), []).append(last)
        object.__setattr__(self, "_endings", endings)
        object.__setattr__(self, "_lengths", tuple(sorted(set(map(len, endings)))))

    def __call__(self, logits: Float[Tensor, " V"], history: History) -> Float[Tensor, " V"]:
        """See `Processor`."""
        found = (self._endings.get(history.last(length), []) for length in self._lengths)
        banned = [token for endings in found for token in endings]
        if not banned:
            return logits
        ids = torch.tensor(banned, dtype=torch.int64, device=logits.device)
        return logits.index_fill(0, ids, -torch.inf)


@dataclass(frozen=True, eq=False)
class MinNewTokens:
    """Bans the stop tokens until the text has so many tokens behind the prompt."""

    num_tokens: int
    stop_token_ids: Int64[Tensor, " n"]

    def __call__(self, logits: Float[Tensor, " V"], history: History) -> Float[Tensor, " V"]:
        """See `Processor`."""
        if history.num_new_tokens >= self.num_tokens:
            return logits
        return logits.index_fill(0, self.stop_token_ids, -torch.inf)


@dataclass(frozen=True)
class Foreign:
    """Processors of transformers' protocol, a user's or the library's, each row with its own path.

    Raises:
        OptionError: one that gives back scores of another shape.
    """

    processors: tuple[LogitsProcessor, ...]

    def __call__(self, logits: Float[Tensor, " V"], history: History) -> Float[Tensor, " V"]:
        """See `Processor`."""
        scores = logits[None].clone()  # they may write in place
        for processor in self.processors:
            scores = processor(history.ids[None], scores)
            if not isinstance(scores, Tensor) or scores.shape != (1, logits.shape[0]):
                got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
                raise OptionError(
                    "logits_processor",
                    expected=f"scores of shape (1, {logits.shape[0]}) from {processor!r}",
                    got=got,
                    remedy="Give back the scores that came, changed, as transformers' do.",
                )
        return scores[0].float()


def processors_for(
    config: DecodeConfig,
    *,
    stop_token_ids: Collection[int],
    device: torch.device | str,
    own: Sequence[LogitsProcessor] = (),
    grammar: Processor | None = None,
) -> tuple[Processor, ...]:
    """What these options do to logits before temperature, in the order of transformers' `generate`.

    The penalties that transformers lacks, presence and frequency, stand behind the repetition
    penalty. Behind a user's processors comes the grammar, so that they cannot lift its bans.

    Args:
        config: its `bad_words` are tokens by now (`words_as_tokens`).
        stop_token_ids: what `min_new_tokens` holds back; bad words that are one of them are left
            out, as transformers does.
        device: where the logits will be.
        own: processors of transformers' protocol.
        grammar: of this generation (`grammar.Grammars`).
    """
    assert not config.bad_words, "bad words are to be turned into tokens first"
    words = [w for w in config.bad_words_ids if not (len(w) == 1 and w[0] in stop_token_ids)]
    single = [word[0] for word in words if len(word) == 1]
    longer = tuple(word for word in words if len(word) > 1)

    def ids(tokens: Iterable[int]) -> Int64[Tensor, " n"]:
        return torch.tensor(list(tokens), dtype=torch.int64, device=device)

    found: list[Processor] = []
    if config.logit_bias:
        values = torch.tensor([float(v) for _, v in config.logit_bias], device=device)
        found.append(LogitBias(ids(token for token, _ in config.logit_bias), values))
    if config.repetition_penalty != 1:
        found.append(RepetitionPenalty(config.repetition_penalty))
    if config.presence_penalty or config.frequency_penalty:
        found.append(CountPenalty(config.presence_penalty, config.frequency_penalty))
    if single:
        found.append(Banned(ids(single)))
    if longer:
        found.append(BadWords(longer))
    if config.min_new_tokens and stop_token_ids:
        found.append(MinNewTokens(config.min_new_tokens, ids(sorted(stop_token_ids))))
    if config.suppress_tokens:
        found.append(Banned(ids(config.suppress_tokens)))
    if own:
        found.append(Foreign(tuple(own)))
    if grammar is not None:
        found.append(grammar)
    return tuple(found)


def words_as_tokens(
    words: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> tuple[tuple[int, ...], ...]:
    """Token sequences of words: of each as it is, and of each with a space before it.

    Only these sequences are meant: a tokenizer may have others that spell the same letters.

    Raises:
        OptionError: a word of no tokens.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        forms = dict.fromkeys((word, word if word[0].isspace() else f" {word}"))
        spelled = [tuple(tokenizer(f, add_special_tokens=False)["input_ids"]) for f in forms]
        if not any(spelled):
            raise OptionError(
                "bad_words",
                expected="words that the target's tokenizer can spell",
                got=repr(word),
                remedy="Leave it out: it cannot be said.",
            )
        found.update(dict.fromkeys(ids for ids in spelled if ids))
    return tuple(found)
