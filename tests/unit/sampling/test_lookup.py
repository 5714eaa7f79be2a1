"""What followed the same words before: found where it is, and not where it is not."""

from __future__ import annotations

import random

import pytest
import torch

from ddtree.sampling.lookup import Guessing, Lookup, new_weights
from ddtree.tree.chain import build_chain
from ddtree.types import Marginals


def naive(text: list[int], num_tokens: int) -> list[int] | None:
    """The last earlier place of the last 5, else 3, else 2 tokens, and what follows it."""
    for size in (5, 3, 2):
        for end in range(len(text) - 1, size - 1, -1):
            if len(text) > size and text[end - size : end] == text[-size:]:
                found = list(text)
                return [found.append(found[end + i]) or found[-1] for i in range(num_tokens)]
    return None


@pytest.mark.parametrize("seed", range(5))
def test_guesses_are_those_of_a_search_from_the_end(seed: int) -> None:
    rng = random.Random(seed)
    text, lookup, num_found = [rng.randrange(4)], Lookup(), 0
    for _ in range(300):
        text += [rng.randrange(4) for _ in range(rng.randrange(1, 4))]
        guess, expected = lookup.guess(text, 6), naive(text, 6)
        assert (guess and list(guess.token_ids)) == expected
        num_found += expected is not None
    assert num_found > 200


def test_a_longer_agreement_is_another_kind() -> None:
    kinds = []
    for agreeing in (2, 3, 4, 6, 10, 14):
        tail = list(range(100, 100 + agreeing))
        guess = Lookup().guess([1, *tail, 7, 2, *tail], 1)
        assert guess is not None
        assert guess.token_ids == (7,)
        kinds.append(guess.kind)
    assert kinds == [0, 1, 2, 3, 4, 4]


def test_a_text_without_repetition_leaves_the_draft_alone() -> None:
    draft = Marginals(torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[5, 6]]))
    assert Guessing(new_weights()).into(draft, list(range(50))) is draft


def test_repetition_is_followed_more_as_it_proves_right_and_less_as_it_proves_wrong() -> None:
    draft = Marginals(torch.tensor([[0.6, 0.4]] * 2).log(), torch.tensor([[5, 6]] * 2))
    text = [1, 2, 3, 4, 1, 2]

    def chain(guessing: Guessing) -> list[int]:
        tree = build_chain(guessing.into(draft, text), 2, 2)
        return tree.token_ids.tolist()[1:]

    right, wrong = Guessing(new_weights()), Guessing(new_weights())
    assert chain(right) == [5, 5]
    for _ in range(20):
        right.into(draft, text)
        right.learn([3, 4, 9])
        wrong.into(draft, text)
        wrong.learn([6, 4])
    assert chain(right) == [3, 4]
    assert chain(wrong) == [5, 5]


def test_what_was_not_asked_is_not_learnt() -> None:
    weights = new_weights()
    before = weights.of(0, 4).tolist()
    guessing = Guessing(weights)
    guessing.learn([3, 4])
    draft = Marginals(torch.tensor([[0.6, 0.4]]).log(), torch.tensor([[5, 6]]))
    guessing.into(draft, [1, 2, 3, 4, 1, 2])
    guessing.learn([])  # the round delivered nothing that was guessed
    guessing.learn([3])
    assert weights.of(0, 4).tolist() == before
