"""The Triton kernels of `triton_attention`; imports triton, so only that module imports this one.

Letters besides those of `tree_rows`: H query heads, KVH heads of keys and values, G = H / KVH, D
numbers of a head. A program's tile is BLOCK_ROWS of the G * N query rows that share a head of keys
and values: row n of head h * G + g is number n * G + g. Strides are in elements; D has stride 1.

Softmax is in powers of two: scores are multiplied by log2(e), which saves a product per score.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _fold(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    visible: tl.tensor,
    scale: tl.tensor,
    most: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
) -> tl.tuple:
    """Takes one tile of keys and values into the softmax that runs along the rows."""
    # "ieee" is for float32, whose text must be the target's own: tf32 keeps 10 bits.
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
    scores = tl.where(visible, scores, float("-inf"))
    peak = tl.maximum(most, tl.max(scores, 1))
    # Rows that have seen nothing yet: inf - inf would be NaN.
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp2(scores - shift[:, None])
    fading = tl.exp2(most - shift)
    total = total * fading + tl.sum(weights, 1)
    mixed = mixed * fading[:, None]
    mixed += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return peak, total, mixed


@triton.jit(do_not_specialize=["num_splits", "num_words", "table_row"])
def attend(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    part_logs: tl.tensor,
    row_starts: tl.tensor,
    num_rows: tl.tensor,
    context_lens: tl.tensor,
    block_tables: tl.tensor,
    ancestor_words: tl.tensor,
    scale: tl.tensor,
    num_splits: tl.tensor,
    num_words: tl.tensor,
    query_row: tl.tensor,
    query_head: tl.tensor,
    key_row: tl.tensor,
    key_head: tl.tensor,
    value_row: tl.tensor,
    value_head: tl.tensor,
    key_block: tl.tensor,
    key_slot: tl.tensor,
    key_cache_head: tl.tensor,
    value_block: tl.tensor,
    value_slot: tl.tensor,
    value_cache_head: tl.tensor,
    out_row: tl.tensor,
    out_head: tl.tensor,
    table_row: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
) -> None:
    """Grid: (tiles, KVH * num_splits, S). The last split takes the tree's rows besides its own.

    Where IS_SPLIT, a program leaves its share in `parts` [S, KVH, num_splits, tiles * BLOCK_ROWS,
    PADDED_DIM] and the logarithm of its weight in `part_logs`, without the last axis.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1) // num_splits
    split = tl.program_id(1) % num_splits
    request = tl.program_id(2)
    rows = tl.load(num_rows + request)
    if tile * BLOCK_ROWS >= rows * GROUP:
        return
    context_len = tl.load(context_lens + request)
    first_row = tl.load(row_starts + request).to(tl.int64)
    # Rows of the requests before this one, which is where its ancestor words begin.
    words_before = 0
    for start in range(0, request, 128):
        others = start + tl.arange(0, 128)
        words_before += tl.sum(tl.load(num_rows + others, mask=others < request, other=0))

    numbers = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    nodes = numbers // GROUP
    heads = head * GROUP + numbers % GROUP
    is_row = nodes < rows
    dims = tl.arange(0, PADDED_DIM)
    is_dim = dims < HEAD_DIM
    row_offsets = (first_row + nodes) * query_row + heads * query_head
    own = is_row[:, None] & is_dim[None, :]
    q = tl.load(query + row_offsets[:, None] + dims[None, :], mask=own, other=0.0)
    most = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    mixed = tl.zeros([BLOCK_ROWS, PADDED_DIM], tl.float32)

    # The split's share [begin, end) of the context, whole tiles but for the context's last.
    share = tl.cdiv(tl.cdiv(context_len, num_splits), BLOCK_KEYS) * BLOCK_KEYS
    begin = split * share
    end = tl.minimum(begin + share, context_len)
    steps = tl.arange(0, BLOCK_KEYS)
    table = block_tables + request.to(tl.int64) * table_row
    for start in range(begin, end, BLOCK_KEYS):
        positions = start + steps
        is_key = positions < end
        blocks = tl.load(table + positions // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        slots = positions % BLOCK_SIZE
        there = is_key[:, None] & is_dim[None, :]
        at = blocks * key_block + slots * key_slot + head * key_cache_head
        k = tl.load(key_cache + at[:, None] + dims[None, :], mask=there, other=0.0).to(q.dtype)
        at = blocks * value_block + slots * value_slot + head * value_cache_head
        v = tl.load(value_cache + at[:, None] + dims[None, :], mask=there, other=0.0).to(q.dtype)
        most, total, mixed = _fold(q, k, v, is_key[None, :], scale, most, total, mixed)

    # The tree's own rows. A tile of columns lies within one word: BLOCK_KEYS divides 64.
    words = ancestor_words + (words_before + nodes).to(tl.int64) * num_words
    num_columns = tl.where(split == num_splits - 1, rows, 0)
    for start in range(0, num_columns, BLOCK_KEYS):
        columns = start + steps
        is_key = columns < rows
        word = tl.load(words + start // 64, mask=is_row, other=0)
        bits = (word[:, None] >> (columns % 64).to(tl.int64)[None, :]) & 1
        there = is_key[:, None] & is_dim[None, :]
        at = (first_row + columns) * key_row + head * key_head
        k = tl.load(key + at[:, None] + dims[None, :], mask=there, other=0.0)
        k = k.to(key_cache.dtype.element_ty).to(q.dtype)  # as plain decoding would read it
        at = (first_row + columns) * value_row + head * value_head
        v = tl.load(value + at[:, None] + dims[None, :], mask=there, other=0.0)
        v = v.to(value_cache.dtype.element_ty).to(q.dtype)
        visible = (bits != 0) & is_key[None, :]
        most, total, mixed = _fold(q, k, v, visible, scale, most, total, mixed)

    # A split that saw nothing has weight exp(-inf); rows past the tree's are not stored.
    total = tl.where(total > 0.0, total, 1.0)
    mixed = mixed / total[:, None]
    if IS_SPLIT:
        at = (request.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0)
        at = at * BLOCK_ROWS + numbers
        tl.store(parts + at[:, None] * PADDED_DIM + dims[None, :], mixed, mask=is_row[:, None])
        tl.store(part_logs + at, most + tl.log2(total), mask=is_row)
    else:
        at = (first_row + nodes) * out_row + heads * out_head
        goal = out + at[:, None] + dims[None, :]
        tl.store(goal, mixed.to(out.dtype.element_ty), mask=own)


@triton.jit(do_not_specialize=["num_splits", "padded_rows"])
def merge(
    parts: tl.tensor,
    part_logs: tl.tensor,
    out: tl.tensor,
    row_starts: tl.tensor,
    num_rows: tl.tensor,
    num_splits: tl.tensor,
    padded_rows: tl.tensor,
    out_row: tl.tensor,
    out_head: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
) -> None:
    """Grid: (tiles, KVH, S). Puts the splits' shares together, each by its weight."""
    tile, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = tl.load(num_rows + request)
    if tile * BLOCK_ROWS >= rows * GROUP:
        return
    first_row = tl.load(row_starts + request).to(tl.int64)
    numbers = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    nodes = numbers // GROUP
    is_row = nodes < rows
    dims = tl.arange(0, PADDED_DIM)
    first_part = (request.to(tl.int64) * tl.num_programs(1) + head) * num_splits * padded_rows
    most = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    mixed = tl.zeros([BLOCK_ROWS, PADDED_DIM], tl.float32)
    for split in range(num_splits):
        at = first_part + split * padded_rows + numbers
        log = tl.load(part_logs + at, mask=is_row, other=float("-inf"))
        part = tl.load(
            parts + at[:, None] * PADDED_DIM + dims[None, :], mask=is_row[:, None], other=0.0
        )
        peak = tl.maximum(most, log)
        shift = tl.where(peak == float("-inf"), 0.0, peak)
        weight, fading = tl.exp2(log - shift), tl.exp2(most - shift)
        total = total * fading + weight
        mixed = mixed * fading[:, None] + part * weight[:, None]
        most = peak
    mixed = mixed / tl.where(total > 0.0, total, 1.0)[:, None]
    at = (first_row + nodes) * out_row + (head * GROUP + numbers % GROUP) * out_head
    goal = out + at[:, None] + dims[None, :]
    own = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(goal, mixed.to(out.dtype.element_ty), mask=own)
