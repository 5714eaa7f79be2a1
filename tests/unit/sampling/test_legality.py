"""What a rule bans whatever the logits say, followed along a text."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddtree.config import DecodeConfig
from ddtree.sampling.grammar import Grammar
from ddtree.sampling.legality import Legality, legality_of
from ddtree.sampling.rule import rule_for

V, STOP = 6, 5


class Spelled:
    """A grammar of some texts, each of which ends with `STOP`: a `Matcher`."""

    def __init__(self, texts: Sequence[tuple[int, ...]], said: tuple[int, ...] = ()) -> None:
        self.texts, self.said = [(*text, STOP) for text in texts], said

    def _next(self) -> set[int]:
        end = len(self.said)
        return {t[end] for t in self.texts if t[:end] == self.said and len(t) > end}

    def deep_copy(self) -> Spelled:
        copy = Spelled((), self.said)
        copy.texts = self.texts
        return copy

    def consume_tokens(self, sampled_tokens: list[int]) -> bool:
        for token in sampled_tokens:
            if token not in self._next():
                return False
            self.said = (*self.said, token)
        return True

    def validate_tokens(self, tokens: list[int]) -> int:
        copy = self.deep_copy()
        return next((i for i, t in enumerate(tokens) if not copy.consume_tokens([t])), len(tokens))

    def is_stopped(self) -> bool:
        return not self._next()

    def compute_bitmask(self) -> bytes:
        return bytes([sum(1 << token for token in self._next())])

    def get_error(self) -> str:
        return "not one of the texts"


def of(*texts: tuple[int, ...], **options: object) -> Legality:
    config = DecodeConfig(regex="texts" if texts else None, **options)
    grammar = Grammar(Spelled(texts)) if texts else None
    rule = rule_for(config, num_prompt_tokens=3, stop_token_ids=[STOP], grammar=grammar)
    found = legality_of(rule, V)
    assert found is not None
    return found


def legal(legality: Legality, num_depths: int) -> list[list[int]]:
    banned = legality.ahead(num_depths).banned
    return [torch.nonzero(~row).flatten().tolist() for row in banned]


def test_a_rule_that_bans_nothing_for_certain_has_none() -> None:
    for options in (
        {},
        {"temperature": 1.0},
        {"repetition_penalty": 2.0, "bad_words_ids": ((1, 2),), "logit_bias": ((2, -50.0),)},
    ):
        assert legality_of(rule_for(DecodeConfig(**options)), V) is None


def test_what_is_never_legal_is_banned_at_every_depth() -> None:
    infinite = float("-inf")
    options = {"suppress_tokens": (1,), "bad_words_ids": ((0,), (3, 4))}
    legality = of(logit_bias=((2, infinite), (4, -9.0)), temperature=1.0, **options)
    assert legal(legality, 2) == [[3, 4, 5], [3, 4, 5]]
    assert not legality.has_grammar


def test_stop_tokens_are_banned_up_to_the_least_length_of_the_new_text() -> None:
    legality, everything = of(min_new_tokens=3), list(range(V))
    early = everything[:-1]
    assert legal(legality, 5) == [early, early, early, everything, everything]
    legality.follow([1, 1])
    assert legal(legality, 2) == [early, everything]
    legality.follow([1, 1])
    assert legal(legality, 1) == [everything]


def test_forced_tokens_are_known_up_to_where_ways_part_and_the_position_behind_too() -> None:
    legality = of((1, 2, 3, 0), (1, 2, 4, 0))
    ahead = legality.ahead(5)
    assert ahead.forced == (1, 2)
    assert legal(legality, 5) == [[1], [2], [3, 4], list(range(V)), list(range(V))]
    legality.follow([1, 2, 4])
    # Nothing comes behind the end.
    assert legality.ahead(4).forced == (0, STOP)
    assert legality.ahead(1).forced == (0,)


def test_what_is_banned_besides_the_grammar_can_force_a_token() -> None:
    legality = of((1, 3), (2, 3), suppress_tokens=(2,))
    assert legality.ahead(3).forced == (1, 3, STOP)


def test_where_nothing_is_legal_nothing_is_forced() -> None:
    legality = of((1, 3), suppress_tokens=(1,))
    assert legality.ahead(2).forced == ()
    assert legal(legality, 2) == [[], [0, 2, 3, 4, 5]]


def test_a_prefix_is_allowed_if_the_grammar_goes_on_by_it_and_asking_leaves_no_trace() -> None:
    legality = of((1, 2, 3), (1, 4))
    legality.follow([1])
    for _ in range(2):
        assert legality.allows(())
        assert legality.allows((2, 3, STOP))
        assert legality.allows((4, STOP))
        assert not legality.allows((2, STOP))
        assert not legality.allows((4, STOP, 1))
    assert of(suppress_tokens=(2,)).allows((2, 2))
