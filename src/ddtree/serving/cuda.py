"""The CUDA platform: its attention backends with trees, and the worker that puts all in its place.

vllm serve MODEL --worker-cls ddtree.serving.cuda.TreeGPUWorker --speculative-config ...

vLLM's backends run the step as always; rows of trees are then written again by our kernel, which
reads the paged cache as both backends lay it out: [Z, KVH, C, 2 * D], keys beside values, in
memory head by head or position by position. The kernel is launched from Python, layer by layer and
with trees that differ from step to step, so attention stays outside of CUDA graphs: our metadata
builders say that they support none, and vLLM keeps to piecewise ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu_worker import Worker

from ddtree.serving.compatibility import (
    check_config,
    check_layers,
    check_signatures,
    check_versions,
)
from ddtree.serving.device_steps import SettledMoves, settle_moves
from ddtree.serving.plugin import without_request_check
from ddtree.serving.proposer import TreeProposer
from ddtree.serving.replacing import replaced
from ddtree.serving.runner import TreeModelRunner
from ddtree.serving.step import Moves
from ddtree.serving.triton_attention import (
    paged_tree_attention_triton,
    require_triton,
    warm_up,
)


class TreeRowsAttention:
    """Before one of vLLM's implementations: the same, and ours for the rows of trees.

    Nothing is kept of keys and values: where the step's rows are in the cache is enough to move
    them later. That is noted in `forward`, which always runs; the update of the cache may be part
    of a captured graph.
    """

    head_size: int
    scale: float
    tree_slots: Tensor | None = None  # of every row of the step, where it has trees

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
        self.tree_slots = None if trees is None else attn_metadata.slot_mapping
        if trees is None or not attn_metadata.all_rows_are_trees:
            super().forward(  # type: ignore[misc]
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
            caches = self.caches(kv_cache)
            paged_tree_attention_triton(query, key, value, *caches, trees, self.scale, output)
        return output

    def caches(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the paged cache, [Z, C, KVH, D]."""
        both = kv_cache.transpose(1, 2)
        return both[..., : self.head_size], both[..., self.head_size :]

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """No: our rows are not quantised."""
        return False

    def fused_rope_kvcache_supported(self) -> bool:
        """No: our kernel reads the step's keys as they go to the cache."""
        return False


class TreeFlashAttentionImpl(TreeRowsAttention, FlashAttentionImpl):
    """FLASH_ATTN with trees."""


class TreeTritonAttentionImpl(TreeRowsAttention, TritonAttentionImpl):
    """TRITON_ATTN with trees."""


class TreeFlashAttentionMetadataBuilder(FlashAttentionMetadataBuilder):
    """As vLLM's, but not for whole graphs."""

    _cudagraph_support = AttentionCGSupport.NEVER


class TreeTritonAttentionMetadataBuilder(TritonAttentionMetadataBuilder):
    """As vLLM's, but not for whole graphs."""

    _cudagraph_support = AttentionCGSupport.NEVER


class TreeFlashAttentionBackend(FlashAttentionBackend):
    """FLASH_ATTN with the parts above; its name stays, so that vLLM treats it alike."""

    @staticmethod
    def get_impl_cls() -> type[TreeFlashAttentionImpl]:
        """See `AttentionBackend`."""
        return TreeFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeFlashAttentionMetadataBuilder]:
        """See `AttentionBackend`."""
        return TreeFlashAttentionMetadataBuilder


class TreeTritonAttentionBackend(TritonAttentionBackend):
    """TRITON_ATTN with the parts above; its name stays, so that vLLM treats it alike."""

    @staticmethod
    def get_impl_cls() -> type[TreeTritonAttentionImpl]:
        """See `AttentionBackend`."""
        return TreeTritonAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeTritonAttentionMetadataBuilder]:
        """See `AttentionBackend`."""
        return TreeTritonAttentionMetadataBuilder


BACKENDS = {
    AttentionBackendEnum.FLASH_ATTN: TreeFlashAttentionBackend,
    AttentionBackendEnum.TRITON_ATTN: TreeTritonAttentionBackend,
}


class TreeGPUModelRunner(TreeModelRunner):
    """`TreeModelRunner` on a GPU."""

    def _move(self, moves: Moves) -> None:
        """Accepted keys and values go where plain decoding would have put them."""
        sources, targets = self._on_device(moves.sources), self._on_device(moves.targets)
        valid = torch.ones_like(sources, dtype=torch.bool)
        # Layers of one group share their slots.
        settled: dict[int, SettledMoves] = {}
        for layer in self.compilation_config.static_forward_context.values():
            # The drafter's layers, and those that are not attention, have none.
            slots = getattr(getattr(layer, "impl", None), "tree_slots", None)
            if slots is None:
                continue
            cache = layer.kv_cache.transpose(1, 2)
            if slots.data_ptr() not in settled:
                num_blocks, block_size = cache.shape[:2]
                settled[slots.data_ptr()] = settle_moves(
                    slots[sources],
                    slots[targets],
                    valid,
                    num_blocks=num_blocks,
                    block_size=block_size,
                )
            settled[slots.data_ptr()].apply(cache)
        assert settled, "a step with trees leaves their slots"


class TreeGPUWorker(Worker):
    """The worker to name in `--worker-cls`."""

    def init_device(self) -> None:
        """Check what we build on, then let vLLM make its runner out of our parts."""
        check_versions()
        check_signatures()
        model = self.model_config
        model.logits_processors = without_request_check(model.logits_processors)
        check_config(self.vllm_config)
        require_triton()
        for name, backend in BACKENDS.items():
            register_backend(name, f"{backend.__module__}.{backend.__qualname__}")
        super().init_device()

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Then look whether the target's attention is what our kernel computes."""
        super().load_model(load_dummy_weights=load_dummy_weights)
        check_layers(self.model_runner.target_layers, device_type="cuda")

    def compile_or_warm_up_model(self) -> Any:
        """Compile our kernels; after vLLM's own warming up, measure what a step costs."""
        self._compile_kernels()  # vLLM warns of what is compiled later
        times = super().compile_or_warm_up_model()
        self.model_runner.prepare_share()
        return times

    def tree_store_size(self) -> int:
        """Requests that the plugin remembers; for tests."""
        return len(self.model_runner.tree_states)

    def _compile_kernels(self) -> None:
        max_rows = 1 + self.model_runner.num_spec_tokens
        for layer in self.model_runner.compilation_config.static_forward_context.values():
            impl = getattr(layer, "impl", None)
            if not isinstance(impl, TreeRowsAttention):
                continue
            dtype, device, width = self.model_config.dtype, self.device, impl.head_size
            query = torch.empty(1, layer.num_heads, width, dtype=dtype, device=device)
            key = torch.empty(1, layer.num_kv_heads, width, dtype=dtype, device=device)
            warm_up(query, key, key, *impl.caches(layer.kv_cache), max_rows=max_rows)

    def _make_model_runner(self) -> TreeGPUModelRunner:
        with replaced(gpu_model_runner, "DFlashProposer", TreeProposer):
            return TreeGPUModelRunner(self.vllm_config, self.device)
