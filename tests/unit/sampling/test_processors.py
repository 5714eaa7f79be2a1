"""Processors: bit for bit transformers' own, in its order; histories that grow with the text."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddtree.config import DecodeConfig
from ddtree.errors import OptionError
from ddtree.sampling.processors import BadWords, CountPenalty, History, words_as_tokens
from ddtree.sampling.rule import Greedy, Processed, Sampling, rule_for
from tests.support.library import library_processors
from tests.support.models import VOCAB_SIZE
from tests.support.tokenizers import tiny_tokenizer

NUM_PROMPT = 6
EOS = (3, 11)
OPTIONS: list[dict[str, object]] = [
    {"logit_bias": ((5, 2.5), (9, -100.0), (60, 0.125))},
    {"logit_bias": ((5, -float("inf")),)},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"bad_words_ids": ((7,), (8,))},
    {"bad_words_ids": ((1, 7), (2, 1, 8), (2, 1, 9), (4, 4), (3,))},
    {"min_new_tokens": 9},
    {"suppress_tokens": (0, 31)},
]
EVERYTHING = {
    "logit_bias": ((1, 3.0), (2, -4.0)),
    "repetition_penalty": 1.5,
    "bad_words_ids": ((7,), (1, 2)),
    "min_new_tokens": 5,
    "suppress_tokens": (31,),
}


def rows(seed: int, count: int = 40) -> list[tuple[list[int], Tensor]]:
    """Texts that grow, over few tokens so that much repeats, with logits behind them."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(12, (NUM_PROMPT + count,), generator=generator).tolist()
    logits = 4 * torch.randn(count, VOCAB_SIZE, generator=generator)
    return [(text[: NUM_PROMPT + i], logits[i]) for i in range(count)]


def rule(options: dict[str, object], **more: object) -> Processed:
    made = rule_for(
        DecodeConfig(**options),
        num_prompt_tokens=NUM_PROMPT,
        stop_token_ids=EOS,
        **more,
    )
    assert isinstance(made, Processed)
    return made


def doubled(ids: Tensor, scores: Tensor) -> Tensor:
    """A user's processor that depends on the text, does not commute, and writes in place."""
    scores *= 2
    scores[0, ids[0, -1]] += 1
    return scores


# --- transformers' own ---


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_each_processor_is_bit_for_bit_the_librarys(options: dict[str, object]) -> None:
    theirs = library_processors({**options, "eos_token_id": list(EOS)}, NUM_PROMPT)
    ours = rule(options)
    changed = 0
    for text, logits in rows(1):
        expected = theirs(torch.tensor([text]), logits[None].clone())[0]
        assert torch.equal(ours.scores(logits, text), expected)
        changed += not torch.equal(expected, logits)
    assert changed > 0, "this option did nothing to any row"


def test_all_together_stand_in_the_librarys_order_and_a_users_own_come_last() -> None:
    asked = {**EVERYTHING, "eos_token_id": list(EOS)}
    theirs = library_processors(asked, NUM_PROMPT, own=[doubled])
    ours = rule(EVERYTHING, logits_processor=[doubled])
    for text, logits in rows(2):
        expected = theirs(torch.tensor([text]), logits[None].clone())[0]
        assert torch.equal(ours.scores(logits, text), expected)


def test_temperature_and_the_filters_come_behind_them_in_the_librarys_order() -> None:
    filters = {"temperature": 0.7, "top_k": 30, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.9}
    asked = {**EVERYTHING, **filters, "eos_token_id": list(EOS)}
    theirs = library_processors(asked, NUM_PROMPT, own=[doubled])
    ours = rule({**EVERYTHING, **filters, "seed": 5}, logits_processor=[doubled])
    assert isinstance(ours.then, Sampling)
    for text, logits in rows(3):
        expected = theirs(torch.tensor([text]), logits[None].clone())[0]
        noise = ours.then.noise.row(len(text), VOCAB_SIZE)
        scores = ours.scores(logits, text) - noise
        assert torch.equal(scores.isneginf(), expected.isneginf())
        torch.testing.assert_close(
            scores.log_softmax(-1), expected.log_softmax(-1), rtol=0, atol=2e-5
        )


def test_count_penalties_take_what_openai_says_and_leave_the_prompt_out() -> None:
    history = History(num_prompt_tokens=2, vocab_size=4, device="cpu")
    history.follow([0, 0, 1, 1, 1, 3])
    changed = CountPenalty(presence=0.5, frequency=0.25)(torch.zeros(4), history)
    assert changed.tolist() == [0.0, -0.5 - 3 * 0.25, 0.0, -0.5 - 0.25]


def test_a_bad_word_that_is_a_stop_token_is_left_out_as_the_library_does() -> None:
    alone = rule_for(DecodeConfig(bad_words_ids=((EOS[0],),)), stop_token_ids=EOS)
    assert alone == Greedy()


# --- growing ---


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=40),
    st.integers(0, 12),
    st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=20),
)
def test_a_history_knows_of_a_grown_text_what_one_made_anew_knows(
    text: list[int], num_prompt: int, steps: list[tuple[int, bool]]
) -> None:
    history = History(num_prompt_tokens=num_prompt, vocab_size=10, device="cpu")
    length = 0
    for step, asked in [*steps, (len(text), True)]:
        length = min(length + step, len(text))
        history.follow(text[:length])
        if not asked:
            continue
        counted = Counter(text[num_prompt:length])
        assert history.ids.tolist() == text[:length]
        assert history.seen.tolist() == [token in text[:length] for token in range(10)]
        assert history.counts.tolist() == [counted[token] for token in range(10)]
        assert history.num_new_tokens == length - num_prompt
        assert history.last(3) == tuple(text[:length][-3:])


def test_a_chooser_goes_on_where_the_last_one_ended() -> None:
    options = {**EVERYTHING, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    growing = rule(options, logits_processor=[doubled])
    texts, logits = zip(*rows(4), strict=True)
    # Three rows per chooser, as a walk that accepts two nodes asks for them.
    for first in range(0, 39, 3):
        choose = growing.chooser(torch.stack(logits[first : first + 3]))
        for row, text in enumerate(texts[first : first + 3]):
            fresh = rule(options, logits_processor=[doubled]).scores(logits[first + row], text)
            assert choose(row, text) == int(fresh.argmax())


def test_the_given_logits_stay_as_they_are() -> None:
    for text, logits in rows(5, count=3):
        before = logits.clone()
        rule(EVERYTHING, logits_processor=[doubled]).scores(logits, text)
        assert torch.equal(logits, before)


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=4).map(tuple), max_size=6),
    st.lists(st.integers(0, 2), max_size=8),
)
@settings(max_examples=60)
def test_bad_words_ban_exactly_what_would_complete_one(
    words: list[tuple[int, ...]], text: list[int]
) -> None:
    history = History(num_prompt_tokens=0, vocab_size=3, device="cpu")
    history.follow(text)
    banned = BadWords(tuple(words))(torch.zeros(3), history).isneginf().tolist()
    for token in range(3):
        grown = (*text, token)
        assert banned[token] == any(grown[-len(word) :] == word for word in words)


# --- refusals ---


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_nothing_is_left_to_choose_it_is_said(temperature: float) -> None:
    everything = {"suppress_tokens": tuple(range(VOCAB_SIZE)), "temperature": temperature}
    choose = rule(everything).chooser(torch.zeros(1, VOCAB_SIZE))
    with pytest.raises(OptionError, match="expected a token that may come at position 3, got none"):
        choose(0, [1, 2, 3])


@pytest.mark.parametrize("wrong", [lambda ids, scores: scores[0], lambda ids, scores: None])
def test_a_users_processor_that_gives_back_something_else_is_named(wrong: object) -> None:
    ours = rule({}, logits_processor=[wrong])
    with pytest.raises(OptionError, match=r"logits_processor: expected scores of shape \(1, 61\)"):
        ours.scores(torch.zeros(VOCAB_SIZE), [1])


# --- words ---


def test_words_are_spelled_alone_and_behind_a_space() -> None:
    tokenizer = tiny_tokenizer()
    spelled = words_as_tokens(["fox", " fox", "the"], tokenizer)
    assert [tokenizer.decode(ids) for ids in spelled] == ["fox", " fox", "the", " the"]


def test_without_options_there_is_no_processor_and_greedy_is_one_argmax() -> None:
    assert rule_for(DecodeConfig(), stop_token_ids=EOS, num_prompt_tokens=4) == Greedy()
    neutral = DecodeConfig(repetition_penalty=1, min_new_tokens=0, logprobs=3)
    assert rule_for(neutral, stop_token_ids=EOS) == Greedy()
