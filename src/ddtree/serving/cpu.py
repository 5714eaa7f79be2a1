"""The CPU platform: its attention backend with trees, and the worker that puts all in its place.

vllm serve MODEL --worker-cls ddtree.serving.cpu.TreeCPUWorker --speculative-config ...
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker import cpu_worker, gpu_model_runner
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from ddtree.serving.compatibility import (
    check_config,
    check_layers,
    check_signatures,
    check_versions,
)
from ddtree.serving.paged_attention import (
    CacheLayout,
    detect_layout,
    paged_tree_attention,
    split_cache,
)
from ddtree.serving.plugin import without_request_check
from ddtree.serving.proposer import TreeProposer
from ddtree.serving.replacing import replaced
from ddtree.serving.runner import TreeModelRunner
from ddtree.serving.step import Moves
from ddtree.serving.tree_keys import TreeKeys


class TreeCPUAttentionImpl(CPUAttentionBackendImpl):
    """vLLM's CPU attention, and ours for the rows of trees."""

    tree_keys: TreeKeys | None = None
    layout: CacheLayout | None = None

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write keys and values to their slots; those of trees are kept until the walk."""
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        self.tree_keys = None
        if is_forward_context_available():
            metadata = get_forward_context().attn_metadata[layer.layer_name]
            if (index := getattr(metadata, "tree_row_index", None)) is not None:
                self.tree_keys = TreeKeys.of(key, value, slot_mapping, index)

    def find_layout(self, layer: Any) -> None:
        """Find out how this layer's cache lies in memory, before it holds anything."""
        write = partial(super().do_kv_cache_update, layer)
        _, kv_heads, block_size, both = layer.kv_cache.shape
        self.layout = detect_layout(write, block_size, kv_heads, both // 2, layer.kv_cache.dtype)

    def move_rows(self, layer: Any, moves: Moves) -> None:
        """Accepted rows' keys and values go to the slots behind their root."""
        assert self.tree_keys is not None, "the step that was walked had trees"
        key, value, slots = self.tree_keys.moved(moves)
        super().do_kv_cache_update(layer, key, value, layer.kv_cache, slots)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """As vLLM's; rows of trees see their context, their ancestors and themselves."""
        trees = getattr(attn_metadata, "trees", None)
        if trees is None or not attn_metadata.all_rows_are_trees:
            super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
        if trees is not None:
            assert self.layout is not None, "found out before the first step"
            caches = split_cache(kv_cache)
            paged_tree_attention(query, key, value, *caches, trees, self.scale, output, self.layout)
        return output


class TreeCPUAttentionBackend(CPUAttentionBackend):
    """CPU_ATTN with the implementation above; its name stays, so that vLLM treats it alike."""

    @staticmethod
    def get_impl_cls() -> type[TreeCPUAttentionImpl]:
        """See `AttentionBackend`."""
        return TreeCPUAttentionImpl


class TreeCPUModelRunner(TreeModelRunner, CPUModelRunner):
    """`TreeModelRunner` on a CPU."""


class TreeCPUWorker(CPUWorker):
    """The worker to name in `--worker-cls`."""

    def init_device(self) -> None:
        """Check what we build on, then let vLLM make its runner out of our parts."""
        check_versions()
        check_signatures()
        model = self.model_config
        model.logits_processors = without_request_check(model.logits_processors)
        check_config(self.vllm_config)
        register_backend(
            AttentionBackendEnum.CPU_ATTN,
            f"{TreeCPUAttentionBackend.__module__}.{TreeCPUAttentionBackend.__qualname__}",
        )
        with (
            replaced(cpu_worker, "CPUModelRunner", TreeCPUModelRunner),
            replaced(gpu_model_runner, "DFlashProposer", TreeProposer),
        ):
            super().init_device()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """As vLLM's; then the layers are known, and what they are must be what we can do."""
        super().load_model(*args, **kwargs)
        check_layers(self.model_runner.target_layers, device_type="cpu")

    def compile_or_warm_up_model(self) -> Any:
        """After vLLM's own warming up, look at the caches and measure what a step costs."""
        times = super().compile_or_warm_up_model()
        for layer in self.model_runner.target_layers.values():
            layer.impl.find_layout(layer)
        self.model_runner.prepare_share()
        return times

    def tree_store_size(self) -> int:
        """Requests that the plugin remembers; for tests."""
        return len(self.model_runner.tree_states)
