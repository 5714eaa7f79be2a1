"""The decoding rule: equal to Hugging Face's processors, and exact in distribution."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import product

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from ddtree.config import DecodeConfig
from ddtree.sampling.noise import gumbel_noise
from ddtree.sampling.rule import Greedy, Sampling, process_logits, rule_for
from ddtree.stopping import TextStopping
from ddtree.types import DraftTree
from ddtree.walk import walk

NUM_SEEDS = 20_000
POSITION = 7
LOGITS_5 = torch.tensor([1.2, -0.3, 0.8, 0.1, -1.1])


def hugging_face(
    logits_V: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None = None,
    typical_p: float | None = None,
) -> Tensor:
    scores, no_ids = logits_V.float()[None], torch.zeros(1, 0, dtype=torch.long)
    scores = TemperatureLogitsWarper(temperature)(no_ids, scores)
    if top_k is not None:
        scores = TopKLogitsWarper(top_k)(no_ids, scores)
    if top_p is not None and top_p < 1.0:  # as generate() does
        scores = TopPLogitsWarper(top_p)(no_ids, scores)
    if min_p is not None:
        scores = MinPLogitsWarper(min_p)(no_ids, scores)
    if typical_p is not None and typical_p < 1.0:  # as generate() does
        scores = TypicalLogitsWarper(typical_p)(no_ids, scores)
    return scores[0]


def p_value(counts: Sequence[float], probs: Sequence[float]) -> float:
    """Pearson's chi-square: how often exact sampling would miss `probs` by as much as `counts`."""
    total = sum(counts)
    if any(count for count, p in zip(counts, probs, strict=True) if p == 0):
        return 0.0
    expected = [total * p for p in probs if p > 0]
    assert min(expected) >= 5, "too few draws for this test"
    seen = [count for count, p in zip(counts, probs, strict=True) if p > 0]
    statistic = sum((c - e) ** 2 / e for c, e in zip(seen, expected, strict=True))
    if len(expected) == 1:
        return 1.0
    half = torch.tensor([(len(expected) - 1) / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(half[0], half[1]).item()


@pytest.fixture(scope="module")
def noise_of_seeds() -> Tensor:
    # Checking the annotations of 20,000 calls would take most of this file's time.
    jaxtyping.config.update("jaxtyping_disable", True)
    noise = torch.stack([gumbel_noise(seed, POSITION, 5) for seed in range(NUM_SEEDS)])
    jaxtyping.config.update("jaxtyping_disable", False)
    return noise


# --- processing ---

top_ks = st.none() | st.integers(1, 12)
top_ps = st.none() | st.sampled_from([0.05, 0.3, 0.5, 0.7, 0.9, 0.95, 1.0])
min_ps = st.none() | st.sampled_from([0.0, 0.01, 0.1, 0.5, 0.99, 1.0])
typical_ps = st.none() | st.sampled_from([0.05, 0.3, 0.6, 0.95, 1.0])


@given(
    # On this grid, with these temperatures, shifting by the maximum rounds nothing.
    st.lists(st.integers(-24, 24).map(lambda n: n / 8), min_size=1, max_size=10),
    st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0]),
    top_ks,
    top_ps,
    min_ps,
    typical_ps,
    st.integers(0, 3),
)
@settings(max_examples=250)
def test_processing_equals_hugging_face_ties_and_banned_tokens_included(
    values: list[float],
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    typical_p: float | None,
    num_banned: int,
) -> None:
    logits = torch.tensor([-math.inf] * min(num_banned, len(values) - 1) + values)
    filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "typical_p": typical_p}
    ours = process_logits(logits, temperature=temperature, **filters)
    theirs = hugging_face(logits, temperature, **filters)
    assert torch.equal(ours.isneginf(), theirs.isneginf())
    torch.testing.assert_close(ours.log_softmax(-1), theirs.log_softmax(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 1.3])
@pytest.mark.parametrize("top_k", [None, 1, 50, 5000])
@pytest.mark.parametrize("top_p", [None, 0.1, 0.9, 1.0])
def test_processing_equals_hugging_face_on_a_large_vocabulary(
    temperature: float, top_k: int | None, top_p: float | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(3000, generator=generator)
    ours = process_logits(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    theirs = hugging_face(logits, temperature, top_k, top_p)
    assert torch.equal(ours.isneginf(), theirs.isneginf())
    torch.testing.assert_close(ours.log_softmax(-1), theirs.log_softmax(-1), rtol=0, atol=1e-4)


def test_min_p_keeps_what_is_p_times_as_probable_as_the_best() -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    processed = process_logits(logits, temperature=1.0, min_p=0.5)
    assert processed.isfinite().tolist() == [True, True, False, False]


def test_typical_p_takes_the_tokens_nearest_to_the_expected_surprise_first() -> None:
    # Surprises 0.92, 1.20, 1.61, 2.30; 1.28 is expected: the second is nearest, the first not far.
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    kept = {
        mass: process_logits(logits, temperature=1.0, typical_p=mass).isfinite().tolist()
        for mass in (0.2, 0.4, 0.6, 0.95)
    }
    assert kept == {
        0.2: [False, True, False, False],
        0.4: [False, True, True, False],
        0.6: [True, True, True, False],
        0.95: [True, True, True, True],
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_processed_in_float32(dtype: torch.dtype) -> None:
    logits = LOGITS_5.to(dtype)
    expected = process_logits(logits.float(), temperature=0.7, top_k=4, top_p=0.9)
    actual = process_logits(logits, temperature=0.7, top_k=4, top_p=0.9)
    assert actual.dtype == torch.float32
    assert torch.equal(actual, expected)


def test_ties_with_the_kth_logit_stay() -> None:
    processed = process_logits(torch.tensor([2.0, 1.0, 1.0, 0.0]), temperature=1.0, top_k=2)
    assert processed.tolist() == [0.0, -1.0, -1.0, -math.inf]


def test_the_most_probable_token_stays_however_small_top_p() -> None:
    processed = process_logits(LOGITS_5, temperature=1.0, top_p=1e-9)
    assert processed.isfinite().tolist() == [True, False, False, False, False]


def test_processing_leaves_its_input_alone() -> None:
    logits = LOGITS_5.clone()
    process_logits(logits, temperature=0.5, top_k=2, top_p=0.5)
    assert torch.equal(logits, LOGITS_5)


@pytest.mark.parametrize("temperature", [1e-6, 1e-20, 1e-38, 1e-42, 1e-60, 5e-324])
@pytest.mark.parametrize(("top_k", "top_p"), [(None, None), (3, 0.9)])
def test_tiny_temperatures_neither_overflow_nor_give_nan(
    temperature: float, top_k: int | None, top_p: float | None
) -> None:
    logits = torch.tensor([-300.0, 500.0, 499.0, -math.inf])
    processed = process_logits(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    assert processed[1] == 0.0
    assert (processed[[0, 2, 3]] < -1e5).all()


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-60])
@given(seed=st.integers(0, 2**64 - 1))
@settings(max_examples=20)
def test_sampling_at_a_tiny_temperature_is_greedy(temperature: float, seed: int) -> None:
    choose = Sampling(temperature=temperature, seed=seed).chooser(LOGITS_5[None])
    assert choose(0, [1, 2, 3]) == 0


# --- the rule ---


def test_greedy_takes_the_argmax_of_the_row_asked_for() -> None:
    logits = torch.randn(20, 30, generator=torch.Generator().manual_seed(1))
    choose = Greedy().chooser(logits)
    assert [choose(row, []) for row in range(20)] == logits.argmax(-1).tolist()


def test_greedy_scores_are_the_logits_in_float32() -> None:
    assert torch.equal(Greedy().scores(LOGITS_5.bfloat16(), [0, 0, 0]), LOGITS_5.bfloat16().float())


@given(st.integers(0, 2**64 - 1), st.integers(0, 50), st.integers(0, 2))
def test_sampling_takes_the_argmax_of_processed_logits_and_the_positions_noise(
    seed: int, position: int, row: int
) -> None:
    logits = torch.stack([LOGITS_5, LOGITS_5.flip(0), 2 * LOGITS_5])
    rule = Sampling(temperature=0.8, top_k=4, top_p=0.95, seed=seed)
    processed = process_logits(logits[row], temperature=0.8, top_k=4, top_p=0.95)
    scores = processed + gumbel_noise(seed, position, 5)
    assert torch.equal(rule.scores(logits[row], [0] * position), scores)
    assert rule.chooser(logits)(row, [0] * position) == scores.argmax()


@given(st.integers(0, 1000), st.integers(0, 2))
def test_only_the_row_and_the_number_of_tokens_matter(seed: int, row: int) -> None:
    logits = torch.stack([LOGITS_5, LOGITS_5.flip(0), 2 * LOGITS_5])
    rule = Sampling(temperature=1.0, seed=seed)
    alone = rule.chooser(logits[row : row + 1])(0, [4, 4, 4])
    assert rule.chooser(logits)(row, [1, 2, 3]) == alone


def test_rule_for_passes_the_options_on() -> None:
    assert rule_for(DecodeConfig(temperature=0, top_k=3)) == Greedy()
    options = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.8}
    assert rule_for(DecodeConfig(**options, seed=8)) == Sampling(**options, seed=8)


# --- exact in distribution ---


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, None, None),
        (0.5, None, None),
        (2.0, None, None),
        (1.0, 3, None),
        (0.7, 1, None),
        (1.0, None, 0.8),
        (1.5, None, 0.6),
        (0.8, 4, 0.9),
    ],
)
def test_frequencies_over_seeds_are_the_softmax_of_hugging_faces_scores(
    noise_of_seeds: Tensor, temperature: float, top_k: int | None, top_p: float | None
) -> None:
    probs = hugging_face(LOGITS_5, temperature, top_k, top_p).double().softmax(-1).tolist()
    processed = process_logits(LOGITS_5, temperature=temperature, top_k=top_k, top_p=top_p)
    # What the rule does, for all seeds at once; bound to the rule by a test above.
    chosen = (processed + noise_of_seeds).argmax(-1)
    assert p_value(torch.bincount(chosen, minlength=5).tolist(), probs) > 1e-3


def test_texts_of_three_tokens_from_a_markov_table_are_jointly_exact() -> None:
    logits = torch.tensor([[0.5, 0.0, -0.4], [-0.6, 0.3, 0.2], [0.1, -0.2, 0.4]])
    temperature = 0.8
    table = (logits / temperature).double().softmax(-1).tolist()
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(1500):
        choose = Sampling(temperature=temperature, seed=seed).chooser(logits)
        text = [0]
        for _ in range(3):
            text.append(choose(text[-1], text))
        counts[tuple(text[1:])] += 1
    texts = list(product(range(3), repeat=3))
    probs = [table[0][a] * table[a][b] * table[b][c] for a, b, c in texts]
    assert p_value([counts[text] for text in texts], probs) > 1e-3


def drafted(token: int) -> DraftTree:
    """A tree fixed beforehand: the root and one node."""
    return DraftTree(
        np.array([0, token], np.int64),
        np.array([-1, 0], np.int32),
        np.array([0, 1], np.int32),
        np.array([-1, 0], np.int32),
        np.array([0.0, -0.1], np.float32),
    )


@pytest.mark.parametrize("draft", [0, 3])
def test_a_walk_with_a_fixed_draft_is_exact_and_accepts_with_the_targets_probability(
    draft: int,
) -> None:
    logits, probs = LOGITS_5.expand(2, 5), LOGITS_5.double().softmax(-1).tolist()
    counts, accepted, num_seeds = [0] * 5, 0, 1000
    for seed in range(num_seeds):
        rule, stopping = Sampling(temperature=1.0, seed=seed), TextStopping(9, (), None)
        result = walk(drafted(draft), logits, rule, stopping, [0] * POSITION)
        counts[result.token_ids[0]] += 1
        accepted += len(result.path)
    assert p_value(counts, probs) > 1e-3
    assert p_value([accepted, num_seeds - accepted], [probs[draft], 1 - probs[draft]]) > 1e-3


@pytest.mark.parametrize("draft", [0, 3])
def test_the_chi_square_catches_a_rule_that_redraws_when_the_draft_is_missed(
    noise_of_seeds: Tensor, draft: int
) -> None:
    first = (LOGITS_5 + noise_of_seeds).argmax(-1)
    second = (LOGITS_5 + noise_of_seeds.roll(1, 0)).argmax(-1)
    biased = torch.where(first == draft, first, second)
    probs = LOGITS_5.double().softmax(-1).tolist()
    assert p_value(torch.bincount(biased, minlength=5).tolist(), probs) < 1e-6


def test_the_chi_square_catches_a_rejected_draft_that_is_not_taken_out_of_the_redraw(
    noise_of_seeds: Tensor,
) -> None:
    # Accept the draft with the target's probability, else redraw from all tokens, draft included.
    probs = LOGITS_5.double().softmax(-1)
    coin = torch.exp(-torch.exp(-noise_of_seeds[:, 0].double().roll(1, 0)))
    redrawn = (LOGITS_5 + noise_of_seeds).argmax(-1)
    biased = torch.where(coin < probs[3], 3, redrawn)
    assert p_value(torch.bincount(biased, minlength=5).tolist(), probs.tolist()) < 1e-6


def test_the_chi_square_catches_a_slightly_wrong_temperature(noise_of_seeds: Tensor) -> None:
    chosen = (LOGITS_5 / 1.1 + noise_of_seeds).argmax(-1)
    probs = LOGITS_5.double().softmax(-1).tolist()
    assert p_value(torch.bincount(chosen, minlength=5).tolist(), probs) < 1e-3


def test_the_chi_square_catches_a_token_that_should_be_banned() -> None:
    assert p_value([500, 499, 1], [0.5, 0.5, 0.0]) == 0.0


def test_the_chi_squares_p_value_is_the_tables() -> None:
    # 3.841 is the 5 % point for one degree of freedom, 13.277 the 1 % point for four.
    shift = math.sqrt(3.841 * 1000) / 2
    assert p_value([500 + shift, 500 - shift], [0.5, 0.5]) == pytest.approx(0.05, abs=1e-4)
    shift = math.sqrt(13.277 * 200 / 2)
    counts = [200 + shift, 200 - shift, 200.0, 200.0, 200.0]
    assert p_value(counts, [0.2] * 5) == pytest.approx(0.01, abs=1e-4)
