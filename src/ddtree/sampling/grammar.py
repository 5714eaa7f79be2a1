"""Text held to a JSON schema or a regular expression, token by token (llguidance, an extra).

The grammar's state follows the tokens of a row's own path, like every processor. A token that would
leave the grammar is banned; the stop tokens are allowed where the text may end.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy import ndarray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ddtree.config import DecodeConfig
from ddtree.errors import OptionError
from ddtree.sampling.processors import History


@runtime_checkable
class Matcher(Protocol):
    """What is used of llguidance's `LLMatcher`."""

    def deep_copy(self) -> Matcher:
        """Another one in the same state."""
        ...

    def consume_tokens(self, sampled_tokens: list[int]) -> bool:
        """Go on by tokens; False if they leave the grammar."""
        ...

    def validate_tokens(self, tokens: list[int]) -> int:
        """How many of these, from the first on, it would go on by."""
        ...

    def is_stopped(self) -> bool:
        """Whether nothing may come any more."""
        ...

    def compute_bitmask(self) -> bytes:
        """The tokens that may come, a bit each, the lowest bit of a byte first."""
        ...

    def get_error(self) -> str:
        """What went wrong."""
        ...


def allowed_tokens(matcher: Matcher, vocab_size: int) -> Bool[ndarray, " V"]:
    """Which tokens may come."""
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    return np.unpackbits(bits, count=vocab_size, bitorder="little").view(np.bool_)


class Grammar:
    """Bans the tokens that a grammar does not allow behind the new text so far.

    Args:
        start: the grammar's state before the first new token.
    """

    def __init__(self, start: Matcher) -> None:
        self._start = start
        self._history: History | None = None
        self._matcher = start
        self._num_consumed = 0

    def start(self) -> Matcher:
        """A state of one's own before the first new token."""
        return self._start.deep_copy()

    def __call__(self, logits: Float[Tensor, " V"], history: History) -> Float[Tensor, " V"]:
        """See `Processor`."""
        if history is not self._history:
            self._history, self._matcher = history, self._start.deep_copy()
            self._num_consumed = 0
        new = history.new_from(self._num_consumed)
        legal = self._matcher.consume_tokens(new)
        assert legal, f"the walk left the grammar: {self._matcher.get_error()}"
        self._num_consumed += len(new)
        allowed = allowed_tokens(self._matcher, logits.shape[0])
        return logits.masked_fill(~torch.from_numpy(allowed).to(logits.device), -torch.inf)


class Grammars:
    """Makes grammars over the vocabulary of one target; takes a second for a large one.

    Args:
        tokenizer: the target's.
        vocab_size: V of the target.
        stop_token_ids: end the text where the grammar allows its end.

    Raises:
        OptionError: llguidance is not installed, or the target has no fast tokenizer or no stop
            token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        vocab_size: int,
        stop_token_ids: Collection[int],
    ) -> None:
        try:
            from llguidance import hf
        except ModuleNotFoundError as error:
            raise _refused(
                "the package llguidance for json_schema and regex",
                "none",
                "Install it: pip install 'ddtree[grammar]'.",
            ) from error
        if tokenizer is None or not tokenizer.is_fast:
            raise _refused(
                "a target with a fast tokenizer for json_schema and regex",
                "none" if tokenizer is None else type(tokenizer).__name__,
                "Load a tokenizer with the model that has a tokenizer.json.",
            )
        if not stop_token_ids:
            raise _refused(
                "stop tokens, with which a text in a grammar ends",
                "none",
                "Name eos_token_id in the model's generation_config.",
            )
        self._vocabulary = hf.from_tokenizer(
            tokenizer, n_vocab=vocab_size, eos_token=sorted(stop_token_ids)
        )

    def of(self, config: DecodeConfig) -> Grammar:
        """The grammar that these options name.

        Raises:
            OptionError: a schema or an expression that llguidance does not take.
        """
        from llguidance import LLMatcher

        if config.json_schema is not None:
            name = "json_schema"
            # As Python's json writes it: free white space could go on for ever.
            grammar = LLMatcher.grammar_from_json_schema(
                config.json_schema,
                overrides={
                    "whitespace_flexible": False,
                    "item_separator": ", ",
                    "key_separator": ": ",
                },
            )
        else:
            assert config.regex is not None
            name = "regex"
            grammar = LLMatcher.grammar_from_regex(config.regex)
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0)
        if matcher.is_error():
            raise OptionError(
                name,
                expected="what llguidance can follow",
                got=" ".join(matcher.get_error().split()),
                remedy="Its documentation says what it supports.",
            )
        return Grammar(matcher)


def _refused(expected: str, got: str, remedy: str) -> OptionError:
    return OptionError("grammar", expected=expected, got=got, remedy=remedy)
