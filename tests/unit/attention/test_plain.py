"""Soft caps, sinks and biases of scores in our backends, against transformers' own attention."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

from ddtree.attention import plain
from ddtree.attention.backends import GROUPED, SPLIT
from ddtree.attention.masks import additive

NUM_ROWS, NUM_KEYS, NUM_HEADS, WIDTH = 5, 11, 4, 8
SCALE = 0.3


def inputs(num_rows: int, num_keys: int, value_width: int = WIDTH) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(num_rows + num_keys)
    query = 3 * torch.randn(1, NUM_HEADS, num_rows, WIDTH, generator=generator)
    key = 3 * torch.randn(1, 2, num_keys, WIDTH, generator=generator)
    return query, key, torch.randn(1, 2, num_keys, value_width, generator=generator)


def module(sinks: Tensor | None = None) -> torch.nn.Module:
    layer = torch.nn.Module().eval()
    layer.num_key_value_groups, layer.head_dim, layer.sinks = 2, WIDTH, sinks
    return layer


def tree_mask() -> Tensor:
    """Rows that see the context and some of those before them."""
    visible = torch.ones(NUM_ROWS, NUM_KEYS, dtype=torch.bool)
    tail = torch.tensor(
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]
    )
    visible[:, NUM_KEYS - NUM_ROWS :] = tail.bool()
    return visible


MASKS: dict[str, tuple[int, int, Callable[[], Tensor | None]]] = {
    "a tree": (NUM_ROWS, NUM_KEYS, lambda: additive(tree_mask(), torch.float32)),
    "booleans": (NUM_ROWS, NUM_KEYS, lambda: tree_mask()[None, None]),
    "a prompt": (NUM_KEYS, NUM_KEYS, lambda: None),
    "a step": (1, NUM_KEYS, lambda: None),
}


def as_eager_takes_it(mask: Tensor | None, num_rows: int, num_keys: int) -> Tensor | None:
    if mask is None and num_rows > 1:
        mask = torch.ones(1, 1, num_rows, num_keys, dtype=torch.bool).tril()
    if mask is not None and mask.dtype == torch.bool:
        mask = additive(mask[0, 0], torch.float32)
    return mask


@pytest.mark.parametrize("backend", [GROUPED, SPLIT])
@pytest.mark.parametrize("kind", MASKS)
def test_sinks_are_those_of_the_librarys_eager_attention(kind: str, backend: str) -> None:
    num_rows, num_keys, mask_of = MASKS[kind]
    query, key, value = inputs(num_rows, num_keys)
    sinks, mask = torch.tensor([2.0, -1.0, 0.5, 9.0]), mask_of()
    expected, _ = modeling_gpt_oss.eager_attention_forward(
        module(sinks),
        query,
        key,
        value,
        as_eager_takes_it(mask, num_rows, num_keys),
        scaling=SCALE,
    )
    attended, weights = AttentionInterface()[backend](
        module(), query, key, value, mask, scaling=SCALE, s_aux=sinks, open_context=kind == "a tree"
    )
    assert weights is None
    torch.testing.assert_close(attended, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("value_width", [WIDTH, 6])
@pytest.mark.parametrize("backend", [GROUPED, SPLIT])
@pytest.mark.parametrize("kind", MASKS)
def test_soft_caps_are_those_of_the_librarys_eager_attention(
    kind: str, backend: str, value_width: int
) -> None:
    num_rows, num_keys, mask_of = MASKS[kind]
    query, key, value = inputs(num_rows, num_keys, value_width)
    mask = mask_of()
    expected, _ = modeling_gemma2.eager_attention_forward(
        module(),
        query,
        key,
        value,
        as_eager_takes_it(mask, num_rows, num_keys),
        scaling=SCALE,
        softcap=2.0,
    )
    attended, _ = AttentionInterface()[backend](
        module(), query, key, value, mask, scaling=SCALE, softcap=2.0, open_context=kind == "a tree"
    )
    torch.testing.assert_close(attended, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", [GROUPED, SPLIT])
def test_values_of_another_width_than_keys_are_attended(backend: str) -> None:
    query, key, value = inputs(NUM_ROWS, NUM_KEYS, 6)
    mask = additive(tree_mask(), torch.float32)
    attended, _ = AttentionInterface()[backend](
        module(), query, key, value, mask, scaling=SCALE, open_context=True
    )
    expected = plain.attend(query, key, value, mask, scale=SCALE)
    torch.testing.assert_close(attended, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", [GROUPED, SPLIT])
def test_a_bias_of_positions_is_left_to_the_library(backend: str) -> None:
    if "position_bias" not in inspect.signature(sdpa_attention_forward).parameters:
        pytest.skip("this transformers has none")
    query, key, value = inputs(NUM_ROWS, NUM_KEYS)
    mask = additive(tree_mask(), torch.float32)
    bias = torch.randn(1, NUM_HEADS, NUM_ROWS, NUM_KEYS, generator=torch.Generator().manual_seed(0))
    attended, _ = AttentionInterface()[backend](
        module(), query, key, value, mask, scaling=SCALE, position_bias=bias, open_context=True
    )
    expected = plain.attend(query, key, value, mask + bias, scale=SCALE)
    torch.testing.assert_close(attended, expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(attended, plain.attend(query, key, value, mask, scale=SCALE))


def test_half_precision_sums_in_float32() -> None:
    query, key, value = inputs(NUM_ROWS, NUM_KEYS)
    mask, sinks = tree_mask()[None, None], torch.zeros(NUM_HEADS)
    whole = plain.attend(query, key, value, mask, scale=SCALE, softcap=5.0, sinks=sinks)
    half = (part.bfloat16() for part in (query, key, value))
    attended = plain.attend(*half, mask, scale=SCALE, softcap=5.0, sinks=sinks.bfloat16())
    assert attended.dtype == torch.bfloat16
    torch.testing.assert_close(attended.float(), whole, atol=0.2, rtol=0.05)
