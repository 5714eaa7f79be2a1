"""Prompt lookup in the draft tree: what followed the same words before may follow them again.

The text so far is searched for its own last tokens; what came behind them is a guess, and `mixture`
mixes it into the drafter's distributions by how often such guesses were right. Models repeat
themselves and their prompts, and a drafter of one block does not look that far back. (Alone, as a
chain, this is transformers' `prompt_lookup_num_tokens`.) Knows no model and no stages.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from ddtree.sampling.mixture import MixtureWeights, mix
from ddtree.types import Marginals

# Tokens that must agree; the longest that is found counts.
_SIZES = (5, 3, 2)
# A longer match is more often right: kinds of guess by how many tokens agree, these being the first
# of the next kind.
_STEPS = (3, 4, 6, 10)
_LONGEST = _STEPS[-1]
_DEPTHS = 4  # told apart
# Beyond these, candidates of a depth are rarely right, and the table of pairs grows by the square.
_MOST_RANKS = 16


def new_weights() -> MixtureWeights:
    """What guesses are worth, before any was seen."""
    return MixtureWeights(1 + len(_STEPS), _DEPTHS)


@dataclass(frozen=True)
class Guess:
    """What may follow.

    Args:
        token_ids: from the next position on.
        kind: by how many tokens agree, for `MixtureWeights`.
    """

    token_ids: tuple[int, ...]
    kind: int


class Lookup:
    """Where every few tokens of a growing text were seen last.

    >>> Lookup().guess([7, 8, 9, 1, 7, 8], 3)
    Guess(token_ids=(9, 1, 7), kind=0)
    """

    def __init__(self) -> None:
        self._last_end: dict[tuple[int, ...], int] = {}
        self._num_read = 0

    def guess(self, token_ids: Sequence[int], num_tokens: int) -> Guess | None:
        """What followed the last tokens where they were seen last; None if they were not.

        Args:
            token_ids: the text; only ever longer than at the call before.
            num_tokens: how many to guess, >= 1. A text that repeats itself up to its end goes on
                doing so.
        """
        self._read(token_ids)
        length = len(token_ids)
        for size in _SIZES:
            end = self._last_end.get(tuple(token_ids[max(length - size, 0) :]))
            if end is not None:
                break
        else:
            return None
        period = length - end
        found = [token_ids[end + i % period] for i in range(num_tokens)]
        return Guess(tuple(found), bisect_right(_STEPS, self._agreeing(token_ids, end)))

    def _read(self, token_ids: Sequence[int]) -> None:
        """Note what ends at every position but the last, which has nothing behind it yet."""
        for end in range(self._num_read + 1, len(token_ids)):
            for size in _SIZES:
                if end >= size:
                    self._last_end[tuple(token_ids[end - size : end])] = end
        self._num_read = max(self._num_read, len(token_ids) - 1)

    def _agreeing(self, token_ids: Sequence[int], end: int) -> int:
        """How many tokens before `end` are the text's last ones."""
        length = len(token_ids)
        for count in range(min(end, _LONGEST)):
            if token_ids[end - 1 - count] != token_ids[length - 1 - count]:
                return count
        return min(end, _LONGEST)


class Guessing:
    """Guesses for the drafts of one request, and what they turn out to be worth.

    Args:
        weights: see `new_weights`; mutated.
    """

    def __init__(self, weights: MixtureWeights) -> None:
        self._weights = weights
        self._lookup = Lookup()
        self._asked: tuple[Guess, Sequence[float]] | None = None

    def into(self, marginals: Marginals, token_ids: Sequence[int]) -> Marginals:
        """The draft with a guess in it, or as it is where the text's end was not seen before.

        Args:
            marginals: of the drafter.
            token_ids: the text, the root included; only ever longer than at the call before.
        """
        guess = self._lookup.guess(token_ids, marginals.num_depths)
        if guess is None:
            return marginals
        weights = self._weights.of(guess.kind, marginals.num_depths)
        mixed = mix(marginals, guess.token_ids, weights, _MOST_RANKS)
        self._asked = guess, mixed.said.tolist()
        return mixed.marginals

    def learn(self, chosen: Sequence[int]) -> None:
        """As far as the text went where the guess did, each choice speaks of it.

        Args:
            chosen: what the target said in this round.
        """
        if self._asked is None:
            return
        guess, said = self._asked
        self._asked = None
        steps = zip(guess.token_ids, said, chosen, strict=False)
        for depth, (guessed, by_drafter, token) in enumerate(steps):
            self._weights.learn(guess.kind, depth, by_drafter, token == guessed)
            if token != guessed:
                return
