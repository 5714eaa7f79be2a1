"""The table: architectures x drafters x budgets, each against the model's own greedy `generate`.

A row is a line in tests/support/architectures.py, a column one in `DRAFTERS`. The oracle is the
library's eager attention on the model as it is; ours is what `load_target` makes of it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ddtree.budget import FixedBudget
from ddtree.commit import commit
from ddtree.decode import Stages, decode
from ddtree.draft import Drafter
from ddtree.models.drafter_config import parse_drafter_config
from ddtree.models.drafter_export import save_drafter
from ddtree.models.loading import load_drafter
from ddtree.models.target import Target
from ddtree.pair import Pair
from ddtree.prefill import Context
from ddtree.sampling.rule import Greedy
from ddtree.stopping import TextStopping
from ddtree.train.network import new_network
from ddtree.types import Generation, Method
from tests.support import drafters
from tests.support.architectures import (
    ARCHITECTURES,
    NUM_LAYERS,
    VOCAB_SIZE,
    WINDOW,
    loaded,
    tiny,
)
from tests.support.checkpoints import DFLASH2, write_drafter, write_speculators
from tests.support.models import dflash_drafter, drafter_config, greedy_reference
from tests.support.sources import write_medusa, write_pard

# As a user runs it: the annotations of these shapes are checked by the tests of smaller parts.
pytestmark = pytest.mark.usefixtures("unchecked")

# Longer than any window here, prompt and text both.
PROMPT = [(7 * i + 3) % VOCAB_SIZE for i in range(14)]
NUM_NEW = 8
RUNS: tuple[tuple[Method, int], ...] = (("dflash", 7), ("ddtree", 24))
LAYER_IDS = (0, 1)


def siblings(target: Target, script: list[int]) -> Drafter:
    """Right everywhere, at rank 0, 1 or 2: long accepted paths that leave the chain."""
    return drafters.right_at_rank(lambda p: p % 3, script, VOCAB_SIZE, layer_ids=LAYER_IDS)


def z_lab(target: Target, script: list[int]) -> Drafter:
    """DFlash as z-lab publishes it, with random weights."""
    taps = {"mask_token_id": 3, "target_layer_ids": list(LAYER_IDS)}
    return dflash_drafter(target, num_target_layers=target.num_layers, dflash_config=taps)


DRAFTERS: dict[str, Callable[[Target, list[int]], Drafter]] = {
    "siblings": siblings,
    "z-lab": z_lab,
}


@functools.cache
def said(architecture: str) -> tuple[int, ...]:
    """The model's own greedy text."""
    return tuple(greedy_reference(tiny(architecture), PROMPT, NUM_NEW))


def generated(target: Target, drafter: Drafter, **options: object) -> Generation:
    return Pair(target, drafter).generate(PROMPT, max_new_tokens=NUM_NEW, **options)


def text_of(architecture: str, kind: str, method: str, budget: int) -> tuple[int, ...]:
    target = loaded(architecture)
    drafter = DRAFTERS[kind](target, PROMPT + list(said(architecture)))
    return generated(target, drafter, method=method, budget=budget).token_ids


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_plain_decoding_says_what_generate_says(architecture: str) -> None:
    target = loaded(architecture)
    assert generated(target, siblings(target, []), method="ar").token_ids == said(architecture)


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_method_says_what_generate_says(architecture: str, kind: str) -> None:
    assert len(set(said(architecture))) > 3, "a text of few words proves little"
    for method, budget in RUNS:
        assert text_of(architecture, kind, method, budget) == said(architecture), (method, budget)


def _with_transition_head(folder: Path) -> Path:
    config = replace(
        parse_drafter_config(drafter_config(**_TAPS), "test"), selector_rank=5, selector_top_k=9
    )
    save_drafter(new_network(config, seed=1), config, folder, draft_token_ids=None, provenance={})
    return folder


_LAYERS = {"target_layer_ids": list(LAYER_IDS)}
_TAPS = {
    "num_target_layers": NUM_LAYERS,
    "dflash_config": {"mask_token_id": 3, **_LAYERS},
}
# Every format that `load_drafter` reads, written as it is published.
FORMATS: dict[str, Callable[[Path], Path]] = {
    "z-lab": lambda folder: write_drafter(folder, **_TAPS),
    "z-lab, few tokens": lambda folder: write_drafter(
        folder, draft_token_ids=list(range(0, VOCAB_SIZE, 2)), **_TAPS
    ),
    "with a transition head": _with_transition_head,
    "DFlash2": lambda folder: write_drafter(
        folder, **{**_TAPS, **DFLASH2, "dflash_config": {**DFLASH2["dflash_config"], **_LAYERS}}
    ),
    "speculators": lambda folder: write_speculators(folder, aux_hidden_state_layer_ids=[1, 2]),
    "Medusa": write_medusa,
    "PARD": lambda folder: write_pard(folder, tokenizer=False),
}


# One of each kind of layer; each format is proven by its own tests besides.
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "olmo3", "qwen3_next"])
def test_every_format_says_what_generate_says(architecture: str, form: str, tmp_path: Path) -> None:
    drafter = load_drafter(FORMATS[form](tmp_path / "drafter"), loaded(architecture))
    for method, budget in (("dflash", 4), ("ddtree", 5), ("ddtree", 24)):
        text = generated(loaded(architecture), drafter, method=method, budget=budget).token_ids
        assert text == said(architecture), (method, budget)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_seed_gives_one_text_with_every_method(architecture: str) -> None:
    target = loaded(architecture)
    options = {"temperature": 1.0, "seed": 5}
    plain = generated(target, siblings(target, []), method="ar", **options).token_ids
    drafter = siblings(target, PROMPT + list(plain))
    for method, budget in (("dflash", 3), ("ddtree", 5)):
        text = generated(target, drafter, method=method, budget=budget, **options).token_ids
        assert text == plain, (method, budget)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_after_every_commit_the_cache_is_plain_decodings(architecture: str) -> None:
    target = loaded(architecture)
    drafter = siblings(target, PROMPT + list(said(architecture)))
    off_the_chain = 0

    def checked(context: Context, start: int, path: tuple[int, ...], features: object) -> None:
        nonlocal off_the_chain
        commit(context, start, path, features)  # type: ignore[arg-type]
        off_the_chain += path != tuple(range(1, len(path) + 1))
        length = start + 1 + len(path)
        plain = target.new_cache(length)
        ids = torch.tensor(context.token_ids[:-1])
        output = target.prefill(ids, plain, capture=context.layer_ids)
        assert context.cache.length == plain.length == length
        for ours, theirs in zip(context.cache.stores, plain.stores, strict=True):
            torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(ours.values, theirs.values, atol=1e-4, rtol=1e-4)
        seen = torch.cat(drafter.sessions[-1].features)
        torch.testing.assert_close(seen, output.features, atol=1e-4, rtol=1e-4)

    rounds = decode(
        target,
        drafter,
        PROMPT,
        stages=replace(Stages(), commit=checked),
        rule=Greedy(),
        stopping=TextStopping(NUM_NEW, (), None),
        budget=FixedBudget(24),
    )
    assert [token for r in rounds for token in r.token_ids] == list(said(architecture))
    assert off_the_chain


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.inference_mode()
def test_requests_side_by_side_say_what_each_says_alone(architecture: str) -> None:
    target = loaded(architecture)
    texts = [list(PROMPT), PROMPT[:4]]
    alone = [list(said(architecture)), greedy_reference(tiny(architecture), PROMPT[:4], NUM_NEW)]
    cache = target.new_batch_cache(2, len(PROMPT) + NUM_NEW)
    for row, text in enumerate(texts):
        cache.begin_filling(row)
        output = target.run_batch(torch.tensor([text]), cache, capture=LAYER_IDS)
        assert output.features.shape == (len(text), len(LAYER_IDS) * target.hidden_size)
        cache.end_filling()
        cache.lengths[row] = len(text)
        text.append(int(output.logits.argmax()))
    for _ in range(NUM_NEW - 1):
        last = torch.tensor([[text[-1]] for text in texts])
        tokens = target.run_batch(last, cache).logits.argmax(dim=-1).tolist()
        cache.lengths += 1
        for text, token in zip(texts, tokens, strict=True):
            text.append(token)
    assert texts == [PROMPT + alone[0], PROMPT[:4] + alone[1]]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.inference_mode()
def test_what_load_target_replaces_computes_the_same(architecture: str) -> None:
    ids = torch.tensor([PROMPT])
    ours = loaded(architecture).model(input_ids=ids).logits
    theirs = tiny(architecture)(input_ids=ids).logits
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("implementation", ["sdpa", "ddtree_split"])
@pytest.mark.parametrize("architecture", ["gemma3_text", "gpt_oss", "gemma2", "qwen3_moe"])
def test_other_attentions_give_the_same_text_or_are_refused_by_transformers(
    architecture: str, implementation: str
) -> None:
    model = copy.deepcopy(tiny(architecture))
    if implementation == "sdpa" and not model._supports_sdpa:
        with pytest.raises(ValueError, match="scaled_dot_product_attention"):
            model.set_attn_implementation(implementation)
        return
    model.set_attn_implementation(implementation)
    expected = list(said(architecture))
    if implementation == "sdpa":
        # transformers 5.17 lets Gemma 2 have it, and leaves its caps out without a word.
        expected = greedy_reference(model, PROMPT, NUM_NEW)
    target = Target(model, None, name=architecture)
    drafter = siblings(target, PROMPT + expected)
    assert list(generated(target, drafter, budget=24).token_ids) == expected


@pytest.mark.parametrize("window", [WINDOW + 1, None])
@pytest.mark.parametrize("architecture", ["gpt_oss", "mixtral-window", "olmo3", "phi3-window"])
def test_a_negative_control_another_window_is_noticed(
    architecture: str, window: int | None
) -> None:
    target = Target(loaded(architecture).model, None, name="wrong")
    for kind, right in target._windows.items():
        target._windows[kind] = window if right == WINDOW else right
    drafter = siblings(target, PROMPT + list(said(architecture)))
    assert generated(target, drafter, budget=24).token_ids != said(architecture)
