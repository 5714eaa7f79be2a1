"""Tiny random models, made in the test: every architecture that ddtree claims."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ddtree.models.drafter import DFlashDrafter
from ddtree.models.drafter_config import parse_drafter_config
from ddtree.models.drafter_network import DFlashNetwork
from ddtree.models.target import Target

VOCAB_SIZE = 61
NUM_LAYERS = 4
HIDDEN_SIZE = 32
WINDOW = 9

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Large weights spread the logits, so that no test lives on a near tie.
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MIXED = ["full_attention", "sliding_attention"] * (NUM_LAYERS // 2)

ARCHITECTURES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "llama-biased": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)),
    "mistral-window": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=WINDOW)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen2-mixed": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=WINDOW, layer_types=_MIXED)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=12)),
    "qwen3-tied": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SIZES, head_dim=12, tie_word_embeddings=True)
    ),
}


@functools.cache
def tiny_model(architecture: str) -> PreTrainedModel:
    """A tiny model with fixed random weights; shared, so leave it as you found it."""
    # The first who asks may do so in inference mode, which its weights must not inherit.
    with torch.inference_mode(False):
        torch.manual_seed(sorted(ARCHITECTURES).index(architecture))
        return ARCHITECTURES[architecture]().eval()


def tiny_target(architecture: str) -> Target:
    """A target without a tokenizer, over the shared model."""
    return Target(tiny_model(architecture), None, name=f"tiny {architecture}")


def drafter_config(**changes: object) -> dict[str, object]:
    """A `config.json` in z-lab's format that fits the tiny models."""
    config: dict[str, object] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 8,
        "num_target_layers": NUM_LAYERS,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2]},
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB_SIZE,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "rope_scaling": None,
    }
    return {**config, **changes}


def dflash_drafter(target: Target, seed: int = 0, **changes: object) -> DFlashDrafter:
    """A DFlash drafter with random weights: it drafts noise, by the real code."""
    torch.manual_seed(seed)
    config = parse_drafter_config(drafter_config(**changes), "test")
    return DFlashDrafter(DFlashNetwork(config), target, name="random")


def greedy_reference(
    model: PreTrainedModel, prompt_ids: list[int], max_new_tokens: int, **options: object
) -> list[int]:
    """What the model's own `generate` says."""
    ids = torch.tensor([prompt_ids])
    sequence = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        **options,
    )
    return sequence[0, len(prompt_ids) :].tolist()
