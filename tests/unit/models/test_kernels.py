"""The compiled kernels compute what torch does, and each row as if it were alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ddtree.attention.masks import additive
from ddtree.models import kernels
from ddtree.models.fused import FusedMLP, FusedRMSNorm, fuse_layers
from ddtree.models.packed import PanelLinear
from tests.support.models import tiny_model


def test_this_machine_runs_the_kernels() -> None:
    """Where we test there is gcc and AVX2: nothing below is skipped."""
    assert kernels.AVAILABLE


def inputs(rows: int, keys: int, heads: int, kv_heads: int, width: int) -> tuple[Tensor, ...]:
    """Query, key and value as a model gives them: the one transposed, the others views."""
    torch.manual_seed(rows + keys)
    query = torch.randn(1, rows, heads, width).transpose(1, 2)
    key, value = torch.randn(2, 1, kv_heads, keys + 5, width).unbind()
    return query, key[:, :, :keys], value[:, :, :keys]


def ancestors(rows: int) -> Tensor:
    """[N, N] a random tree: each row sees a random earlier row's path and itself."""
    seen = torch.eye(rows, dtype=torch.bool)
    for row in range(1, rows):
        seen[row] |= seen[int(torch.randint(row, (1,)))]
    return seen


def tree_mask(seen: Tensor, context: int) -> Tensor:
    shown = torch.ones(seen.shape[0], context, dtype=torch.bool)
    return additive(torch.cat([shown, seen], dim=1), torch.float32)


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(9, 3, 64), (4, 4, 8), (8, 1, 72)])
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 17])
@pytest.mark.parametrize("context", [0, 1, 63, 64, 200])
def test_attention_is_torchs(
    rows: int, context: int, heads: int, kv_heads: int, width: int
) -> None:
    query, key, value = inputs(rows, context + rows, heads, kv_heads, width)
    mask = tree_mask(ancestors(rows), context)
    assert kernels.can_attend(query, key, value, mask)
    want = functional.scaled_dot_product_attention(
        *(t.double() for t in (query, key, value)), mask.double(), scale=0.3, enable_gqa=True
    )
    for num_open in (0, context):
        got = kernels.attention(query, key, value, mask, num_open=num_open, scale=0.3)
        torch.testing.assert_close(got.transpose(1, 2).double(), want, rtol=1e-5, atol=2e-6)


def test_a_mask_that_is_no_switch_is_added_to_the_scores() -> None:
    query, key, value = inputs(3, 10, 4, 2, 16)
    mask = torch.randn(1, 1, 3, 10)
    want = functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
    got = kernels.attention(query, key, value, mask, num_open=0, scale=0.25)
    torch.testing.assert_close(got.transpose(1, 2), want, rtol=1e-5, atol=1e-6)


def test_a_row_that_sees_nothing_is_zero_and_not_nan() -> None:
    query, key, value = inputs(2, 8, 2, 2, 8)
    mask = torch.zeros(1, 1, 2, 8)
    mask[..., 0, :] = torch.finfo(torch.float32).min
    got = kernels.attention(query, key, value, mask, num_open=0, scale=1.0)
    assert (got[0, 0] == 0).all()
    assert (got[0, 1] != 0).all()


def test_requests_side_by_side_are_each_as_if_alone() -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([1, 30, 7, 30, 65])
    query = torch.randn(5, 1, 6, 16).transpose(1, 2)
    key, value = torch.randn(2, 5, 2, 80, 16)[:, :, :, :66].unbind()
    mask = additive(torch.arange(66)[None] < lengths[:, None], torch.float32).permute(2, 0, 1, 3)
    together = kernels.attention(query, key, value, mask, num_open=0, scale=0.25)
    for r, length in enumerate(lengths.tolist()):
        parts = (query[r : r + 1], key[r : r + 1, :, :length], value[r : r + 1, :, :length])
        alone = kernels.attention(*parts, None, num_open=0, scale=0.25)
        assert torch.equal(together[r], alone[0])
    want = functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
    torch.testing.assert_close(together.transpose(1, 2), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("context", [7, 64, 130])
def test_a_row_of_a_tree_is_bit_for_bit_the_row_of_plain_decoding(
    context: int, threads: int
) -> None:
    rows = 19
    query, key, value = inputs(rows, context + rows, 9, 3, 64)
    seen = ancestors(rows)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        together = kernels.attention(
            query, key, value, tree_mask(seen, context), num_open=context, scale=0.125
        )
        for row in range(rows):
            entries = [*range(context), *(context + seen[row].nonzero()[:, 0]).tolist()]
            alone = kernels.attention(
                query[:, :, row : row + 1],
                key[:, :, entries],
                value[:, :, entries],
                None,
                num_open=0,
                scale=0.125,
            )
            assert torch.equal(alone[0, 0], together[0, row])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "change",
    [
        "half",
        "width",
        "masks of heads",
        "one mask for all rows",
        "strided",
        "unmasked rows",
        "shared",
        "gradients",
    ],
)
def test_what_the_kernel_cannot_do_is_left_to_torch(change: str) -> None:
    width = 12 if change == "width" else 16
    query, key, value = inputs(2, 6, 4, 2, width)
    mask: Tensor | None = torch.zeros(1, 1, 2, 6)
    assert change == "width" or kernels.can_attend(query, key, value, mask)
    if change == "half":
        query, key, value = query.half(), key.half(), value.half()
    elif change == "masks of heads":
        mask = torch.zeros(1, 4, 2, 6)
    elif change == "one mask for all rows":
        mask = torch.zeros(1, 1, 1, 6)
    elif change == "strided":
        key = key.transpose(2, 3).contiguous().transpose(2, 3)
    elif change == "unmasked rows":
        mask = None
    elif change == "gradients":
        query = query.requires_grad_()
    elif change == "shared":
        value = value[..., :8]
    assert not kernels.can_attend(query, key, value, mask)


@pytest.mark.parametrize("shape", [(1, 8), (17, 576), (2, 3, 13), (5, 1)])
def test_rms_norm_is_the_librarys(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    norm = LlamaRMSNorm(shape[-1], eps=1e-5)
    nn.init.normal_(norm.weight)
    x = torch.randn(shape) * 30
    fused = fuse_layers(norm)
    assert isinstance(fused, FusedRMSNorm)
    torch.testing.assert_close(fused(x), norm(x).detach(), rtol=2e-6, atol=1e-6)
    assert torch.equal(fused(x), torch.stack([fused(row) for row in x]))


@pytest.mark.parametrize("count", [1, 7, 8, 9, 8191, 26112])
def test_swiglu_is_torchs_far_from_zero_too(count: int) -> None:
    torch.manual_seed(0)
    gate, up = 40 * torch.randn(count), torch.randn(count)
    gate[0] = -200.0
    want = (functional.silu(gate.double()) * up.double()).float()
    got = kernels.swiglu(gate, up)
    torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-30)
    assert torch.equal(got[-1:], kernels.swiglu(gate[-1:], up[-1:]))


def test_only_layers_with_a_twin_are_fused() -> None:
    class Other(LlamaRMSNorm):
        """May be another formula."""

    llama = tiny_model("llama")
    mlp = llama.model.layers[0].mlp
    kept = nn.Sequential(Other(8), LlamaRMSNorm(8).half(), nn.LayerNorm(8))
    assert [type(m) for m in fuse_layers(kept)] == [Other, LlamaRMSNorm, nn.LayerNorm]
    before = mlp.act_fn
    try:
        mlp.act_fn = nn.GELU()
        assert fuse_layers(mlp) is mlp
    finally:
        mlp.act_fn = before
    x = torch.randn(3, 32)
    fused = fuse_layers(mlp)
    assert isinstance(fused, FusedMLP)
    torch.testing.assert_close(fused(x).detach(), mlp(x).detach(), rtol=1e-5, atol=1e-5)
    assert not isinstance(fused.gate_proj, PanelLinear), "packing is another matter"
