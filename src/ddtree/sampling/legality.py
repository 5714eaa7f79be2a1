"""What a rule bans whatever the logits say, here and ahead: what is not worth drafting.

Known before the target is asked: suppressed tokens, bad words of one token, biases of -inf, stop
tokens before the least length, and all that a grammar refuses. Bans that depend on the text so far
in other ways (longer bad words, a user's processors) are left to the walk. Knows no drafter and no
tree; what it says can change the number of rounds, never the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool
from numpy import ndarray
from torch import Tensor

from ddtree.sampling.grammar import Grammar, Matcher, allowed_tokens
from ddtree.sampling.processors import Banned, LogitBias, MinNewTokens
from ddtree.sampling.rule import Processed, Rule


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """What is known of the next positions.

    Args:
        forced: the tokens that come next, none else being legal; may be none.
        banned: [L, V], True for a token that cannot come at that depth. By the grammar, as deep as
            its state is known: the forced tokens and the position behind them.
    """

    forced: tuple[int, ...]
    banned: Bool[Tensor, "L V"]


class Legality:
    """Follows one text and says what may come behind it.

    Args:
        always: [V], tokens that are never legal.
        held_back: [V], tokens that are not legal yet.
        num_held_back: so many tokens the text has first.
        grammar: before the first token, or None.
    """

    def __init__(
        self,
        *,
        always: Bool[ndarray, " V"],
        held_back: Bool[ndarray, " V"],
        num_held_back: int,
        grammar: Matcher | None,
    ) -> None:
        self._always = always
        self._early = always | held_back
        self._num_held_back = num_held_back
        self._grammar = grammar
        self._num_tokens = 0

    @property
    def has_grammar(self) -> bool:
        """Whether what is legal depends on more than the position."""
        return self._grammar is not None

    def follow(self, token_ids: Sequence[int]) -> None:
        """The text goes on by these tokens."""
        self._num_tokens += len(token_ids)
        if self._grammar is not None:
            legal = self._grammar.consume_tokens(list(token_ids))
            assert legal, f"the text left the grammar: {self._grammar.get_error()}"

    def allows(self, token_ids: tuple[int, ...]) -> bool:
        """Whether the grammar takes these tokens behind the text; asking leaves no trace."""
        if self._grammar is None:
            return True
        return self._grammar.validate_tokens(list(token_ids)) == len(token_ids)

    def ahead(self, num_depths: int) -> Ahead:
        """What is known of the next positions.

        Args:
            num_depths: L >= 1, so many of them.
        """
        banned: Bool[ndarray, "L V"] = np.empty((num_depths, self._always.shape[0]), np.bool_)
        for depth, row in enumerate(banned):
            row[:] = self._always if self._may_stop(depth) else self._early
        forced: list[int] = []
        if self._grammar is not None:
            state = self._grammar.deep_copy()
            for row in banned:
                row |= ~allowed_tokens(state, row.shape[0])
                token = int(row.argmin())
                # No legal token is for the walk to complain of; behind a second nothing is known.
                if row[token] or not row[token + 1 :].all():
                    break
                forced.append(token)
                if not state.consume_tokens([token]) or state.is_stopped():
                    break
        return Ahead(forced=tuple(forced), banned=torch.from_numpy(banned))

    def _may_stop(self, depth: int) -> bool:
        return self._num_tokens + depth >= self._num_held_back


def legality_of(rule: Rule, vocab_size: int) -> Legality | None:
    """What a rule bans whatever the logits say; None where that is nothing.

    Args:
        rule: of one text, of which nothing is said yet.
        vocab_size: V of the target.
    """
    always, held_back = np.zeros((2, vocab_size), np.bool_)
    num_held_back, grammar = 0, None
    for processor in rule.processors if isinstance(rule, Processed) else ():
        if isinstance(processor, Banned):
            always[processor.token_ids.cpu().numpy()] = True
        elif isinstance(processor, LogitBias):
            never = processor.values == -torch.inf
            always[processor.token_ids[never].cpu().numpy()] = True
        elif isinstance(processor, MinNewTokens):
            held_back[processor.stop_token_ids.cpu().numpy()] = True
            num_held_back = processor.num_tokens
        elif isinstance(processor, Grammar):
            grammar = processor.start()
    if grammar is None and not (always.any() or held_back.any()):
        return None
    return Legality(
        always=always, held_back=held_back, num_held_back=num_held_back, grammar=grammar
    )
