"""Attention of tree rows over a paged cache on a CPU, and how such a cache lies in memory.

vLLM's attention on a CPU knows no mask. Rows of trees see their request's context, which is in the
cache, and their ancestors and themselves, which are among the step's own rows; one softmax is over
both. The rows of all other requests are vLLM's. Knows no engine.

How keys and values lie within a block depends on the processor and the dtype, and engines do not
say: `detect_layout` lets the engine write and looks where the numbers are.

Letters: M rows of the step, H query heads, KVH heads of keys and values, D numbers of a head, Z
blocks of the cache, C positions of a block; S, N and T as in `tree_rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from enum import Enum

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ddtree.errors import BackendError
from ddtree.models import kernels
from ddtree.serving.tree_rows import TreeRows
from ddtree.tree.batched import expand_ancestors

with suppress(ImportError):  # `kernels.AVAILABLE` says whether it was built
    from ddtree.models import _kernels

# Widths and blocks are read in lines of this many floats, as in native/paged_tile.h.
_PANEL = 16
# Positions and numbers that lie together where two bfloat16 numbers are multiplied at once.
_ROWS, _PAIR = 16, 2


class CacheLayout(Enum):
    """How the [C, D] keys, and values, of one head lie within their part of a block."""

    TOKENS = "keys and values as [C, D]"
    TRANSPOSED_KEYS = "keys as [D, C], values as [C, D]"
    PAIRS = "keys as [C / 16, D / 2, 16, 2], values as [D / 16, C / 2, 16, 2]"

    def keys(self, blocks: Float[Tensor, "Z KVH C D"]) -> Float[Tensor, "Z KVH C D"]:
        """The keys of some blocks in plain order, given their memory in this one."""
        num_blocks, heads, size, width = blocks.shape
        if self is CacheLayout.TRANSPOSED_KEYS:
            return blocks.reshape(num_blocks, heads, width, size).mT
        if self is CacheLayout.PAIRS:
            shape = (num_blocks, heads, size // _ROWS, width // _PAIR, _ROWS, _PAIR)
            return blocks.reshape(shape).permute(0, 1, 2, 4, 3, 5).reshape(blocks.shape)
        return blocks

    def values(self, blocks: Float[Tensor, "Z KVH C D"]) -> Float[Tensor, "Z KVH C D"]:
        """The values of some blocks in plain order, given their memory in this one."""
        num_blocks, heads, size, width = blocks.shape
        if self is CacheLayout.PAIRS:
            shape = (num_blocks, heads, width // _ROWS, size // _PAIR, _ROWS, _PAIR)
            return blocks.reshape(shape).permute(0, 1, 3, 5, 2, 4).reshape(blocks.shape)
        return blocks

    def fits(self, block_size: int, width: int) -> bool:
        """Whether blocks of C positions and heads of D numbers can lie like this."""
        return self is not CacheLayout.PAIRS or (block_size % _ROWS == 0 and width % _ROWS == 0)


def split_cache(
    kv_cache: Float[Tensor, "Z KVH C D2"],
) -> tuple[Float[Tensor, "Z KVH C D"], Float[Tensor, "Z KVH C D"]]:
    """The cache of a layer as two views, keys and values.

    A head's part of a block is 2 * C * D numbers: first those of the keys, then those of the
    values, each in an order of their own (`CacheLayout`).

    Args:
        kv_cache: [Z, KVH, C, 2 * D], as vLLM's backend for CPUs shapes it.
    """
    num_blocks, heads, block_size, both = kv_cache.shape
    keys, values = kv_cache.view(num_blocks, heads, 2 * block_size, both // 2).chunk(2, dim=2)
    return keys, values


def detect_layout(
    write: Callable[[Tensor, Tensor, Tensor, Tensor], None],
    block_size: int,
    kv_heads: int,
    width: int,
    dtype: torch.dtype,
) -> CacheLayout:
    """Find out how an engine's cache lies in memory, from what it does to a small one.

    Args:
        write: the engine's own write(key [n, KVH, D], value, kv_cache [Z, KVH, C, 2 * D], slots
            [n] int64); slot s is position s % C of block s // C.
        block_size: C.
        kv_heads: KVH.
        width: D.
        dtype: of the cache.

    Raises:
        BackendError: the numbers are where no known layout has them.

    >>> def by_tokens(key, value, kv_cache, slots):
    ...     for cache, new in zip(split_cache(kv_cache), (key, value)):
    ...         cache[slots // 16, :, slots % 16] = new
    >>> detect_layout(by_tokens, 16, 2, 8, torch.float32).name
    'TOKENS'
    """
    numbers = torch.Generator().manual_seed(0)
    slots = torch.randperm(3 * block_size, generator=numbers)[: 2 * block_size]
    # Whole numbers that bfloat16 holds too.
    key, value = (
        torch.randint(-128, 128, (2, len(slots), kv_heads, width), generator=numbers)
        .to(dtype)
        .unbind()
    )
    kv_cache = torch.zeros(3, kv_heads, block_size, 2 * width, dtype=dtype)
    write(key, value, kv_cache, slots)
    keys, values = split_cache(kv_cache)
    known = [layout for layout in CacheLayout if layout.fits(block_size, width)]
    for layout in known:
        found = _by_slot(layout.keys(keys)), _by_slot(layout.values(values))
        if torch.equal(found[0][slots], key) and torch.equal(found[1][slots], value):
            return layout
    raise BackendError(
        "kv_cache",
        expected="blocks that hold " + ", or ".join(layout.value for layout in known),
        got=f"another order (C = {block_size}, D = {width}, {dtype})",
        remedy="Serve without trees here, or report the processor and the engine's version.",
    )


def _by_slot(blocks: Float[Tensor, "Z KVH C D"]) -> Float[Tensor, "slots KVH D"]:
    return blocks.transpose(1, 2).flatten(0, 1)


def paged_tree_attention(
    query: Float[Tensor, "M H D"],
    key: Float[Tensor, "M KVH D"],
    value: Float[Tensor, "M KVH D"],
    key_cache: Float[Tensor, "Z KVH C D"],
    value_cache: Float[Tensor, "Z KVH C D"],
    trees: TreeRows,
    scale: float,
    out: Float[Tensor, "M H D"],
    layout: CacheLayout,
) -> None:
    """Attention of every tree row: over its request's context, its ancestors and itself.

    Mutates `out` in the rows of `trees` and nowhere else. The compiled kernel does the work in
    float32 where keys are transposed; there, what a request gets depends neither on the requests
    beside it nor on the number of threads. Everything else is gathered and left to torch.

    Args:
        query: [M, H, D], of the step; H is a multiple of KVH.
        key: [M, KVH, D], of the step's rows.
        value: [M, KVH, D].
        key_cache: [Z, KVH, C, D], holds the context's keys; see `split_cache`.
        value_cache: [Z, KVH, C, D].
        trees: which rows, and what they see.
        scale: scores are multiplied by it, usually 1 / sqrt(D).
        out: [M, H, D].
        layout: in what order keys and values lie within `key_cache` and `value_cache`.
    """
    assert trees.max_context_len <= trees.block_tables.shape[1] * key_cache.shape[2]
    assert trees.max_rows <= trees.ancestor_words.shape[1] * 64
    step = (query, key, value, out)
    if layout is CacheLayout.TRANSPOSED_KEYS and _can_compile(step, (key_cache, value_cache)):
        _by_kernel(query, key, value, key_cache, value_cache, trees, scale, out)
    else:
        _by_gathering(query, key, value, key_cache, value_cache, trees, scale, out, layout)


def _can_compile(step: tuple[Tensor, ...], caches: tuple[Tensor, ...]) -> bool:
    """Whether the kernel reads these: whole lines of floats, a block's head in one piece."""
    size, width = caches[0].shape[2:]
    return (
        kernels.AVAILABLE
        and size % _PANEL == width % _PANEL == 0
        and all(t.is_cpu and t.dtype is torch.float32 for t in (*step, *caches))
        and all(t.stride(2) == 1 for t in step)
        and all(t.stride()[2:] == (width, 1) for t in caches)
    )


def _by_kernel(
    query: Float[Tensor, "M H D"],
    key: Float[Tensor, "M KVH D"],
    value: Float[Tensor, "M KVH D"],
    key_cache: Float[Tensor, "Z KVH C D"],
    value_cache: Float[Tensor, "Z KVH C D"],
    trees: TreeRows,
    scale: float,
    out: Float[Tensor, "M H D"],
) -> None:
    starts, rows, contexts = trees.row_starts, trees.num_rows, trees.context_lens
    tables, words = trees.block_tables, trees.ancestor_words
    assert starts.dtype is rows.dtype is contexts.dtype is tables.dtype is torch.int32
    assert words.dtype is torch.int64
    assert all(t.is_contiguous() for t in (starts, rows, contexts, words))
    num_requests, table_length = tables.shape
    table_step, within = tables.stride()
    assert within == 1 or table_length <= 1
    num_heads, width = query.shape[1:]
    tensors = (query, key, value, key_cache, value_cache, out)
    _kernels.paged_attention(
        tuple([(t.data_ptr(), *t.stride()[:2]) for t in tensors]),
        (starts.data_ptr(), rows.data_ptr(), contexts.data_ptr()),
        (tables.data_ptr(), table_step),
        (words.data_ptr(), words.shape[1]),
        (num_requests, num_heads, key.shape[1], width, key_cache.shape[2]),
        scale,
        torch.get_num_threads(),
    )


def _by_gathering(
    query: Float[Tensor, "M H D"],
    key: Float[Tensor, "M KVH D"],
    value: Float[Tensor, "M KVH D"],
    key_cache: Float[Tensor, "Z KVH C D"],
    value_cache: Float[Tensor, "Z KVH C D"],
    trees: TreeRows,
    scale: float,
    out: Float[Tensor, "M H D"],
    layout: CacheLayout,
) -> None:
    """What the kernel computes, request after request: any dtype, any layout."""
    block_size, first_words = key_cache.shape[2], 0
    sizes = torch.stack([trees.row_starts, trees.num_rows, trees.context_lens], dim=1)
    for request, (start, num_rows, context) in enumerate(sizes.tolist()):
        blocks = trees.block_tables[request, : -(-context // block_size)].long()
        rows = slice(start, start + num_rows)
        words = trees.ancestor_words[first_words : first_words + num_rows]
        first_words += num_rows
        seen = torch.cat(
            [
                torch.ones(num_rows, context, dtype=torch.bool, device=words.device),
                expand_ancestors(words[None])[0],
            ],
            dim=1,
        )
        out[rows] = _attend(
            query[rows],
            torch.cat([_by_slot(layout.keys(key_cache[blocks]))[:context], key[rows]]),
            torch.cat([_by_slot(layout.values(value_cache[blocks]))[:context], value[rows]]),
            seen,
            scale,
        ).to(out.dtype)


def _attend(
    query: Float[Tensor, "N H D"],
    key: Float[Tensor, "S KVH D"],
    value: Float[Tensor, "S KVH D"],
    seen: Bool[Tensor, "N S"],
    scale: float,
) -> Float[Tensor, "N H D"]:
    """Softmax attention of grouped heads over S entries, in float32 at the least."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    (num_rows, num_heads, width), kv_heads = query.shape, key.shape[1]
    grouped = query.to(dtype).view(num_rows, kv_heads, num_heads // kv_heads, width)
    scores = torch.einsum("nkgd,skd->kgns", grouped, key.to(dtype)) * scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
    return torch.einsum("kgns,skd->nkgd", weights, value.to(dtype)).flatten(1, 2)
