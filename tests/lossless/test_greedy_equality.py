"""Greedy: ar = dflash = ddtree = the model's own `generate`, in float32, whatever the drafter."""

from __future__ import annotations

import pytest
import torch

from ddtree.pair import Pair
from ddtree.types import METHODS
from tests.support import drafters
from tests.support.models import (
    ARCHITECTURES,
    VOCAB_SIZE,
    dflash_drafter,
    greedy_reference,
    tiny_model,
    tiny_target,
)

PROMPT = [5, 17, 42, 8, 23, 11, 2]
# Longer than the window (9) of the sliding architectures, prompt and text both.
LONG_PROMPT = [(7 * i + 3) % VOCAB_SIZE for i in range(23)]
NUM_NEW = 40


def scripted(kind: str, script: list[int], num_prompt: int) -> drafters.ScriptedDrafter:
    if kind == "perfect":
        return drafters.perfect(script, VOCAB_SIZE)
    if kind == "hostile":
        return drafters.hostile(script, VOCAB_SIZE)
    if kind == "random":
        return drafters.random_drafter(1, VOCAB_SIZE)
    if kind == "siblings":
        return drafters.right_at_rank(lambda position: position % 3, script, VOCAB_SIZE)
    return drafters.right_for(int(kind), script, VOCAB_SIZE, num_prompt)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kind", ["perfect", "hostile", "random", "siblings", "2"])
def test_every_method_says_what_generate_says(architecture: str, kind: str) -> None:
    model, target = tiny_model(architecture), tiny_target(architecture)
    reference = greedy_reference(model, LONG_PROMPT, NUM_NEW)
    drafter = scripted(kind, LONG_PROMPT + reference, len(LONG_PROMPT))
    pair = Pair(target, drafter)
    for method in METHODS:
        generation = pair.generate(LONG_PROMPT, budget=16, method=method, max_new_tokens=NUM_NEW)
        assert list(generation.token_ids) == reference, method


@pytest.mark.parametrize("architecture", ["llama", "mistral-window", "qwen2-mixed"])
def test_eager_attention_gives_the_same_text_as_sdpa(architecture: str) -> None:
    reference = greedy_reference(tiny_model(architecture), LONG_PROMPT, NUM_NEW)
    model = tiny_model(architecture)
    drafter = scripted("siblings", LONG_PROMPT + reference, len(LONG_PROMPT))
    model.set_attn_implementation("eager")
    try:
        generation = Pair(tiny_target(architecture), drafter).generate(
            LONG_PROMPT, budget=16, max_new_tokens=NUM_NEW
        )
    finally:
        model.set_attn_implementation("sdpa")
    assert list(generation.token_ids) == reference
    assert generation.acceptance_length > 2


@pytest.mark.parametrize("budget", [0, 1, 2, 3, 5, 8, 16, 33, 64])
@pytest.mark.parametrize("method", ["dflash", "ddtree"])
def test_no_budget_changes_the_text(budget: int, method: str) -> None:
    reference = greedy_reference(tiny_model("llama"), PROMPT, NUM_NEW)
    drafter = scripted("siblings", PROMPT + reference, len(PROMPT))
    generation = Pair(tiny_target("llama"), drafter).generate(
        PROMPT, method=method, budget=budget, max_new_tokens=NUM_NEW
    )
    assert list(generation.token_ids) == reference
    for done in generation.rounds:
        assert done.tree is None or done.tree.num_nodes <= budget


@pytest.mark.parametrize("block_size", range(2, 17))
def test_no_block_size_changes_the_text(block_size: int) -> None:
    reference = greedy_reference(tiny_model("qwen3"), PROMPT, NUM_NEW)
    target = tiny_target("qwen3")
    pair = Pair(target, dflash_drafter(target, block_size=block_size))
    for method in METHODS:
        generation = pair.generate(PROMPT, budget=16, method=method, max_new_tokens=NUM_NEW)
        assert list(generation.token_ids) == reference


@pytest.mark.parametrize("method", ["dflash", "ddtree"])
@pytest.mark.parametrize("k", range(8))
def test_a_drafter_right_for_k_tokens_gives_k_plus_1_per_round(k: int, method: str) -> None:
    reference = greedy_reference(tiny_model("llama"), PROMPT, 60)
    drafter = drafters.right_for(k, PROMPT + reference, VOCAB_SIZE, len(PROMPT), num_depths=7)
    num_new = 1 + 3 * (k + 1)
    generation = Pair(tiny_target("llama"), drafter).generate(
        PROMPT, method=method, budget=64, max_new_tokens=num_new
    )
    assert list(generation.token_ids) == reference[:num_new]
    assert [r.num_tokens for r in generation.rounds] == [1, k + 1, k + 1, k + 1]
    assert generation.acceptance_length == k + 1
    assert generation.acceptance_histogram[k + 1] == 3


def test_the_drafter_is_asked_at_the_root_with_the_whole_context_behind_it() -> None:
    reference = greedy_reference(tiny_model("llama"), PROMPT, NUM_NEW)
    script = PROMPT + reference
    drafter = scripted("siblings", script, len(PROMPT))
    Pair(tiny_target("llama"), drafter).generate(PROMPT, budget=16, max_new_tokens=NUM_NEW)
    assert len(drafter.roots) > 5
    for position, root_id in drafter.roots:
        assert script[position] == root_id


def test_prompts_one_after_another_leave_nothing_behind() -> None:
    target = tiny_target("llama")
    pair = Pair(target, dflash_drafter(target))
    prompts = [[3], PROMPT, LONG_PROMPT, PROMPT, [3]]
    for prompt in prompts:
        reference = greedy_reference(tiny_model("llama"), prompt, 20)
        # What the text's repetitions are worth is learnt, and outlives a generation on purpose.
        first, again = (
            pair.generate(prompt, budget=16, max_new_tokens=20, lookup=False) for _ in range(2)
        )
        assert list(first.token_ids) == list(again.token_ids) == reference
        assert [r.num_tokens for r in first.rounds] == [r.num_tokens for r in again.rounds]


def test_two_generations_interleaved_do_not_disturb_each_other() -> None:
    target = tiny_target("llama")
    pair = Pair(target, dflash_drafter(target))
    alone = [
        pair.generate(p, budget=16, max_new_tokens=20).token_ids for p in (PROMPT, LONG_PROMPT)
    ]
    streams = [pair.stream(p, budget=16, max_new_tokens=20) for p in (PROMPT, LONG_PROMPT)]
    together = [next(s) for s in streams]
    assert [g.token_ids for g in together] == alone


def test_a_prompt_longer_than_a_prefill_chunk_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference = greedy_reference(tiny_model("qwen2-mixed"), LONG_PROMPT, NUM_NEW)
    monkeypatch.setattr("ddtree.prefill.CHUNK_TOKENS", 5)
    target = tiny_target("qwen2-mixed")
    pair = Pair(target, dflash_drafter(target))
    for method in METHODS:
        generation = pair.generate(LONG_PROMPT, budget=16, method=method, max_new_tokens=NUM_NEW)
        assert list(generation.token_ids) == reference


@pytest.mark.parametrize("place", range(1, 9))
@pytest.mark.parametrize("method", METHODS)
def test_a_stop_token_anywhere_in_an_accepted_path_ends_the_text_there(
    place: int, method: str
) -> None:
    model, target = tiny_model("llama-tied"), tiny_target("llama-tied")
    free = greedy_reference(model, PROMPT, 30)
    drafter = drafters.perfect(PROMPT + free, VOCAB_SIZE, num_depths=7)
    stop_id = free[place]
    if stop_id in free[:place]:
        pytest.skip("this token occurs earlier in the text")
    model.generation_config.eos_token_id = [stop_id, VOCAB_SIZE - 1]
    try:
        reference = greedy_reference(model, PROMPT, 30, pad_token_id=0)
        pair = Pair(target, drafter)
        generation = pair.generate(PROMPT, budget=16, method=method, max_new_tokens=30)
        ignoring = pair.generate(
            PROMPT, budget=16, method=method, max_new_tokens=30, ignore_eos=True
        )
    finally:
        model.generation_config.eos_token_id = None
    assert list(generation.token_ids) == reference == free[: place + 1]
    assert generation.finish_reason == "stop"
    assert sum(r.num_tokens for r in generation.rounds) == place + 1
    assert list(ignoring.token_ids) == free
    assert ignoring.finish_reason == "length"


@pytest.mark.parametrize("max_new_tokens", range(1, 20))
def test_the_length_limit_may_fall_anywhere_in_an_accepted_path(max_new_tokens: int) -> None:
    free = greedy_reference(tiny_model("llama"), PROMPT, 30)
    drafter = drafters.perfect(PROMPT + free, VOCAB_SIZE, num_depths=7)
    generation = Pair(tiny_target("llama"), drafter).generate(
        PROMPT, budget=16, max_new_tokens=max_new_tokens
    )
    assert list(generation.token_ids) == free[:max_new_tokens]
    assert generation.finish_reason == "length"
    assert generation.num_tokens == max_new_tokens


def test_the_last_position_of_the_context_can_be_generated() -> None:
    model, target = tiny_model("llama"), tiny_target("llama")
    room = target.context_limit - len(LONG_PROMPT)
    reference = greedy_reference(model, LONG_PROMPT, room)
    drafter = drafters.perfect(LONG_PROMPT + reference, VOCAB_SIZE)
    generation = Pair(target, drafter).generate(LONG_PROMPT, budget=16, max_new_tokens=room)
    assert list(generation.token_ids) == reference


def test_a_negative_control_a_broken_mask_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If rows saw their siblings, the texts above would differ: the tests can fail."""
    reference = greedy_reference(tiny_model("llama"), PROMPT, NUM_NEW)
    monkeypatch.setattr(
        "ddtree.verify.ancestor_mask",
        lambda tree: torch.ones(tree.num_rows, tree.num_rows).tril().bool().numpy(),
    )
    drafter = scripted("siblings", PROMPT + reference, len(PROMPT))
    generation = Pair(tiny_target("llama"), drafter).generate(
        PROMPT, budget=16, max_new_tokens=NUM_NEW
    )
    assert list(generation.token_ids) != reference
