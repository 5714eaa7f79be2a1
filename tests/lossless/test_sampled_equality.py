"""Temperature above 0: one seed gives one text, whatever the method, the budget or the drafter."""

from __future__ import annotations

import pytest
import torch

from ddtree.config import DecodeConfig
from ddtree.pair import Pair
from ddtree.sampling.rule import rule_for
from ddtree.types import METHODS
from tests.support import drafters
from tests.support.models import (
    ARCHITECTURES,
    VOCAB_SIZE,
    dflash_drafter,
    tiny_model,
    tiny_target,
)

PROMPT = [5, 17, 42, 8, 23, 11, 2, 40, 33, 21, 9]
NUM_NEW = 25
RULES = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_p": 0.95},
    {"temperature": 1.5, "top_k": 5},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.8},
    {"temperature": 0.01},
]


def stepwise(architecture: str, config: DecodeConfig) -> list[int]:
    """The rule on the model's plain forward over the whole sequence, token by token, no cache."""
    rule, model = rule_for(config), tiny_model(architecture)
    ids = list(PROMPT)
    with torch.inference_mode():
        for _ in range(config.max_new_tokens):
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            ids.append(int(rule.scores(logits, ids).argmax()))
    return ids[len(PROMPT) :]


# Every rule on one architecture, one on each of the others.
CASES = [("llama", rule) for rule in RULES]
CASES += [(name, rule) for name in ARCHITECTURES if name != "llama" for rule in RULES[1:2]]


@pytest.mark.parametrize(("architecture", "rule"), CASES, ids=str)
def test_every_method_says_what_stepwise_sampling_says(
    architecture: str, rule: dict[str, float]
) -> None:
    target = tiny_target(architecture)
    config = DecodeConfig(seed=7, max_new_tokens=NUM_NEW, **rule)
    reference = stepwise(architecture, config)
    script = PROMPT + reference
    for drafter in (
        drafters.right_at_rank(lambda position: position % 3, script, VOCAB_SIZE),
        dflash_drafter(target),
    ):
        for method in METHODS:
            generation = Pair(target, drafter).generate(
                PROMPT, method=method, seed=7, max_new_tokens=NUM_NEW, **rule
            )
            assert list(generation.token_ids) == reference, method


@pytest.mark.parametrize("seed", range(12))
def test_the_tree_and_its_size_leave_no_trace_in_the_sample(seed: int) -> None:
    target = tiny_target("llama")
    options = {"temperature": 1.0, "seed": seed, "max_new_tokens": NUM_NEW}
    plain = Pair(target, None).generate(PROMPT, method="ar", **options)
    for budget in (1, 4, 33):
        drafter = drafters.random_drafter(seed, VOCAB_SIZE)
        drafted = Pair(target, drafter).generate(PROMPT, budget=budget, **options)
        assert drafted.token_ids == plain.token_ids


def test_seeds_give_different_texts() -> None:
    pair = Pair(tiny_target("llama"), None)
    texts = {
        pair.generate(
            PROMPT, method="ar", temperature=1.5, seed=seed, max_new_tokens=NUM_NEW
        ).token_ids
        for seed in range(8)
    }
    assert len(texts) == 8


def test_a_perfect_drafter_is_accepted_whole_when_sampling_too() -> None:
    config = DecodeConfig(temperature=1.0, seed=3, max_new_tokens=NUM_NEW)
    script = PROMPT + stepwise("llama", config)
    drafter = drafters.perfect(script, VOCAB_SIZE, num_depths=7)
    generation = Pair(tiny_target("llama"), drafter).generate(
        PROMPT, budget=16, temperature=1.0, seed=3, max_new_tokens=1 + 8 * 3, method="dflash"
    )
    assert [r.num_tokens for r in generation.rounds] == [1, 8, 8, 8]
