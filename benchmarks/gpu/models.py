"""Random models: tiny ones to check, Qwen3's shapes to time; their drafters, trees and caches."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from builders import random_marginals
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from ddtree.attention.backends import GROUPED
from ddtree.cache.hf import TargetCache
from ddtree.models.drafter import DFlashDrafter
from ddtree.models.drafter_config import parse_drafter_config
from ddtree.models.drafter_network import DFlashNetwork
from ddtree.models.target import Target
from ddtree.sampling.coupling import Perturb
from ddtree.tree import host
from ddtree.tree.geometry import ancestor_mask
from ddtree.types import DraftTree, Marginals
from gpu.section import Json, Report, Setup

_TINY: Json = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Large weights spread the logits, so that nothing hangs on a near tie.
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_WINDOW = {"use_sliding_window": True, "sliding_window": 9}
_MIXED = {**_WINDOW, "layer_types": ["full_attention", "sliding_attention"] * 2}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
# As wide as real heads are: the kernels of the GPU differ by width.
_WIDE = {"hidden_size": 256, "head_dim": 128, "initializer_range": 0.05}

ARCHITECTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_TINY),
    "llama-tied": lambda: LlamaConfig(**_TINY, tie_word_embeddings=True),
    "llama-biased": lambda: LlamaConfig(**_TINY, attention_bias=True, mlp_bias=True),
    "mistral": lambda: MistralConfig(**_TINY, sliding_window=None),
    "mistral-window": lambda: MistralConfig(**_TINY, sliding_window=9),
    "qwen2": lambda: Qwen2Config(**_TINY),
    "qwen2-mixed": lambda: Qwen2Config(**_TINY, **_MIXED),
    "qwen3": lambda: Qwen3Config(**_TINY, head_dim=12),
    "qwen3-tied": lambda: Qwen3Config(**_TINY, head_dim=12, tie_word_embeddings=True),
    "qwen3-wide": lambda: Qwen3Config(**{**_TINY, **_WIDE}),
    "qwen3_moe": lambda: Qwen3MoeConfig(**_TINY, **_EXPERTS, head_dim=12),
}


def architectures(setup: Setup) -> list[str]:
    few = ["qwen2-mixed", "qwen3-wide", "qwen3_moe"]
    return few if setup.small else list(ARCHITECTURES)


def tiny_model(architecture: str) -> PreTrainedModel:
    """On the CPU in float32."""
    config = ARCHITECTURES[architecture]()
    torch.manual_seed(sorted(ARCHITECTURES).index(architecture))
    return AutoModelForCausalLM.from_config(config, attn_implementation=GROUPED).eval()


_QWEN = {
    "vocab_size": 151936,
    "num_attention_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
_DENSE = {**_QWEN, "num_key_value_heads": 8, "num_hidden_layers": 36}
_MOE = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 48,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
_SMALL = {
    "vocab_size": 1000,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
SHAPES: dict[str, tuple[type[PreTrainedConfig], Json]] = {
    "Qwen3-4B": (
        Qwen3Config,
        {**_DENSE, "hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    ),
    "Qwen3-8B": (Qwen3Config, {**_DENSE, "hidden_size": 4096, "intermediate_size": 12288}),
    "Qwen3-30B-A3B": (
        Qwen3MoeConfig,
        {**_QWEN, **_MOE, "hidden_size": 2048, "intermediate_size": 6144},
    ),
}


def sized_target(name: str, setup: Setup, report: Report) -> Target:
    """Random weights in bfloat16, made on the device."""
    kind, sizes = SHAPES[name]
    experts = _EXPERTS if kind is Qwen3MoeConfig else {}
    config = kind(**({**sizes, **_SMALL, **experts} if setup.small else sizes), eos_token_id=None)
    begin = time.perf_counter()
    with torch.device(setup.device):
        made = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=GROUPED
        )
    setup.wait()
    count = sum(parameter.numel() for parameter in made.parameters())
    seconds = time.perf_counter() - begin
    report.note(f"{count / 1e9:.2f} billion random parameters, made in {seconds:.1f} s.")
    if (experts_by := getattr(config, "_experts_implementation", None)) is not None:
        report.note(f"transformers runs the experts by {experts_by}.")
    return Target(made, None, name=name)


def random_drafter(target: Target, *, block_size: int, num_layers: int) -> DFlashDrafter:
    """A DFlash of the target's width and heads with random weights, made where the target is."""
    config = target.config
    raw = {
        "architectures": ["DFlashDraftModel"],
        "block_size": block_size,
        "dflash_config": {"mask_token_id": min(151669, target.vocab_size - 1)},
        "num_target_layers": max(5, target.num_layers),
        "num_hidden_layers": num_layers,
        "head_dim": getattr(config, "head_dim", None) or 8,
        "rope_theta": 1e6,
        "max_position_embeddings": target.context_limit,
    }
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    raw.update({name: getattr(config, name) for name in sizes})
    if target.num_layers < 8:  # the rule that spreads five taps would name layers twice
        raw["dflash_config"]["target_layer_ids"] = [0, 2]
    before = torch.get_default_dtype()
    torch.set_default_dtype(target.dtype)
    try:
        with torch.device(target.device):
            network = DFlashNetwork(parse_drafter_config(raw, "benchmarks/gpu"))
    finally:
        torch.set_default_dtype(before)
    return DFlashDrafter(network, target, name="random")


@dataclass(frozen=True)
class ScriptedDrafter:
    """Knows the text, and hides each token at rank 0, 1 or 2 by its position.

    Args:
        script: [positions] the tokens, on the target's device.
        vocab_size: V.
    """

    script: Tensor
    vocab_size: int
    num_depths: int = 15
    layer_ids: tuple[int, ...] = (1,)

    def start(self, capacity: int) -> ScriptedSession:
        """A session that only counts."""
        return ScriptedSession(self)


@dataclass
class ScriptedSession:
    """Where the text stands."""

    drafter: ScriptedDrafter
    length: int = 0

    def extend(self, features: Tensor, token_ids: Tensor) -> None:
        """Count the committed positions."""
        self.length += features.shape[0]

    def propose(
        self, root_id: int, *, num_depths: int, num_ranks: int, perturb: Perturb | None = None
    ) -> Marginals:
        """Ranks are worth half of the one before; beyond the script everything is token 0.

        `perturb` changes nothing: the script knows the text, and with it what the noise picks.
        """
        script, vocab_size = self.drafter.script, self.drafter.vocab_size
        places = self.length + 1 + torch.arange(num_depths, device=script.device)
        known = script[places.clamp(max=script.shape[0] - 1)]
        ranks = torch.arange(min(num_ranks, vocab_size), device=script.device)
        log_probs = (0.6 * 0.5**ranks).log().expand(num_depths, -1).contiguous()
        shifted = known[:, None] + ranks - places[:, None] % 3
        return Marginals(log_probs.float(), shifted % vocab_size)


def filled_cache(target: Target, context_length: int, room: int) -> TargetCache:
    """A cache that holds so many random positions."""
    cache, config = target.new_cache(context_length + room), target.config
    shape = (1, config.num_key_value_heads, context_length, config.head_dim)
    for store in cache.stores:
        keys, values = torch.randn(2, *shape, dtype=target.dtype, device=target.device)
        store.append(keys, values)
    return cache


def random_tree(num_rows: int, vocab_size: int) -> DraftTree:
    """Of a drafter of 15 depths, its tokens within the vocabulary."""
    tree = host.build_tree(random_marginals(15, max(1, num_rows - 1)), 0, num_rows - 1)
    return replace(tree, token_ids=tree.token_ids % vocab_size)


def uploaded(tree: DraftTree, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
    """Its ids, depths and ancestor mask, on the device."""
    parts = (tree.token_ids, tree.depths, ancestor_mask(tree))
    ids, depths, ancestors = (torch.from_numpy(part.copy()).to(device) for part in parts)
    return ids, depths, ancestors
