"""Attention of tree rows over a paged cache in one launch for all tree requests: NVIDIA and AMD.

The kernels are in `triton_kernels`; this module says how they are launched, and needs triton only
when it launches. Nothing here waits for the device, and no value on it decides a shape: a launch
can be captured in a CUDA graph, whose bounds (S, `max_rows`, `max_context_len`) then hold for its
replays; requests of fewer rows, or none, are padding. Knows no engine.

Letters: M rows of the step, H query heads, KVH heads of keys and values, D numbers of a head, Z
blocks of the cache, C positions of a block; S, N and T as in `tree_rows`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch
from jaxtyping import Float
from torch import Tensor

from ddtree.errors import BackendError
from ddtree.serving.tree_rows import TreeRows

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_LOG2_E = 1.4426950408889634
# A split should read far more of the cache than it writes: its share is at least this long.
_LEAST_SHARE = 512
_MOST_SPLITS = 32
_MERGED_ROWS = 16


@dataclass(frozen=True)
class Tiling:
    """How the work is cut into programs. Changes how fast it is, and rounding alone.

    Args:
        rows: query rows of a program, a power of two >= 16. Those of all heads that share keys and
            values count: N * H / KVH in a request.
        keys: positions that a program looks at in one step, a power of two from 16 to 64.
        splits: shares that a request's context is cut into, at least 1.
        num_warps: of a program.
        num_stages: loads under way, in steps.
    """

    rows: int
    keys: int
    splits: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        assert self.rows >= 16
        assert self.rows.bit_count() == 1
        assert self.keys in (16, 32, 64)  # a step must not lie in two words of ancestors
        assert self.splits >= 1


@dataclass(frozen=True)
class Bounds:
    """What a launch has to do at most, as the host knows it.

    Args:
        num_requests: S.
        num_heads: H.
        num_kv_heads: KVH.
        head_dim: D.
        element_bytes: of a number in the cache.
        max_rows: the most N.
        max_context_len: the most T.
    """

    num_requests: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int
    max_rows: int
    max_context_len: int

    @property
    def grouped_rows(self) -> int:
        """Query rows of a request that share a head of keys and values."""
        return self.max_rows * (self.num_heads // self.num_kv_heads)


def choose_tiling(bounds: Bounds, num_multiprocessors: int) -> Tiling:
    """Tiles that need no spilled registers, and enough programs to fill the GPU.

    Compiled for compute capabilities 8.0 and 9.0, two programs fit on a multiprocessor at the
    least. The context is split (and the shares merged by a second kernel) where there are too few
    tiles for that. Splits are a power of two, so that few kernels are compiled.

    >>> bounds = Bounds(1, 32, 8, 128, 2, max_rows=65, max_context_len=8000)
    >>> choose_tiling(bounds, 132)
    Tiling(rows=64, keys=32, splits=4, num_warps=4, num_stages=3)
    """
    half, wide = bounds.element_bytes <= 2, bounds.head_dim > 128
    most_rows = 16 if not half or bounds.head_dim > 256 else 32 if wide else 64
    rows = min(most_rows, max(16, _power_of_two(bounds.grouped_rows)))
    programs = bounds.num_requests * bounds.num_kv_heads * -(-bounds.grouped_rows // rows)
    wanted = 2 * num_multiprocessors // programs
    splits = min(wanted, bounds.max_context_len // _LEAST_SHARE, _MOST_SPLITS)
    return Tiling(
        rows=rows,
        keys=32 if half and bounds.head_dim <= 256 else 16,
        splits=1 << (max(1, splits).bit_length() - 1),
        num_warps=4,
        num_stages=3 if half and not wide else 2,
    )


def require_triton() -> None:
    """Raise unless the kernels can be loaded.

    Raises:
        BackendError: triton is not installed.
    """
    if find_spec("triton") is None:
        raise BackendError(
            "attention",
            expected="triton, for trees on a GPU",
            got="an environment without it",
            remedy="Install it: pip install triton.",
        )


def paged_tree_attention_triton(
    query: Float[Tensor, "M H D"],
    key: Float[Tensor, "M KVH D"],
    value: Float[Tensor, "M KVH D"],
    key_cache: Float[Tensor, "Z C KVH D"],
    value_cache: Float[Tensor, "Z C KVH D"],
    trees: TreeRows,
    scale: float,
    out: Float[Tensor, "M H D"],
    tiling: Tiling | None = None,
) -> None:
    """Attention of every tree row: over its request's context, its ancestors and itself.

    Mutates `out` in the rows of `trees` and nowhere else. All tensors are on the current device
    and of a dtype of `DTYPES`, the cache perhaps of another one than the step; the last axis has
    stride 1, the others any. The first launch of a kind compiles its kernel, which takes seconds:
    see `warm_up`.

    Args:
        query: [M, H, D], of the step; H is a multiple of KVH.
        key: [M, KVH, D], of the step's rows.
        value: [M, KVH, D].
        key_cache: [Z, C, KVH, D], holds the context's keys.
        value_cache: [Z, C, KVH, D].
        trees: which rows, with bounds known on the host.
        scale: scores are multiplied by it, usually 1 / sqrt(D).
        out: [M, H, D].
        tiling: for benchmarks; chosen from the bounds if None.

    Raises:
        BackendError: triton is not installed.
    """
    require_triton()
    from ddtree.serving import triton_kernels

    bounds = _bounds(
        query,
        key,
        num_requests=len(trees.row_starts),
        max_rows=trees.max_rows,
        max_context_len=trees.max_context_len,
    )
    if bounds.num_requests == 0 or bounds.max_rows == 0:
        return
    assert {t.dtype for t in (query, key, value, key_cache, value_cache)} <= set(DTYPES)
    vectors = (query, key, value, key_cache, value_cache, out, trees.block_tables)
    assert all(t.stride(-1) == 1 for t in vectors if t.numel() > 0)
    if tiling is None:
        tiling = choose_tiling(bounds, _num_multiprocessors(query.device))
    tiles = -(-bounds.grouped_rows // tiling.rows)
    shape = {
        "GROUP": bounds.num_heads // bounds.num_kv_heads,
        "HEAD_DIM": bounds.head_dim,
        "PADDED_DIM": max(16, _power_of_two(bounds.head_dim)),
    }
    is_split = tiling.splits > 1
    heads_of_all = bounds.num_requests * bounds.num_kv_heads
    num_parts = heads_of_all * tiling.splits * tiles * tiling.rows if is_split else 0
    parts = query.new_empty((num_parts, shape["PADDED_DIM"]), dtype=torch.float32)
    part_logs = query.new_empty(num_parts, dtype=torch.float32)
    triton_kernels.attend[(tiles, bounds.num_kv_heads * tiling.splits, bounds.num_requests)](
        query,
        key,
        value,
        key_cache,
        value_cache,
        out,
        parts,
        part_logs,
        trees.row_starts,
        trees.num_rows,
        trees.context_lens,
        trees.block_tables,
        trees.ancestor_words,
        scale * _LOG2_E,
        tiling.splits,
        trees.ancestor_words.shape[1],
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        *out.stride()[:2],
        trees.block_tables.stride(0),
        **shape,
        BLOCK_SIZE=key_cache.shape[1],
        BLOCK_ROWS=tiling.rows,
        BLOCK_KEYS=tiling.keys,
        IS_SPLIT=is_split,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    if is_split:
        merged_tiles = -(-bounds.grouped_rows // _MERGED_ROWS)
        triton_kernels.merge[(merged_tiles, bounds.num_kv_heads, bounds.num_requests)](
            parts,
            part_logs,
            out,
            trees.row_starts,
            trees.num_rows,
            tiling.splits,
            tiles * tiling.rows,
            *out.stride()[:2],
            **shape,
            BLOCK_ROWS=_MERGED_ROWS,
        )


def warm_up(
    query: Float[Tensor, "M H D"],
    key: Float[Tensor, "M KVH D"],
    value: Float[Tensor, "M KVH D"],
    key_cache: Float[Tensor, "Z C KVH D"],
    value_cache: Float[Tensor, "Z C KVH D"],
    *,
    max_rows: int,
) -> None:
    """Compile what steps with trees of up to `max_rows` rows can ask for. Mutates nothing.

    Args:
        query: [M, H, D], M >= 1, and all others as in `paged_tree_attention_triton`; what is in
            them does not matter.
        key: [M, KVH, D].
        value: [M, KVH, D].
        key_cache: [Z, C, KVH, D].
        value_cache: [Z, C, KVH, D].
        max_rows: the most N.

    Raises:
        BackendError: triton is not installed.
    """
    nothing = torch.zeros(1, dtype=torch.int32, device=query.device)
    words = nothing.new_zeros((1, 1), dtype=torch.int64)
    bounds = _bounds(query, key, num_requests=1, max_rows=max_rows, max_context_len=0)
    tilings = {
        choose_tiling(replace(bounds, max_rows=rows), 1): rows for rows in range(1, max_rows + 1)
    }
    for tiling, rows in tilings.items():
        # Room for so many rows, and none that is there.
        trees = TreeRows(nothing, nothing, nothing, nothing[:, None], words, rows, 0)
        for splits in (1, 2):
            paged_tree_attention_triton(
                query,
                key,
                value,
                key_cache,
                value_cache,
                trees,
                1.0,
                torch.empty_like(query),
                replace(tiling, splits=splits),
            )


def _bounds(
    query: Tensor, key: Tensor, *, num_requests: int, max_rows: int, max_context_len: int
) -> Bounds:
    return Bounds(
        num_requests=num_requests,
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[2],
        element_bytes=query.element_size(),
        max_rows=max_rows,
        max_context_len=max_context_len,
    )


def _power_of_two(number: int) -> int:
    """The least power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":  # triton's interpreter, which runs one program after another
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
