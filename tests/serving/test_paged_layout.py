"""Our reading of the cache against vLLM's own operations: what it writes, and what it attends."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from ddtree.serving import paged_attention
from ddtree.serving.paged_attention import CacheLayout, detect_layout, split_cache
from ddtree.serving.tree_rows import TreeRows

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # theirs
    ops = pytest.importorskip("vllm._custom_ops")
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    if not current_platform.is_cpu():
        pytest.skip("not vLLM's CPU build", allow_module_level=True)
    current_platform.import_kernels()

if platform.machine() not in ("x86_64", "AMD64"):
    pytest.skip("layouts of other processors are not known", allow_module_level=True)

HEADS, KV_HEADS, WIDTH, BLOCK_SIZE, NUM_BLOCKS = 6, 2, 64, 32, 12


def write_as(isa: str) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    """vLLM's own write, as its CPU backend calls it."""

    def write(key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
        ops.cpu_attn_reshape_and_cache(key, value, *split_cache(kv_cache), slots, isa)

    return write


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("isa", ["vec", "vec16"])
@pytest.mark.parametrize("block_size", [32, 128])
def test_vectors_want_keys_transposed(isa: str, dtype: torch.dtype, block_size: int) -> None:
    layout = detect_layout(write_as(isa), block_size, KV_HEADS, WIDTH, dtype)
    assert layout is CacheLayout.TRANSPOSED_KEYS


def test_small_blocks_and_odd_heads_are_no_different() -> None:
    for block_size, width in ((16, 64), (32, 80)):
        layout = detect_layout(write_as("vec16"), block_size, KV_HEADS, width, torch.float32)
        assert layout is CacheLayout.TRANSPOSED_KEYS


@pytest.mark.parametrize(("block_size", "width"), [(32, 64), (64, 32), (128, 128)])
def test_tiles_want_pairs(block_size: int, width: int) -> None:
    """The write is plain code, and runs where the processor has no tiles."""
    layout = detect_layout(write_as("amx"), block_size, 3, width, torch.bfloat16)
    assert layout is CacheLayout.PAIRS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_the_backend_chooses_here_is_known(dtype: torch.dtype) -> None:
    isa = _get_attn_isa(dtype, BLOCK_SIZE, WIDTH)
    assert detect_layout(write_as(isa), BLOCK_SIZE, KV_HEADS, WIDTH, dtype) in CacheLayout


class Request:
    """One request with a context in a cache that vLLM wrote, and a tree behind it."""

    def __init__(self, context: int, parents: Sequence[int], dtype: torch.dtype) -> None:
        numbers = torch.Generator().manual_seed(context)
        self.context, self.parents, self.dtype = context, parents, dtype
        self.isa = _get_attn_isa(dtype, BLOCK_SIZE, WIDTH)
        self.kv_cache = torch.zeros(NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, 2 * WIDTH, dtype=dtype)
        self.table = torch.randperm(NUM_BLOCKS, generator=numbers).to(torch.int32)[None]
        rows = context + len(parents)
        key, value = torch.randn(2, rows, KV_HEADS, WIDTH, generator=numbers).to(dtype)
        self.write(key[:context], value[:context], 0)
        self.key, self.value = key[context:], value[context:]
        self.query = torch.randn(len(parents), HEADS, WIDTH, generator=numbers).to(dtype)

    def write(self, key: Tensor, value: Tensor, start: int) -> None:
        """To consecutive positions."""
        places = torch.arange(start, start + len(key))
        slots = self.table[0].long()[places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
        write_as(self.isa)(key, value, self.kv_cache, slots)

    def path_to(self, row: int) -> list[int]:
        path = []
        while row >= 0:
            path.append(row)
            row = self.parents[row]
        return path[::-1]

    def of_vllm(self, rows: list[int]) -> Tensor:
        """vLLM's attention of these rows as a chain behind the context."""
        self.write(self.key[rows], self.value[rows], self.context)
        starts = torch.tensor([0, len(rows)], dtype=torch.int32)
        length = torch.tensor([self.context + len(rows)], dtype=torch.int32)
        schedule = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=1,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=WIDTH,
            seq_lens=length,
            dtype=self.dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=self.isa,
            enable_kv_split=True,
        )
        query, (keys, values) = self.query[rows], split_cache(self.kv_cache)
        out = torch.empty_like(query)
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=keys,
            value_cache=values,
            output=out,
            query_start_loc=starts,
            seq_lens=length,
            scale=WIDTH**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=self.table,
            softcap=0,
            scheduler_metadata=schedule,
            s_aux=None,
        )
        return out

    def of_trees(self) -> Tensor:
        """Our attention of all rows at once."""
        words = torch.tensor(
            [[sum(1 << j for j in self.path_to(r))] for r in range(len(self.parents))]
        )
        trees = TreeRows(
            row_starts=torch.zeros(1, dtype=torch.int32),
            num_rows=torch.tensor([len(self.parents)], dtype=torch.int32),
            context_lens=torch.tensor([self.context], dtype=torch.int32),
            block_tables=self.table,
            ancestor_words=words,
            max_rows=len(self.parents),
            max_context_len=self.context,
        )
        layout = detect_layout(write_as(self.isa), BLOCK_SIZE, KV_HEADS, WIDTH, self.dtype)
        out = torch.empty_like(self.query)
        keys, values = split_cache(self.kv_cache)
        paged_attention.paged_tree_attention(
            self.query, self.key, self.value, keys, values, trees, WIDTH**-0.5, out, layout
        )
        return out


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("context", [0, 5, 32, 300])
def test_a_chain_of_rows_gets_what_vllm_gives_it(
    context: int, dtype: torch.dtype, tolerance: float
) -> None:
    request = Request(context, range(-1, 16), dtype)
    want = request.of_vllm(list(range(17)))
    torch.testing.assert_close(request.of_trees(), want, rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize("context", [0, 40, 300])
def test_every_path_of_a_tree_gets_what_vllm_gives_to_it_alone(context: int) -> None:
    parents = [-1, 0, 0, 1, 2, 1, 3, 4, 0, 8, 6]
    request = Request(context, parents, torch.float32)
    got = request.of_trees()
    for row in range(len(parents)):
        path = request.path_to(row)
        torch.testing.assert_close(got[path], request.of_vllm(path), rtol=1e-5, atol=2e-6)
