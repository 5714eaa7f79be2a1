"""The Triton kernel, interpreted, against a dense softmax in float64; and compiled for GPUs."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from ddtree.errors import BackendError
from ddtree.serving.paged_attention import CacheLayout, paged_tree_attention
from ddtree.serving.step import ancestor_words
from ddtree.serving.tree_rows import TreeRows
from ddtree.serving.triton_attention import (
    Bounds,
    Tiling,
    choose_tiling,
    paged_tree_attention_triton,
    require_triton,
    warm_up,
)
from tests.support.triton import interpreting, process

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
SMALL = Tiling(rows=16, keys=16, splits=1, num_warps=4, num_stages=2)
# Error over the largest number that can come out, which is about 4.
TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is attended to; `num_rows` and `context_lens` of each request."""

    num_rows: Sequence[int] = (5, 3, 17)
    context_lens: Sequence[int] = (0, 33, 100)
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    layout: str = "head-major"
    tiling: Tiling | None = SMALL
    max_rows: int = 0
    max_context_len: int = 0


@dataclass(frozen=True)
class Found:
    """What came out.

    Args:
        error: the largest one in rows of trees.
        from_twin: how far they are from what `paged_tree_attention` says.
        others_untouched: whether all other rows were left alone.
    """

    error: float
    from_twin: float
    others_untouched: bool


# In the interpreter's process ---------------------------------------------------------------------


def attended(case: Case) -> Found:
    """Draw inputs, run the kernel, and compare. What must not be read is NaN."""
    torch.manual_seed(0)
    num_requests, width = len(case.num_rows), case.head_dim
    starts = [2 + i + sum(case.num_rows[:i]) for i in range(num_requests)]  # gaps between trees
    total = starts[-1] + case.num_rows[-1] + 3
    # As engines lay a layer's projections out: side by side.
    heads = case.num_heads, case.num_kv_heads, case.num_kv_heads
    joint = torch.full((total, sum(heads), width), torch.nan, dtype=case.dtype)
    tables, key_cache, value_cache = empty_cache(case)
    expected = torch.full((total, case.num_heads, width), 7.0, dtype=torch.float64)
    words = []
    for i, (count, length) in enumerate(zip(case.num_rows, case.context_lens, strict=True)):
        rows = slice(starts[i], starts[i] + count)
        joint[rows] = torch.randn(count, sum(heads), width)
        query, key, value = joint[rows].split(heads, dim=1)
        context = torch.randn(2, length, case.num_kv_heads, width).to(key_cache.dtype)
        for cache, numbers in zip((key_cache, value_cache), context, strict=True):
            positions = torch.arange(length)
            blocks = tables[i, positions // case.block_size].long()
            cache[blocks, positions % case.block_size] = numbers
        mask = random_mask(count)
        words.append(ancestor_words(mask, -(-max(1, *case.num_rows) // 64)))
        if count:
            own = torch.stack([key, value]).to(key_cache.dtype)
            keys, values = torch.cat([context, own], dim=1)
            expected[rows] = dense(query, keys, values, torch.from_numpy(mask))
    out = torch.full((total, case.num_heads, width), 7.0, dtype=case.dtype)
    trees = TreeRows(
        row_starts=torch.tensor(starts, dtype=torch.int32),
        num_rows=torch.tensor(case.num_rows, dtype=torch.int32),
        context_lens=torch.tensor(case.context_lens, dtype=torch.int32),
        block_tables=tables,
        ancestor_words=torch.from_numpy(np.concatenate(words)),
        max_rows=max(case.max_rows, *case.num_rows),
        max_context_len=max(case.max_context_len, *case.context_lens),
    )
    query, key, value = joint.split(heads, dim=1)
    inputs = (query, key, value, key_cache, value_cache, trees, width**-0.5)
    paged_tree_attention_triton(*inputs, out, case.tiling)
    twin = out
    if not case.max_context_len:  # it takes bounds at their word
        twin = torch.full_like(out, 7.0)
        by_head = (cache.transpose(1, 2) for cache in (key_cache, value_cache))
        scale = width**-0.5
        paged_tree_attention(query, key, value, *by_head, trees, scale, twin, CacheLayout.TOKENS)
    of_trees = torch.zeros(total, dtype=torch.bool)
    for start, count in zip(starts, case.num_rows, strict=True):
        of_trees[start : start + count] = True

    def farthest(other: Tensor) -> float:
        off = (out.double() - other.double())[of_trees].abs().nan_to_num(nan=torch.inf)
        return float(off.max()) if off.numel() else 0.0

    return Found(
        farthest(expected),
        farthest(twin),
        torch.equal(out[~of_trees].double(), expected[~of_trees]),
    )


def empty_cache(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Block tables in no order, and keys and values of NaN in one of the layouts of engines."""
    num_requests, size, width = len(case.num_rows), case.block_size, case.head_dim
    dtype = case.cache_dtype or case.dtype
    most_blocks = max(1, *(-(-length // size) for length in case.context_lens))
    num_blocks = num_requests * most_blocks + 3
    tables = torch.randperm(num_blocks)[: num_requests * most_blocks].view(num_requests, -1)
    if case.layout == "head-major":  # keys beside values, as vLLM's
        shape = (num_blocks, case.num_kv_heads, size, 2 * width)
        both = torch.full(shape, torch.nan, dtype=dtype).transpose(1, 2)
        keys, values = both.split(width, dim=-1)
    else:
        shape = (2, num_blocks, size, case.num_kv_heads, width)
        keys, values = torch.full(shape, torch.nan, dtype=dtype).unbind()
        if case.layout == "one apart":
            values = torch.full_like(values.transpose(1, 2), torch.nan).contiguous().transpose(1, 2)
    return tables.to(torch.int32), keys, values


def random_mask(num_rows: int) -> np.ndarray:
    """Who sees whom in a random tree; often deep enough to matter."""
    mask = np.eye(num_rows, dtype=np.bool_)
    for row in range(1, num_rows):
        mask[row] |= mask[int(torch.randint(max(0, row - 4), row, ()))]
    return mask


def dense(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """[N, H, D]: over the context and, as far as the mask lets them see, the rows themselves."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (t.double().repeat_interleave(group, dim=1) for t in (keys, values))
    scores = torch.einsum("nhd,thd->hnt", query.double(), keys) * query.shape[2] ** -0.5
    num_rows = len(mask)
    scores[:, :, len(keys) - num_rows :].masked_fill_(~mask, -torch.inf)
    return torch.einsum("hnt,thd->nhd", scores.softmax(-1), values)


def warmed_up() -> tuple[int, bool]:
    """How often kernels were launched, and whether all tensors are as they were."""
    from ddtree.serving import triton_kernels

    launched = []

    class Counted:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            launched.append(grid)
            return self.kernel[grid]

    attend, merge = triton_kernels.attend, triton_kernels.merge
    triton_kernels.attend, triton_kernels.merge = Counted(attend), Counted(merge)
    query, key, value = (torch.randn(3, heads, 64).half() for heads in (4, 2, 2))
    tensors = [query, key, value, *torch.randn(2, 2, 16, 2, 64).half()]
    before = [tensor.clone() for tensor in tensors]
    warm_up(*tensors, max_rows=65)
    triton_kernels.attend, triton_kernels.merge = attend, merge
    return len(launched), all(map(torch.equal, tensors, before))


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    with interpreting() as pool:
        yield pool


def assert_right(interpreter: ProcessPoolExecutor, case: Case) -> None:
    found = interpreter.submit(attended, case).result()
    assert found.error <= 4 * TOLERANCES[case.dtype]
    if case.cache_dtype is None:  # the CPU's reads the step's own keys as they are
        assert found.from_twin <= 4 * TOLERANCES[case.dtype]
    assert found.others_untouched


@needs_triton
@pytest.mark.parametrize(
    ("layout", "head_dim"),
    [
        ("head-major", 64),
        ("head-major", 80),
        ("head-major", 128),
        ("token-major", 80),
        ("one apart", 80),
    ],
)
def test_rows_see_their_context_their_ancestors_and_themselves(
    interpreter: ProcessPoolExecutor, layout: str, head_dim: int
) -> None:
    assert_right(interpreter, Case(layout=layout, head_dim=head_dim))


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_every_dtype_to_its_rounding(interpreter: ProcessPoolExecutor, dtype: torch.dtype) -> None:
    assert_right(interpreter, Case(dtype=dtype, head_dim=32))


@needs_triton
def test_keys_are_as_exact_as_the_cache_holds_them(interpreter: ProcessPoolExecutor) -> None:
    assert_right(interpreter, Case(dtype=torch.float32, cache_dtype=torch.float16))


@needs_triton
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 4), (6, 2), (7, 1), (8, 1)])
def test_heads_share_keys_and_values(
    interpreter: ProcessPoolExecutor, num_heads: int, num_kv_heads: int
) -> None:
    assert_right(interpreter, Case(num_heads=num_heads, num_kv_heads=num_kv_heads))


@needs_triton
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 31, 32, 64, 65])
def test_the_context_may_end_anywhere_in_a_block(
    interpreter: ProcessPoolExecutor, length: int
) -> None:
    assert_right(interpreter, Case(num_rows=(4,), context_lens=(length,)))


@needs_triton
@pytest.mark.parametrize("block_size", [1, 16, 48, 128])
def test_blocks_may_be_smaller_or_larger_than_a_step(
    interpreter: ProcessPoolExecutor, block_size: int
) -> None:
    assert_right(interpreter, Case(block_size=block_size))


@needs_triton
@pytest.mark.parametrize("keys", [16, 32, 64])
def test_trees_of_more_rows_than_a_word_has_bits(
    interpreter: ProcessPoolExecutor, keys: int
) -> None:
    case = Case(num_rows=(80, 1, 64, 65), context_lens=(40, 3, 0, 17))
    assert_right(interpreter, replace(case, tiling=replace(SMALL, rows=64, keys=keys)))


@needs_triton
@pytest.mark.parametrize("splits", [2, 8])
def test_a_split_context_gives_the_same(interpreter: ProcessPoolExecutor, splits: int) -> None:
    # Some shares are empty: of short contexts, and of none.
    case = Case(num_rows=(5, 20, 1), context_lens=(0, 33, 250), head_dim=24)
    assert_right(interpreter, replace(case, tiling=replace(SMALL, splits=splits)))
    halves = replace(case, dtype=torch.bfloat16, tiling=replace(SMALL, splits=splits))
    assert_right(interpreter, halves)


@needs_triton
@pytest.mark.parametrize("splits", [1, 4])
def test_requests_of_no_rows_and_bounds_that_are_not_met_are_padding(
    interpreter: ProcessPoolExecutor, splits: int
) -> None:
    case = Case(
        num_rows=(0, 5, 0, 0, 3),
        context_lens=(0, 20, 7, 0, 40),
        max_rows=50,
        max_context_len=4000,
        tiling=replace(SMALL, splits=splits),
    )
    assert_right(interpreter, case)


@needs_triton
def test_more_requests_than_are_counted_at_once(interpreter: ProcessPoolExecutor) -> None:
    many = Case(num_rows=(1, 2) * 66, context_lens=(0,) * 132, num_heads=1, num_kv_heads=1)
    assert_right(interpreter, many)


@needs_triton
def test_the_tiling_it_chooses_itself(interpreter: ProcessPoolExecutor) -> None:
    assert_right(interpreter, Case(num_rows=(65,), context_lens=(70,), tiling=None, head_dim=64))


@needs_triton
def test_no_trees_no_launch(interpreter: ProcessPoolExecutor) -> None:
    assert_right(interpreter, Case(num_rows=(0, 0), context_lens=(4, 4)))


@needs_triton
def test_warming_up_launches_every_kernel_and_changes_nothing(
    interpreter: ProcessPoolExecutor,
) -> None:
    # Tiles of 16, 32 and 64 rows, whole and split, and what merges the splits.
    assert interpreter.submit(warmed_up).result() == (3 * (2 + 1), True)


# In the compiler's process ------------------------------------------------------------------------

ELEMENTS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
UNSEEN = ("scale", "num_splits", "num_words", "padded_rows", "table_row")
# Shared memory that a program may have on the smallest GPUs since Ampere (capability 8.6).
SHARED_BYTES = 99 * 1024


@dataclass(frozen=True)
class Compiled:
    """What a kernel needs of a multiprocessor."""

    shared_bytes: int
    stack_bytes: int


def compiled(name: str, dtype: torch.dtype, head_dim: int, capability: int) -> Compiled:
    """Compile a kernel as a launch would for G = 4, N = 65 and the tiling chosen for that."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ddtree.serving import triton_kernels

    kernel = getattr(triton_kernels, name)
    tiling = choose_tiling(Bounds(1, 32, 8, head_dim, dtype.itemsize, 65, 8000), 100)
    constants = {
        "GROUP": 4,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": 1 << (head_dim - 1).bit_length(),
        "BLOCK_SIZE": 16,
        "BLOCK_ROWS": tiling.rows if name == "attend" else 16,
        "BLOCK_KEYS": tiling.keys,
        "IS_SPLIT": tiling.splits > 1,
    }
    pointers = dict.fromkeys(("query", "key", "value", "out"), f"*{ELEMENTS[dtype]}")
    pointers |= dict.fromkeys(("key_cache", "value_cache"), f"*{ELEMENTS[dtype]}")
    pointers |= dict.fromkeys(("parts", "part_logs"), "*fp32")
    pointers |= dict.fromkeys(("row_starts", "num_rows", "context_lens", "block_tables"), "*i32")
    pointers |= {"ancestor_words": "*i64", "scale": "fp32"}
    signature, attributes = {}, {}
    for place, argument in enumerate(kernel.arg_names):
        signature[argument] = (
            "constexpr" if argument in constants else pointers.get(argument, "i32")
        )
        # As Triton finds pointers and strides to be; these few it is told not to look at.
        told = argument in (
            *constants,
            "scale",
            "num_splits",
            "num_words",
            "padded_rows",
            "table_row",
        )
        if not told:
            attributes[(place,)] = [["tt.divisibility", 16]]
    used = {key: value for key, value in constants.items() if key in kernel.arg_names}
    made = triton.compile(
        ASTSource(kernel, signature, used, attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": tiling.num_warps, "num_stages": tiling.num_stages},
    )
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return Compiled(made.metadata.shared, int(re.search(r"STACK:(\d+)", usage)[1]))


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    # A folder of its own, or what another run has compiled would be found.
    with process({"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}) as pool:
        yield pool


@needs_triton
@pytest.mark.parametrize(
    ("dtype", "head_dim", "capability"),
    [
        (torch.bfloat16, 64, 80),
        (torch.bfloat16, 80, 90),
        (torch.bfloat16, 128, 80),
        (torch.bfloat16, 128, 90),
        (torch.float16, 128, 90),
        (torch.bfloat16, 256, 80),
        (torch.float32, 128, 90),
    ],
)
def test_it_compiles_for_gpus_without_spilling(
    compiler: ProcessPoolExecutor, dtype: torch.dtype, head_dim: int, capability: int
) -> None:
    found = compiler.submit(compiled, "attend", dtype, head_dim, capability).result()
    assert found.shared_bytes <= SHARED_BYTES
    assert found.stack_bytes <= 16  # registers that are spilled take hundreds


@needs_triton
def test_merging_compiles_too(compiler: ProcessPoolExecutor) -> None:
    found = compiler.submit(compiled, "merge", torch.bfloat16, 128, 90).result()
    assert found.shared_bytes <= SHARED_BYTES
    assert found.stack_bytes <= 16


# On the host --------------------------------------------------------------------------------------

QWEN3_4B = Bounds(1, 32, 8, 128, 2, max_rows=65, max_context_len=8000)


def test_few_requests_of_long_contexts_are_split_and_many_are_not() -> None:
    def splits(num_requests: int, length: int) -> int:
        bounds = replace(QWEN3_4B, num_requests=num_requests, max_context_len=length)
        return choose_tiling(bounds, 132).splits

    assert splits(1, 8000) > 1
    assert splits(64, 8000) == 1
    assert splits(1, 100) == splits(1, 0) == 1
    assert [splits(1, 2**i) for i in range(16)] == sorted(splits(1, 2**i) for i in range(16))
    assert all(splits(n, 30000).bit_count() == 1 for n in range(1, 70))


@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("head_dim", [16, 80, 128, 256, 512])
def test_every_shape_has_a_tiling_of_no_more_rows_than_it_fills(
    head_dim: int, element_bytes: int
) -> None:
    for num_kv_heads in (1, 8, 32):
        for max_rows in (1, 2, 4, 5, 16, 17, 65, 257):
            bounds = Bounds(3, 32, num_kv_heads, head_dim, element_bytes, max_rows, 4000)
            tiling = choose_tiling(bounds, 132)
            assert tiling.rows < max(32, 2 * bounds.grouped_rows)


def test_without_triton_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddtree.serving.triton_attention.find_spec", lambda name: None)
    with pytest.raises(BackendError, match="pip install triton"):
        require_triton()
