"""Who sees whom, against the definition pair by pair; and that all backends mean the same by it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ddtree.attention import eager, sdpa
from ddtree.attention.backends import BACKENDS, mask_maker
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
def test_eager_and_sdpa_masks_have_the_same_effect(
    tree: DraftTree, context_length: int, window: int | None, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    visibility = visibility_of(tree, context_length, window)
    num_rows, num_columns = visibility.shape
    query = 3 * torch.randn(1, 2, num_rows, 8, generator=generator)
    key = 3 * torch.randn(1, 2, num_columns, 8, generator=generator)
    value = torch.randn(1, 2, num_columns, 8, generator=generator)

    additive = eager.mask(visibility, torch.float32)
    weights = (query @ key.mT / math.sqrt(8) + additive).softmax(-1)
    boolean = sdpa.mask(visibility, torch.float32)
    actual = scaled_dot_product_attention(query, key, value, attn_mask=boolean)

    torch.testing.assert_close(weights @ value, actual, rtol=1e-5, atol=1e-5)
    assert (weights[:, :, ~visibility] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_eager_mask_is_0_or_the_lowest_number_of_the_dtype(dtype: torch.dtype) -> None:
    mask = eager.mask(torch.tensor([[True, False]]), dtype)
    assert mask.dtype == dtype
    assert mask.tolist() == [[[[0.0, torch.finfo(dtype).min]]]]


def test_each_backend_is_found_by_its_transformers_name() -> None:
    assert mask_maker("sdpa") is sdpa.mask
    assert mask_maker("eager") is eager.mask


@pytest.mark.parametrize("name", ["flash_attention_2", "", None])
def test_an_attention_without_tree_mask_is_refused_by_name(name: str | None) -> None:
    with pytest.raises(BackendError) as caught:
        mask_maker(name)
    assert caught.value.got == repr(name)
    assert all(known in caught.value.expected for known in BACKENDS)
