"""Who sees whom, against the definition pair by pair; and that all backends mean the same by it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from ddtree.attention import split
from ddtree.attention.backends import BACKENDS, GROUPED, SPLIT, check_backend
from ddtree.attention.masks import TreeMask, additive
from ddtree.attention.visibility import visible
from ddtree.errors import BackendError
from ddtree.tree.geometry import ancestor_mask
from ddtree.types import DraftTree


def tree_of(parents: list[int]) -> DraftTree:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    num_rows = len(parents)
    return DraftTree(
        np.arange(num_rows, dtype=np.int64),
        np.array(parents, np.int32),
        np.array(depths, np.int32),
        np.zeros(num_rows, np.int32),
        np.zeros(num_rows, np.float32),
    )


@st.composite
def random_trees(draw: st.DrawFn) -> DraftTree:
    num_rows = draw(st.integers(1, 16))
    return tree_of([-1, *(draw(st.integers(0, node - 1)) for node in range(1, num_rows))])


def visibility_of(tree: DraftTree, context_length: int, window: int | None) -> Tensor:
    ancestors = torch.from_numpy(ancestor_mask(tree))
    return visible(ancestors, torch.from_numpy(tree.depths).long(), context_length, window)


def sees(tree: DraftTree, row: int, column: int, context_length: int, window: int | None) -> bool:
    """The definition for one pair, from parents alone."""
    position = context_length + int(tree.depths[row])
    if column < context_length:
        return window is None or position - column < window
    node = row
    while node != column - context_length:
        node = int(tree.parents[node])
        if node < 0:
            return False
    return window is None or int(tree.depths[row]) - int(tree.depths[node]) < window


@given(random_trees(), st.integers(0, 9), st.none() | st.integers(1, 14))
def test_visibility_is_the_definition_pair_by_pair(
    tree: DraftTree, context_length: int, window: int | None
) -> None:
    actual = visibility_of(tree, context_length, window)
    num_columns = context_length + tree.num_rows
    assert actual.shape == (tree.num_rows, num_columns)
    expected = [
        [sees(tree, row, column, context_length, window) for column in range(num_columns)]
        for row in range(tree.num_rows)
    ]
    assert actual.tolist() == expected


@given(st.integers(1, 8), st.integers(0, 9), st.none() | st.integers(1, 14))
def test_a_chain_sees_what_plain_causal_attention_shows(
    num_rows: int, context_length: int, window: int | None
) -> None:
    total = context_length + num_rows
    distance = torch.arange(total)[:, None] - torch.arange(total)[None, :]
    causal = (distance >= 0) & (distance < (window or total))
    actual = visibility_of(tree_of(list(range(-1, num_rows - 1))), context_length, window)
    assert torch.equal(actual, causal[context_length:])


@given(random_trees(), st.integers(0, 9), st.integers(1, 14))
def test_a_row_sees_as_many_positions_as_the_window_shows_itself_included(
    tree: DraftTree, context_length: int, window: int
) -> None:
    actual = visibility_of(tree, context_length, window)
    positions = torch.from_numpy(tree.depths).long() + context_length + 1
    assert torch.equal(actual.sum(1), positions.clamp(max=window))
    assert actual[:, context_length:].diagonal().all()


@given(random_trees(), st.integers(0, 9), st.none() | st.integers(1, 6), st.integers(0, 1000))
def test_the_additive_mask_hides_what_is_not_visible_and_nothing_else(
    tree: DraftTree, context_length: int, window: int | None, seed: int
) -> None:
    visibility = visibility_of(tree, context_length, window)
    query, key, value = attention_inputs(*visibility.shape, seed=seed)
    mask = additive(visibility, torch.float32)
    actual = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(actual, plain(query, key, value, visibility), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_mask_is_0_or_the_lowest_number_of_the_dtype(dtype: torch.dtype) -> None:
    mask = additive(torch.tensor([[True, False]]), dtype)
    assert mask.dtype == dtype
    assert mask.tolist() == [[[[0.0, torch.finfo(dtype).min]]]]


@given(st.lists(st.tuples(random_trees(), st.integers(0, 60)), min_size=1, max_size=6))
def test_one_buffer_serves_rounds_of_any_size_in_any_order(
    rounds: list[tuple[DraftTree, int]],
) -> None:
    masks = TreeMask()
    for tree, context_length in rounds:
        ancestors = torch.from_numpy(ancestor_mask(tree))
        expected = additive(visibility_of(tree, context_length, None), torch.float32)
        assert torch.equal(masks.of(ancestors, context_length, torch.float32), expected)


def test_the_context_part_of_the_mask_is_not_written_again() -> None:
    masks, ancestors = TreeMask(), torch.ones(2, 2, dtype=torch.bool).tril()
    first = masks.of(ancestors, 40, torch.float32)
    second = masks.of(ancestors, 43, torch.float32)
    assert first.data_ptr() == second.data_ptr()
    assert masks.of(ancestors, 43, torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("name", [GROUPED, SPLIT, "sdpa"])
@given(random_trees(), st.integers(0, 9), st.integers(0, 1000))
def test_every_backend_computes_the_same_attention(
    name: str, tree: DraftTree, context_length: int, seed: int
) -> None:
    visibility = visibility_of(tree, context_length, None)
    query, key, value = attention_inputs(*visibility.shape, seed=seed)
    mask = TreeMask().of(torch.from_numpy(ancestor_mask(tree)), context_length, torch.float32)
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    output, weights = AttentionInterface()[name](
        module, query, key, value, mask, scaling=8**-0.5, open_context=True
    )
    assert weights is None
    expected = plain(query, key, value, visibility).transpose(1, 2)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)


def test_split_attention_heeds_a_mask_that_hides_context() -> None:
    visibility = torch.tensor([[False, True, True, False], [True, False, True, True]])
    query, key, value = attention_inputs(2, 4, seed=0)
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    mask = additive(visibility, torch.float32)
    output, _ = split.attend(module, query, key, value, mask, scaling=8**-0.5)
    expected = plain(query, key, value, visibility).transpose(1, 2)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 1000))
def test_two_parts_merge_into_one_attention(left: int, right: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = 20 * torch.randn(3, left + right, generator=generator)
    values = torch.randn(left + right, 4, generator=generator)

    def part(columns: slice) -> tuple[Tensor, Tensor]:
        some = scores[:, columns]
        return some.softmax(-1) @ values[columns], some.logsumexp(-1)

    merged = split.merge(part(slice(0, left)), part(slice(left, None)))
    torch.testing.assert_close(merged, scores.softmax(-1) @ values, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["flash_attention_2", "", None])
def test_an_attention_without_tree_mask_is_refused_by_name(name: str | None) -> None:
    with pytest.raises(BackendError) as caught:
        check_backend(name)
    assert caught.value.got == repr(name)
    assert all(known in caught.value.expected for known in BACKENDS)


def attention_inputs(num_rows: int, num_columns: int, *, seed: int) -> tuple[Tensor, ...]:
    """Query of 4 heads, key and value of 2."""
    generator = torch.Generator().manual_seed(seed)
    query = 3 * torch.randn(1, 4, num_rows, 8, generator=generator)
    key = 3 * torch.randn(1, 2, num_columns, 8, generator=generator)
    return query, key, torch.randn(1, 2, num_columns, 8, generator=generator)


def plain(query: Tensor, key: Tensor, value: Tensor, visibility: Tensor) -> Tensor:
    """Softmax attention by its definition."""
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    scores = (query @ key.mT / math.sqrt(8)).masked_fill(~visibility, -torch.inf)
    return scores.softmax(-1) @ value
