"""When a text ends: stop tokens, stop strings, the length limit. Told of every delivered token."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, runtime_checkable

from ddtree.text import TextStream
from ddtree.types import FinishReason


@runtime_checkable
class Stopping(Protocol):
    """Decides after each token whether it was the last."""

    @property
    def room(self) -> int:
        """Tokens that may still come, at most."""
        ...

    def push(self, token: int) -> FinishReason | None:
        """Take in one delivered token; says why it is the last one, or None."""
        ...


class TextStopping:
    """The usual rule: the model's stop tokens, the user's stop strings, the length limit.

    Args:
        max_new_tokens: >= 1.
        stop_token_ids: each ends the text when delivered.
        stream: told of every token; finds the stop strings. None without a tokenizer.
    """

    def __init__(
        self, max_new_tokens: int, stop_token_ids: Collection[int], stream: TextStream | None
    ) -> None:
        self._left = max_new_tokens
        self._stop_token_ids = frozenset(stop_token_ids)
        self._stream = stream

    @property
    def room(self) -> int:
        """Tokens that may still come."""
        return self._left

    def push(self, token: int) -> FinishReason | None:
        """See `Stopping.push`."""
        self._left -= 1
        stopped_by_text = self._stream.push(token) if self._stream is not None else False
        if stopped_by_text or token in self._stop_token_ids:
            return "stop"
        return "length" if self._left == 0 else None
