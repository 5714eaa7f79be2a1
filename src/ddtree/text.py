"""Text from tokens as they come, cut at the first stop string.

Pieces joined are the text: nothing is taken back once it was given out. Incomplete UTF-8 and what
could be the beginning of a stop string are held back until they are decided.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


class TextStream:
    """Turns pushed tokens into text.

    Args:
        tokenizer: special tokens are left out of the text.
        stop: the text ends before the first of these strings that occurs.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids: list[int] = []
        # Tokens [0, _done) are in the text; [_from, _done) are decoded again as left context.
        self._from = 0
        self._done = 0
        self._text = ""
        self._given = 0
        self._stopped = False

    @property
    def text(self) -> str:
        """All text so far that is complete, up to a stop string."""
        return self._text

    def push(self, token: int) -> bool:
        """Take in one token; True if a stop string is now complete."""
        self._ids.append(token)
        fresh = self._fresh()
        # A replacement character at the end may be half of a character that is still coming.
        if fresh and not fresh.endswith("\ufffd"):
            self._text += fresh
            self._from, self._done = self._done, len(self._ids)
            fresh = ""
        self._cut(self._text + fresh.rstrip("\ufffd"))
        return self._stopped

    def finish(self) -> None:
        """No more tokens: what was held back as incomplete becomes text."""
        if not self._stopped:
            self._text += self._fresh()
            self._from = self._done = len(self._ids)
            self._cut(self._text)
            self._stopped = True

    def take(self) -> str:
        """The text that is new since the last call and can no longer change."""
        end = len(self._text)
        if not self._stopped:
            end -= self._held()
        piece = self._text[self._given : end]
        self._given = max(self._given, end)
        return piece

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _fresh(self) -> str:
        """The text of the tokens that are not in the text yet."""
        left = self._decode(self._ids[self._from : self._done])
        return self._decode(self._ids[self._from :])[len(left) :]

    def _cut(self, text: str) -> None:
        """If a stop string is in this text, it ends before the first one."""
        found = [i for i in map(text.find, self._stop) if i >= 0]
        if found:
            self._text = text[: min(found)]
            self._stopped = True

    def _held(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max((len(s) for s in self._stop), default=1) - 1
        for size in range(min(longest, len(self._text)), 0, -1):
            if any(s.startswith(self._text[-size:]) for s in self._stop):
                return size
        return 0
