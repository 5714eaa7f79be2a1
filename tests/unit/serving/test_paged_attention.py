"""Tree rows over a paged cache: each path is a dense softmax, and known layouts are recognised."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddtree.errors import BackendError
from ddtree.models import kernels
from ddtree.serving import paged_attention
from ddtree.serving.paged_attention import (
    CacheLayout,
    detect_layout,
    paged_tree_attention,
    split_cache,
)
from ddtree.serving.tree_rows import TreeRows

Path = Callable[["Step"], Tensor]
UNTOUCHED = 77.0


@dataclass(frozen=True)
class Step:
    """A step's tensors, and where the trees in it are."""

    query: Tensor
    key: Tensor
    value: Tensor
    kv_cache: Tensor
    trees: TreeRows
    scale: float
    layout: CacheLayout

    @property
    def caches(self) -> tuple[Tensor, Tensor]:
        return split_cache(self.kv_cache)


def random_parents(num_rows: int, rng: random.Random) -> list[int]:
    """Of a tree with chains in it: every other row goes on from the row before."""
    return [-1, *(rng.choice([row - 1, rng.randrange(row)]) for row in range(1, num_rows))]


def ancestor_words(parents: Sequence[int], num_words: int) -> Tensor:
    words = torch.zeros(len(parents), num_words, dtype=torch.int64)
    for row, parent in enumerate(parents):
        if parent >= 0:
            words[row] = words[parent]
        bit = 1 << row % 64
        words[row, row // 64] |= bit - (1 << 64) if bit >= 1 << 63 else bit
    return words


def write_to(layout: CacheLayout) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    """An engine's write, each number by its own address: not how `CacheLayout` reads it."""

    def write(key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
        _, heads, size, both = kv_cache.shape
        width = both // 2
        c, d = torch.arange(size)[:, None], torch.arange(width)[None]
        key_at, value_at = {
            CacheLayout.TOKENS: (c * width + d, c * width + d),
            CacheLayout.TRANSPOSED_KEYS: (d * size + c, c * width + d),
            CacheLayout.PAIRS: (
                c // 16 * 16 * width + d // 2 * 32 + c % 16 * 2 + d % 2,
                d // 16 * 16 * size + c // 2 * 32 + d % 16 * 2 + c % 2,
            ),
        }[layout]
        for token, slot in enumerate(slots.tolist()):
            for head in range(heads):
                memory = kv_cache[slot // size, head].view(-1)
                memory[key_at[slot % size]] = key[token, head]
                memory[size * width + value_at[slot % size]] = value[token, head]

    return write


def make_step(
    sizes: Sequence[tuple[int, int]],
    *,
    kv_heads: int = 2,
    group: int = 2,
    width: int = 32,
    block_size: int = 16,
    layout: CacheLayout = CacheLayout.TRANSPOSED_KEYS,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Step:
    """A step of requests with (N, T); rows without a tree lie between them, blocks anywhere."""
    rng, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    per_request = [-(-context // block_size) + 1 for _, context in sizes]
    num_blocks = sum(per_request) + 2
    free = rng.sample(range(num_blocks), num_blocks)
    # What nobody wrote is NaN, as it must not be read. The cache is a part of a larger memory.
    memory = torch.full((num_blocks, 2, kv_heads, block_size, 2 * width), torch.nan, dtype=dtype)
    kv_cache = memory[:, 1]
    tables = torch.zeros(len(sizes), max(per_request) + 1, dtype=torch.int32)
    starts, words, row = [], [], 1
    most_rows = max(num_rows for num_rows, _ in sizes)
    for request, (num_rows, context) in enumerate(sizes):
        blocks = torch.tensor([free.pop() for _ in range(per_request[request])])
        tables[request, : len(blocks)] = blocks
        places = torch.arange(context)
        key, value = torch.randn(2, context, kv_heads, width, generator=numbers).to(dtype)
        slots = blocks[places // block_size] * block_size + places % block_size
        write_to(layout)(key, value, kv_cache, slots)
        starts.append(row)
        words.append(ancestor_words(random_parents(num_rows, rng), -(-most_rows // 64)))
        row += num_rows + rng.randrange(3)
    # A query is a part of the rows that one projection gave.
    fused = torch.randn(row + 1, kv_heads * (group + 2), width, generator=numbers).to(dtype)
    return Step(
        query=fused[:, : kv_heads * group],
        key=fused[:, kv_heads * group : kv_heads * (group + 1)],
        value=fused[:, kv_heads * (group + 1) :],
        kv_cache=kv_cache,
        trees=TreeRows(
            row_starts=torch.tensor(starts, dtype=torch.int32),
            num_rows=torch.tensor([n for n, _ in sizes], dtype=torch.int32),
            context_lens=torch.tensor([t for _, t in sizes], dtype=torch.int32),
            block_tables=tables,
            ancestor_words=torch.cat(words),
            max_rows=most_rows,
            max_context_len=max(t for _, t in sizes),
        ),
        scale=width**-0.5,
        layout=layout,
    )


def dense(step: Step) -> Tensor:
    """Row by row over exactly what it sees, in float64."""
    keys, values = (
        unpack(cache.contiguous()).transpose(1, 2).double()
        for unpack, cache in zip((step.layout.keys, step.layout.values), step.caches, strict=True)
    )
    group = step.query.shape[1] // step.key.shape[1]
    block_size = step.kv_cache.shape[2]
    out = torch.full(step.query.shape, UNTOUCHED, dtype=torch.float64)
    first = 0
    trees = step.trees
    for request, start in enumerate(trees.row_starts.tolist()):
        places = torch.arange(int(trees.context_lens[request]))
        blocks = trees.block_tables[request].long()[places // block_size]
        for row in range(int(trees.num_rows[request])):
            words = trees.ancestor_words[first + row].tolist()
            seen = [start + j for j in range(row + 1) if words[j // 64] >> j % 64 & 1]
            key = torch.cat([keys[blocks, places % block_size], step.key[seen].double()])
            value = torch.cat([values[blocks, places % block_size], step.value[seen].double()])
            query = step.query[start + row].double().unflatten(0, (-1, group))
            weights = (torch.einsum("kgd,skd->kgs", query, key) * step.scale).softmax(-1)
            out[start + row] = torch.einsum("kgs,skd->kgd", weights, value).flatten(0, 1)
        first += int(trees.num_rows[request])
    return out


def run(step: Step) -> Tensor:
    out = torch.full_like(step.query, UNTOUCHED)
    paged_tree_attention(
        step.query, step.key, step.value, *step.caches, step.trees, step.scale, out, step.layout
    )
    return out


def compiled(step: Step) -> Tensor:
    rows, caches = (step.query, step.key, step.value, step.query), step.caches
    assert paged_attention._can_compile(rows, caches)
    assert step.layout is CacheLayout.TRANSPOSED_KEYS
    return run(step)


def gathered(step: Step) -> Tensor:
    out = torch.full_like(step.query, UNTOUCHED)
    paged_attention._by_gathering(
        step.query, step.key, step.value, *step.caches, step.trees, step.scale, out, step.layout
    )
    return out


def check(path: Path, step: Step) -> None:
    """Rows of trees are what they should be, all others as they were."""
    torch.testing.assert_close(path(step).double(), dense(step), rtol=1e-5, atol=2e-6)


paths = pytest.mark.parametrize("path", [compiled, gathered])


@paths
@pytest.mark.parametrize("width", [32, 64, 128, 48])
@pytest.mark.parametrize(("kv_heads", "group"), [(3, 1), (3, 3), (1, 8)])
def test_rows_of_trees_are_a_dense_softmax_over_what_they_see(
    path: Path, kv_heads: int, group: int, width: int
) -> None:
    sizes = [(5, 33), (1, 7), (17, 200), (2, 0)]
    check(path, make_step(sizes, kv_heads=kv_heads, group=group, width=width, block_size=32))


@paths
@pytest.mark.parametrize("num_rows", [1, 2, 3, 6, 7, 63, 64, 65, 80, 130, 200])
def test_trees_of_one_row_and_of_more_than_a_word(path: Path, num_rows: int) -> None:
    check(path, make_step([(num_rows, 40), (3, 90)], kv_heads=1, group=3))


@paths
@pytest.mark.parametrize("context", [0, 1, 15, 16, 17, 127, 128, 129, 512, 1000, 2100])
def test_contexts_that_end_anywhere(path: Path, context: int) -> None:
    """Within a block, a tile or a part, or at its end."""
    check(path, make_step([(4, context)], kv_heads=2, group=1, block_size=32))


@paths
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_blocks_of_any_size(path: Path, block_size: int) -> None:
    check(path, make_step([(9, 300), (2, 31)], block_size=block_size))


@paths
@settings(max_examples=40)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 80), st.integers(0, 300)), min_size=1, max_size=4),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 3, 8]),
    width=st.sampled_from([16, 32, 64]),
    block_size=st.sampled_from([16, 32, 48]),
    seed=st.integers(0, 1000),
)
def test_any_step(
    path: Path,
    sizes: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    width: int,
    block_size: int,
    seed: int,
) -> None:
    check(
        path,
        make_step(
            sizes, kv_heads=kv_heads, group=group, width=width, block_size=block_size, seed=seed
        ),
    )


@paths
def test_scores_far_apart_neither_overflow_nor_vanish(path: Path) -> None:
    step = make_step([(6, 150), (3, 10)])
    step = replace(step, scale=30.0)
    # Scores of hundreds are rounded to 1e-5 already.
    torch.testing.assert_close(path(step).double(), dense(step), rtol=1e-3, atol=1e-4)


@paths
def test_a_request_without_rows_is_padding(path: Path) -> None:
    step = make_step([(3, 20), (4, 50)])
    trees = step.trees
    padded = replace(
        trees,
        row_starts=torch.cat(
            [trees.row_starts[:1], trees.row_starts.new_zeros(1), trees.row_starts[1:]]
        ),
        num_rows=torch.cat([trees.num_rows[:1], trees.num_rows.new_zeros(1), trees.num_rows[1:]]),
        context_lens=trees.context_lens[[0, 0, 1]] * torch.tensor([1, 0, 1], dtype=torch.int32),
        block_tables=trees.block_tables[[0, 0, 1]],
    )
    check(path, replace(step, trees=padded))


@paths
def test_a_step_without_trees_is_left_alone(path: Path) -> None:
    step = make_step([(2, 5)])
    none = {
        name: getattr(step.trees, name)[:0]
        for name in ("row_starts", "num_rows", "context_lens", "block_tables", "ancestor_words")
    }
    out = path(replace(step, trees=TreeRows(**none, max_rows=0, max_context_len=0)))
    assert (out == UNTOUCHED).all()


def alone(step: Step, request: int) -> Step:
    """The same step with the tree of one request."""
    trees, place = step.trees, slice(request, request + 1)
    first = int(trees.num_rows[:request].sum())
    words = trees.ancestor_words[first : first + int(trees.num_rows[request])]
    only = TreeRows(
        row_starts=trees.row_starts[place],
        num_rows=trees.num_rows[place],
        context_lens=trees.context_lens[place],
        block_tables=trees.block_tables[place],
        ancestor_words=words,
        max_rows=len(words),
        max_context_len=int(trees.context_lens[request]),
    )
    return replace(step, trees=only)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_neither_neighbours_nor_threads_change_a_bit(threads: int) -> None:
    step = make_step([(17, 700), (3, 40), (1, 1300), (30, 0)], kv_heads=2, group=3)
    want = compiled(step)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert torch.equal(compiled(step), want)
        for request, start in enumerate(step.trees.row_starts.tolist()):
            rows = slice(start, start + int(step.trees.num_rows[request]))
            assert torch.equal(compiled(alone(step, request))[rows], want[rows])
    finally:
        torch.set_num_threads(before)


def test_a_root_is_the_same_with_and_without_a_tree() -> None:
    """Bit for bit: hidden rows weigh nothing."""
    step = make_step([(40, 300)], kv_heads=3, group=3)
    root_only = replace(
        step.trees,
        num_rows=torch.ones_like(step.trees.num_rows),
        ancestor_words=step.trees.ancestor_words[:1],
    )
    start = int(step.trees.row_starts[0])
    assert torch.equal(compiled(replace(step, trees=root_only))[start], compiled(step)[start])


@pytest.mark.parametrize("layout", list(CacheLayout))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_layout_is_read(layout: CacheLayout, dtype: torch.dtype) -> None:
    step = make_step([(5, 70), (3, 0), (8, 32)], block_size=32, layout=layout, dtype=dtype)
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(run(step).double(), dense(step), rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize("change", ["half", "width", "block", "strided query", "strided cache"])
def test_what_the_kernel_cannot_do_is_left_to_torch(change: str) -> None:
    step = make_step(
        [(5, 30), (2, 7)],
        width=24 if change == "width" else 32,
        block_size=8 if change == "block" else 16,
    )
    rows, caches = (step.query, step.key, step.value, step.query), step.caches
    assert paged_attention._can_compile(rows, caches) == (change not in ("width", "block"))
    if change == "half":
        rows = tuple(t.half() for t in rows)
    elif change == "strided query":
        rows = (step.query.mT.contiguous().mT, *rows[1:])
    elif change == "strided cache":
        caches = (caches[0].mT.contiguous().mT, caches[1])
    assert not paged_attention._can_compile(rows, caches)
    if change in ("width", "block"):
        check(run, step)


def test_without_the_compiled_kernel_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "AVAILABLE", False)
    check(run, make_step([(5, 30), (2, 7)]))


@pytest.mark.parametrize("layout", list(CacheLayout))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("block_size", "heads", "width"), [(16, 1, 32), (32, 3, 64), (64, 2, 64)])
def test_a_layout_is_recognised_by_what_is_written(
    layout: CacheLayout, dtype: torch.dtype, block_size: int, heads: int, width: int
) -> None:
    """Where width and block size are the same, too."""
    assert detect_layout(write_to(layout), block_size, heads, width, dtype) is layout


def test_a_layout_that_needs_whole_rows_of_16_is_not_tried_on_others() -> None:
    assert not CacheLayout.PAIRS.fits(8, 32)
    write = write_to(CacheLayout.TRANSPOSED_KEYS)
    assert detect_layout(write, 8, 1, 40, torch.float32) is CacheLayout.TRANSPOSED_KEYS


@pytest.mark.parametrize("fault", ["scrambled", "heads swapped", "nothing written", "values"])
def test_an_unknown_layout_is_refused_by_name(fault: str) -> None:
    def write(key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
        if fault == "nothing written":
            return
        if fault == "heads swapped":
            key = key.flip(1)
        write_to(CacheLayout.TRANSPOSED_KEYS)(key, value, kv_cache, slots)
        half = kv_cache.view(3, 2, -1)[:, :, 32 * 16 :] if fault == "values" else kv_cache
        if fault in ("scrambled", "values"):
            half.copy_(half.flip(2))

    with pytest.raises(BackendError) as raised:
        detect_layout(write, 16, 2, 32, torch.float32)
    said = str(raised.value)
    assert "kv_cache" in said
    assert all(layout.value in said for layout in CacheLayout)
    assert "C = 16, D = 32, torch.float32" in said


def test_a_write_to_the_wrong_slots_is_no_layout() -> None:
    def write(key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
        write_to(CacheLayout.TOKENS)(key, value, kv_cache, slots.sort().values)

    with pytest.raises(BackendError):
        detect_layout(write, 16, 1, 16, torch.float32)
