"""Attention alone, of a tree's rows and of as many causal rows, on an engine's own caches.

Runs within a worker of vLLM (`collective_rpc`) that has nothing else to do. One call is all layers
of the target, one after another, so that keys and values come from memory as they do in a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from builders import random_marginals

from ddtree.serving.step import Step
from ddtree.tree.host import build_tree

DEPTHS = 7


@torch.inference_mode()
def attention_ms(
    worker: Any, *, contexts: Sequence[int], rows: Sequence[int], repeats: int
) -> dict[str, Any]:
    """Milliseconds of both, taken in turns: {"cases": [{"context", "rows", "causal", "tree"}]}.

    Args:
        worker: a `TreeCPUWorker`. What is in its caches is overwritten.
        contexts: tokens in the cache.
        rows: of the forward, the tree's root included.
        repeats: of every case; "causal" and "tree" are as many numbers.
    """
    runner = worker.model_runner
    layers = [
        layer
        for name, layer in runner.compilation_config.static_forward_context.items()
        if name not in runner.drafter._draft_attn_layer_names
    ]
    for layer in layers:
        layer.kv_cache.normal_()
    cases = []
    for context in contexts:
        for count in rows:
            blocks = block_table(layers[0], context + count)
            calls = {
                "causal": attention_call(layers, causal(layers[0], context, count, blocks), count),
                "tree": attention_call(layers, tree(context, count, blocks), count),
            }
            cases.append({"context": context, "rows": count, **in_turns(calls, repeats)})
    return {"layers": len(layers), "cases": cases}


def in_turns(calls: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of every call, after one that is not timed."""
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            if repeat:
                spent[name].append(1e3 * (time.perf_counter() - began))
    return spent


def attention_call(layers: Sequence[Any], metadata: Any, num_rows: int) -> Callable[[], None]:
    """All layers' attention over the caches, given what a step's metadata says of its rows."""
    impl = layers[0].impl
    heads = (impl.num_heads, impl.num_kv_heads, impl.num_kv_heads, impl.num_heads)
    query, key, value, output = (torch.randn(num_rows, n, impl.head_size) for n in heads)

    def call() -> None:
        for layer in layers:
            layer.impl.forward(layer, query, key, value, layer.kv_cache, metadata, output)

    return call


def causal(layer: Any, context: int, num_rows: int, blocks: torch.Tensor) -> Any:
    """Rows that follow one another: vLLM's own kernel."""
    import vllm._custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

    starts = torch.tensor([0, num_rows], dtype=torch.int32)
    lengths = torch.tensor([context + num_rows], dtype=torch.int32)
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=1,
        num_heads=layer.impl.num_heads,
        num_kv_heads=layer.impl.num_kv_heads,
        head_dim=layer.impl.head_size,
        seq_lens=lengths,
        dtype=torch.float32,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=layer.isa,
        enable_kv_split=True,
    )
    return CPUAttentionMetadata(
        num_actual_tokens=num_rows,
        max_query_len=num_rows,
        query_start_loc=starts,
        max_seq_len=context + num_rows,
        seq_lens=lengths,
        block_table=blocks,
        slot_mapping=torch.empty(0, dtype=torch.int64),
        scheduler_metadata=schedule,
    )


def tree(context: int, num_rows: int, blocks: torch.Tensor) -> Any:
    """Rows of one tree: our kernel, and no row of vLLM's."""
    drawn = build_tree(random_marginals(DEPTHS, num_rows - 1), 0, num_rows - 1)
    step = Step((drawn,), np.array([0]), np.array([context]), num_rows=num_rows, decoding=(0,))
    return SimpleNamespace(trees=step.tree_rows(blocks, "cpu"), all_rows_are_trees=True)


def block_table(layer: Any, num_tokens: int) -> torch.Tensor:
    """Blocks for so many tokens of one request, in an order as after some use."""
    num_blocks, _, block_size, _ = layer.kv_cache.shape
    # Block 0 is what vLLM points to where there is none.
    order = torch.randperm(num_blocks - 1)[: -(-num_tokens // block_size)] + 1
    return order[None].to(torch.int32)
