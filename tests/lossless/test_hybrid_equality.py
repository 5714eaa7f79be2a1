"""Targets with recurrent state: whatever is drafted, text and state are plain decoding's.

The table in test_architectures.py has all of them; here is what only a state can get wrong.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import ddtree
from ddtree import costs
from ddtree.budget import FixedBudget
from ddtree.cache.hf import TargetCache
from ddtree.commit import commit
from ddtree.decode import Stages, decode
from ddtree.errors import OptionError
from ddtree.models.target import Target
from ddtree.pair import Pair
from ddtree.prefill import Context
from ddtree.sampling.rule import Greedy
from ddtree.stopping import TextStopping
from tests.support import drafters
from tests.support.architectures import VOCAB_SIZE, loaded, tiny
from tests.support.models import greedy_reference

PROMPT = [(7 * i + 3) % VOCAB_SIZE for i in range(11)]
NUM_NEW = 12
# One of each kind: a delta net with experts, and a convolution alone.
KINDS = ("lfm2", "qwen3_next")


def scripted(kind: str, script: list[int]) -> drafters.ScriptedDrafter:
    options = {"layer_ids": (0, 1)}
    if kind == "perfect":
        return drafters.perfect(script, VOCAB_SIZE, **options)  # type: ignore[arg-type]
    if kind == "hostile":
        return drafters.hostile(script, VOCAB_SIZE, **options)  # type: ignore[arg-type]
    if kind == "random":
        return drafters.random_drafter(1, VOCAB_SIZE, **options)  # type: ignore[arg-type]
    return drafters.right_at_rank(lambda p: p % 3, script, VOCAB_SIZE, **options)  # type: ignore[arg-type]


def said(architecture: str, prompt: list[int] = PROMPT, num_new: int = NUM_NEW) -> list[int]:
    return greedy_reference(tiny(architecture), prompt, num_new)


@pytest.mark.parametrize("kind", ["perfect", "hostile", "random", "siblings"])
@pytest.mark.parametrize("architecture", KINDS)
def test_no_budget_and_no_drafter_changes_the_text(architecture: str, kind: str) -> None:
    reference = said(architecture)
    pair = Pair(loaded(architecture), scripted(kind, PROMPT + reference))
    for method, budget in (("dflash", 24), ("ddtree", 1), ("ddtree", 8), ("ddtree", 24)):
        text = pair.generate(PROMPT, method=method, budget=budget, max_new_tokens=NUM_NEW)
        assert list(text.token_ids) == reference, (budget, method)


@pytest.mark.parametrize("num_prompt", [1, 3, 11])
def test_a_prompt_of_any_length_in_pieces_of_any_length_changes_nothing(
    num_prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = PROMPT[:num_prompt]
    for architecture in KINDS:
        reference = said(architecture, prompt, 8)
        pair = Pair(loaded(architecture), scripted("siblings", prompt + reference))
        for chunk in (1, 4):
            monkeypatch.setattr("ddtree.prefill.CHUNK_TOKENS", chunk)
            assert list(pair.generate(prompt, budget=8, max_new_tokens=8).token_ids) == reference


def parts(cache: TargetCache) -> list[Tensor]:
    states = [store.state for store in cache.recurrent_stores.values()]
    return [part for s in states for part in (s.conv, s.matrix) if part is not None]


@pytest.mark.parametrize("kind", ["siblings", "random"])
@pytest.mark.parametrize("architecture", ["lfm2", "qwen3_5"])
def test_after_every_commit_the_states_are_plain_decodings(architecture: str, kind: str) -> None:
    target, reference = loaded(architecture), said(architecture)
    one = torch.ones(1, 1, dtype=torch.bool)
    plain = target.new_cache(64)
    with torch.inference_mode():
        target.prefill(torch.tensor(PROMPT), plain)

    def checked(context: Context, start: int, path: tuple[int, ...], features: object) -> None:
        commit(context, start, path, features)  # type: ignore[arg-type]
        # Plain decoding follows, token by token.
        for position in range(start, start + 1 + len(path)):
            token = torch.tensor([context.token_ids[position]])
            target.verify(token, torch.zeros(1, dtype=torch.int64), one, plain)
            plain.keep(position, (0,))
        assert context.cache.length == plain.length
        for ours, theirs in zip(parts(context.cache), parts(plain), strict=True):
            scale = max(1.0, float(theirs.abs().max()))
            torch.testing.assert_close(ours, theirs, atol=2e-5 * scale, rtol=0)

    with torch.inference_mode():
        rounds = decode(
            target,
            scripted(kind, PROMPT + reference),
            PROMPT,
            stages=replace(Stages(), commit=checked),
            rule=Greedy(),
            stopping=TextStopping(NUM_NEW, (), None),
            budget=FixedBudget(24),
        )
        assert [token for r in rounds for token in r.token_ids] == reference


@pytest.mark.parametrize("architecture", KINDS)
@torch.inference_mode()
def test_a_row_that_is_filled_again_remembers_nothing(architecture: str) -> None:
    target = loaded(architecture)
    cache = target.new_batch_cache(2, 64)
    assert not cache.can_share
    texts = [PROMPT[:3], list(PROMPT)]

    def fill(row: int) -> None:
        cache.begin_filling(row)
        ids = torch.tensor([texts[row]])
        texts[row].append(int(target.run_batch(ids, cache).logits.argmax()))
        cache.end_filling()
        cache.lengths[row] = ids.shape[1]

    def step() -> None:
        last = torch.tensor([[text[-1]] for text in texts])
        for text, logits in zip(texts, target.run_batch(last, cache).logits, strict=True):
            text.append(int(logits.argmax()))
        cache.lengths += 1

    fill(0)
    fill(1)
    for _ in range(5):
        step()
    texts[0] = PROMPT[4:9]
    fill(0)
    for _ in range(5):
        step()
    assert texts[0] == PROMPT[4:9] + said(architecture, PROMPT[4:9], 6)
    assert texts[1] == PROMPT + said(architecture, PROMPT, 11)


def test_inside_the_librarys_generate_the_text_is_its_own() -> None:
    model = tiny("qwen3_next")
    reference = said("qwen3_next")
    ids = torch.tensor([PROMPT])
    sequence = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_NEW,
        do_sample=False,
        custom_generate=ddtree.custom_generate,
        drafter=scripted("siblings", PROMPT + reference),
        budget=8,
    )
    assert sequence[0].tolist() == PROMPT + reference


def with_room_for(num_rows: int) -> Target:
    """A target whose recurrent layers have memory for so many rows of a round."""
    target = Target(tiny("qwen3_next"), None, name="small")
    target.round_bytes = 0
    while target.max_rows < num_rows:  # type: ignore[operator]
        target.round_bytes += 64
    return target


def test_a_budget_beyond_the_memory_of_a_round_is_refused_and_the_largest_is_not() -> None:
    target, reference = with_room_for(9), said("qwen3_next")
    pair = Pair(target, scripted("siblings", PROMPT + reference))
    text = pair.generate(PROMPT, budget=8, max_new_tokens=NUM_NEW)
    assert list(text.token_ids) == reference
    with pytest.raises(OptionError, match="budget: expected at most 8 nodes for small"):
        pair.generate(PROMPT, budget=9, max_new_tokens=NUM_NEW)
    # Plain decoding has no tree.
    pair.generate(PROMPT, method="ar", budget=9, max_new_tokens=2)


@pytest.mark.parametrize(("num_rows", "most"), [(1, 2), (9, 9), (20, 18)])
def test_what_auto_measures_and_may_choose_fits_into_the_memory_of_a_round(
    num_rows: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "_PASSES", 1)
    monkeypatch.setattr(costs, "CONTEXTS", (8,))
    target = with_room_for(num_rows)
    profile = costs.measure(target, scripted("siblings", PROMPT))
    assert profile.rows[-1] == most


def test_a_target_without_recurrent_layers_has_no_such_limit() -> None:
    assert loaded("qwen3_moe").max_rows is None
