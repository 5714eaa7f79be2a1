"""Architectures that are not in the table: refused, or let in with a warning and checked."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

import ddtree
from ddtree.errors import ContextLengthError, UnsupportedModelError
from ddtree.models import architectures
from ddtree.models.loading import load_target, read_target_shape
from ddtree.models.target import Target
from ddtree.pair import Pair
from ddtree.untested import check_side_by_side
from tests.support import drafters
from tests.support.architectures import LAYERS_MIXED, VOCAB_SIZE, build
from tests.support.models import greedy_reference

PROMPT = [(7 * i + 3) % VOCAB_SIZE for i in range(14)]
NUM_NEW = 12
WARNING = "'helium' .* is not among the tested architectures"


@pytest.fixture(scope="module")
def helium() -> PreTrainedModel:
    """Full attention, and in nobody's table."""
    model = build("Helium", 2, {"head_dim": 8})
    assert model.config.model_type not in architectures.SUPPORTED_MODEL_TYPES
    return model


@pytest.fixture
def target(helium: PreTrainedModel) -> Target:
    return Target(helium, None, name="tiny", allow_untested=True)


def drafting(target: Target) -> Pair:
    script = PROMPT + greedy_reference(target.model, PROMPT, NUM_NEW)
    ranks = drafters.right_at_rank(lambda p: p % 3, script, VOCAB_SIZE, layer_ids=(0, 1))
    return Pair(target, ranks)


def test_it_is_let_in_on_request_alone_with_a_warning(
    helium: PreTrainedModel, tmp_path: Path
) -> None:
    helium.save_pretrained(tmp_path)
    folder = str(tmp_path)
    for refused in (lambda: load_target(folder), lambda: ddtree.load(helium)):
        with pytest.raises(UnsupportedModelError, match="--allow-untested"):
            refused()
    with pytest.warns(UserWarning, match=WARNING):
        assert load_target(helium, allow_untested=True).untested
    said: list[str] = []
    loaded = ddtree.load(folder, device="cpu", allow_untested=True, say=said.append)
    assert loaded.target.untested
    assert "'helium'" in said[0]
    assert read_target_shape(folder, allow_untested=True).vocab_size == VOCAB_SIZE


def test_its_first_text_with_drafts_is_made_twice_and_no_other(target: Target) -> None:
    pair = drafting(target)
    expected = greedy_reference(target.model, PROMPT, NUM_NEW)
    drafter = pair.drafter
    plain = pair.generate(PROMPT, method="ar", max_new_tokens=NUM_NEW)
    assert target.untested, "plain decoding proves nothing"
    for num_sessions in (1, 2):
        drafted = pair.generate(PROMPT, budget=24, max_new_tokens=NUM_NEW)
        assert list(drafted.token_ids) == list(plain.token_ids) == expected
        assert len(drafter.sessions) == num_sessions
        assert not target.untested


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "T1"])
def test_a_text_that_differs_from_plain_decoding_is_an_error_that_names_the_place(
    target: Target, options: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = drafting(target)
    # A tree mask of an architecture that is not what it seems: rows see less than they should.
    monkeypatch.setattr(
        "ddtree.cache.hf.TreeMask.of",
        lambda self, ancestors, length, dtype: torch.zeros(
            1, 1, len(ancestors), length + len(ancestors), dtype=dtype
        ),
    )
    with pytest.raises(UnsupportedModelError, match="at new position") as caught:
        pair.generate(PROMPT, budget=24, max_new_tokens=NUM_NEW, **options)
    assert "plain decoding" in caught.value.expected
    assert "'helium'" in caught.value.remedy
    assert target.untested


def test_requests_side_by_side_are_checked_before_any_answer(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_side_by_side(target, PROMPT)
    monkeypatch.setattr(
        "ddtree.cache.batch.BatchCache.visible",
        lambda self, window: torch.ones(2, self.span, dtype=torch.bool).tril(self.span - 4),
    )
    with pytest.raises(UnsupportedModelError, match="beside another request"):
        check_side_by_side(target, PROMPT)


HOPELESS: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "llama4": (
        lambda: build("Llama4Text", 0, {"num_local_experts": 2, "intermediate_size_mlp": 48}),
        "chunked",
    ),
    "mamba": (lambda: build("Mamba", 0, {"state_size": 4}), "recurrent state"),
    "gpt2": (
        lambda: GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=8, n_layer=1, n_head=1)),
        "no list of layers",
    ),
    "minimax": (
        lambda: build(
            "MiniMax",
            0,
            {"head_dim": 8, "layer_types": ["linear_attention", "full_attention"]},
        ),
        "linear_attention",
    ),
    "looks ahead": (
        lambda: build(
            "Gemma3Text", 0, {"head_dim": 8, "use_bidirectional_attention": True, **LAYERS_MIXED}
        ),
        "looks ahead",
    ),
}


@pytest.mark.parametrize("kind", HOPELESS)
def test_layers_that_no_tree_can_be_fed_to_are_refused_even_then(kind: str) -> None:
    make, named = HOPELESS[kind]
    with pytest.raises(UnsupportedModelError, match=named):
        load_target(make(), allow_untested=True)


def test_a_window_that_nothing_places_is_refused(helium: PreTrainedModel) -> None:
    helium.config.sliding_window = 9
    try:
        with pytest.raises(UnsupportedModelError, match="which layers slide"):
            Target(helium, None, name="tiny", allow_untested=True)
    finally:
        del helium.config.sliding_window


def test_long_rope_bounds_the_context_to_where_all_rows_turn_alike() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    options = {"rope_parameters": rope, "original_max_position_embeddings": 64}
    model = build("Phi3", 0, options)
    assert Target(model, None, name="long").context_limit == 64
    ids = torch.tensor([PROMPT])
    for num_new, fits in ((50, True), (51, False)):
        options = {"max_new_tokens": num_new, "attention_mask": torch.ones_like(ids)}
        expected = nullcontext() if fits else pytest.raises(ContextLengthError, match="64")
        with expected:
            model.generate(
                ids, custom_generate=ddtree.custom_generate, method="ar", do_sample=False, **options
            )
