"""The parts for CUDA as far as a machine without one shows them: interpreted, between fakes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from ddtree.serving.paged_attention import CacheLayout, paged_tree_attention
from ddtree.serving.step import Moves, Step
from ddtree.types import DraftTree
from tests.support.triton import interpreting

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

HEADS, KV_HEADS, WIDTH, BLOCK_SIZE, NUM_BLOCKS = 4, 2, 32, 16, 9


@dataclass(frozen=True)
class Found:
    """What came out of a layer: rows of trees, all others, and where it says its keys are."""

    trees_right: bool
    others_are_vllms: bool
    knows_slots: bool


def vllm_cuda():
    """Our module, imported where nothing of it can run but what is asked here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        from ddtree.serving import cuda
    return cuda


def branching_step() -> Step:
    """A chain of 2 rows, a tree of 4, and one of 3 behind a chunk of 2 rows of a prompt."""

    def tree(*parents: int) -> DraftTree:
        depths = [0]
        for parent in parents[1:]:
            depths.append(depths[parent] + 1)
        rows = np.arange(len(parents))
        return DraftTree(
            rows.astype(np.int64),
            np.array(parents, np.int32),
            np.array(depths, np.int32),
            rows.astype(np.int32),
            np.zeros(len(parents), np.float32),
        )

    return Step(
        (tree(-1, 0), tree(-1, 0, 0, 1), tree(-1), tree(-1, 0, 0)),
        np.array([0, 2, 8, 9]),
        np.array([5, 40, 2, 17]),
        num_rows=12,
        decoding=(0, 1, 3),
    )


def cache_of(layout: str) -> Tensor:
    """[Z, KVH, C, 2 * D], in memory head by head or position by position."""
    if layout == "NHD":
        return torch.randn(NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, 2 * WIDTH).transpose(1, 2)
    return torch.randn(NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, 2 * WIDTH)


def attended(name: str, layout: str, all_rows_are_trees: bool) -> Found:
    cuda = vllm_cuda()
    implementation = getattr(cuda, name)
    vllms = implementation.__mro__[2]
    # What vLLM's kernel says cannot be had here; that it is asked first can.
    vllms.forward = lambda self, *args: args[6].fill_(3.0)
    impl = implementation.__new__(implementation)
    impl.head_size, impl.scale = WIDTH, WIDTH**-0.5
    torch.manual_seed(0)
    step = branching_step()
    tables = torch.randperm(NUM_BLOCKS)[:8].view(4, 2).repeat(1, 2).to(torch.int32)
    kv_cache = cache_of(layout)
    # The engine's tensors are as long as its CUDA graphs.
    query = torch.randn(16, HEADS, WIDTH)
    key, value = torch.randn(2, 16, KV_HEADS, WIDTH)
    metadata = SimpleNamespace(
        trees=step.tree_rows(tables, "cpu"),
        all_rows_are_trees=all_rows_are_trees,
        slot_mapping=torch.arange(12),
    )
    expected = torch.full_like(query, 3.0 if not all_rows_are_trees else 7.0)
    cache = kv_cache[..., :WIDTH], kv_cache[..., WIDTH:]
    trees, scale = metadata.trees, impl.scale
    paged_tree_attention(query, key, value, *cache, trees, scale, expected, CacheLayout.TOKENS)
    out = torch.full_like(query, 7.0)
    returned = impl.forward(None, query, key, value, kv_cache, metadata, out)
    assert returned is out
    rows = torch.zeros(16, dtype=torch.bool)
    rows[torch.from_numpy(step.branching_rows)] = True
    knows = impl.tree_slots is metadata.slot_mapping
    impl.forward(None, query, key, value, kv_cache, None, torch.empty_like(out))  # a dry run
    return Found(
        torch.allclose(out[rows], expected[rows], atol=1e-5),
        torch.equal(out[~rows], expected[~rows]),
        knows and impl.tree_slots is None,
    )


def moved(layout: str) -> bool:
    """Whether rows of two groups' layers went where they belong, and nothing else changed."""
    cuda = vllm_cuda()
    torch.manual_seed(0)
    slots = [torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:12] for _ in range(2)]
    caches = [cache_of(layout) for _ in range(4)]
    belongs_to = (0, 1, 1, None)  # the last one is the drafter's
    moves = Moves(np.array([4, 5, 11]), np.array([3, 4, 10]))
    expected = [cache.clone() for cache in caches]
    layers: dict[str, object] = {"experts": SimpleNamespace()}
    for i, (cache, group) in enumerate(zip(caches, belongs_to, strict=True)):
        group_slots = None if group is None else slots[group]
        impl = SimpleNamespace(tree_slots=group_slots)
        layers[str(i)] = SimpleNamespace(impl=impl, kv_cache=cache)
        if group_slots is None:
            continue
        for source, target in zip(moves.sources, moves.targets, strict=True):
            a, b = int(group_slots[source]), int(group_slots[target])
            rows = caches[i][a // BLOCK_SIZE, :, a % BLOCK_SIZE]
            expected[i][b // BLOCK_SIZE, :, b % BLOCK_SIZE] = rows
    runner = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        _on_device=torch.from_numpy,
    )
    cuda.TreeGPUModelRunner._move(runner, moves)
    return all(torch.equal(a, b) for a, b in zip(caches, expected, strict=True))


def cudagraph_modes() -> dict[str, str]:
    """What vLLM makes of its modes with our backends."""
    cuda = vllm_cuda()
    from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode

    found = {}
    for name, backend in cuda.BACKENDS.items():
        support = backend.get_builder_cls().get_cudagraph_support(None, None)
        for mode in ("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "PIECEWISE", "NONE"):
            config = CompilationConfig(
                mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=CUDAGraphMode[mode]
            )
            config.set_splitting_ops_for_v1(all2all_backend="")
            resolved = config.resolve_cudagraph_mode_and_sizes(support, backend.__name__, 17)
            found[f"{name.name} {mode}"] = resolved.name
    return found


def compiled() -> list[tuple[tuple[int, ...], int]]:
    """For which shapes of queries a worker compiles kernels, and for how many rows."""
    cuda = vllm_cuda()
    impl = cuda.TreeTritonAttentionImpl.__new__(cuda.TreeTritonAttentionImpl)
    impl.head_size = WIDTH
    layer = SimpleNamespace(
        impl=impl, num_heads=HEADS, num_kv_heads=KV_HEADS, kv_cache=cache_of("HND")
    )
    layers = {"experts": SimpleNamespace(), "attention": layer}
    worker = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.float32),
        device=torch.device("cpu"),
        model_runner=SimpleNamespace(
            num_spec_tokens=4, compilation_config=SimpleNamespace(static_forward_context=layers)
        ),
    )
    asked = []
    kernels = cuda.warm_up

    def warm_up(query: Tensor, *others: Tensor, max_rows: int) -> None:
        kernels(query, *others, max_rows=max_rows)
        asked.append((tuple(query.shape), max_rows))

    cuda.warm_up = warm_up
    cuda.TreeGPUWorker._compile_kernels(worker)
    return asked


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    with interpreting() as pool:
        yield pool


@pytest.mark.parametrize("name", ["TreeFlashAttentionImpl", "TreeTritonAttentionImpl"])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("all_rows_are_trees", [False, True])
def test_rows_of_trees_are_ours_and_all_others_are_vllms(
    interpreter: ProcessPoolExecutor, name: str, layout: str, all_rows_are_trees: bool
) -> None:
    found = interpreter.submit(attended, name, layout, all_rows_are_trees).result()
    assert found == Found(True, True, True)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_accepted_keys_move_in_every_layer_that_had_trees(
    interpreter: ProcessPoolExecutor, layout: str
) -> None:
    assert interpreter.submit(moved, layout).result()


def test_attention_stays_outside_of_cuda_graphs(interpreter: ProcessPoolExecutor) -> None:
    resolved = interpreter.submit(cudagraph_modes).result()
    for key, mode in resolved.items():
        assert mode == ("NONE" if key.endswith("NONE") else "PIECEWISE"), key


def test_kernels_are_compiled_before_they_are_needed(interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(compiled).result() == [((1, HEADS, WIDTH), 5)]
