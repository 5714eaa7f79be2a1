"""Tiny random models of the architectures in docs/models.md: one entry per variant of interest.

Those of Llama's nearest kin, with four layers, are in `models`; add others here.

Windows are shorter than the tests' prompts, and every bias, cap, scale and sink that an
architecture can have is there and is not at a default that would hide it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from functools import partial

import torch
import transformers
from transformers import PreTrainedModel

from ddtree.attention.backends import GROUPED
from ddtree.models.fused import fuse_layers
from ddtree.models.packed import pack_linears
from ddtree.models.target import Target
from tests.support import models
from tests.support.models import VOCAB_SIZE, WINDOW

NUM_LAYERS = 2
SIZES = {**models.SIZES, "num_hidden_layers": NUM_LAYERS}
LAYERS_MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SHARED_EXPERT = {**_EXPERTS, "shared_expert_intermediate_size": 20}
_SHORT_CONVOLUTIONS = {"layer_types": ["conv", "full_attention"]}
# Two value heads to a key head, and no two sizes alike.
_DELTA_NETS = {
    "layer_types": ["linear_attention", "full_attention"],
    "initializer_range": 0.2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
_GEMMA4 = {
    **LAYERS_MIXED,
    "head_dim": 8,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "final_logit_softcapping": 10.0,
}


def build(name: str, seed: int, options: Mapping[str, object]) -> PreTrainedModel:
    """The causal LM `name` of transformers, all its vectors random: norms, biases and sinks.

    Args:
        name: what stands before `Config`.
        seed: of the weights; each was chosen for a text of many words without near ties.
        options: over the sizes that all have in common.
    """
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **options})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
        # Beside a large embedding and a tied head the layers would not be heard.
        model.get_input_embeddings().weight.mul_(0.2)
    return model


def _of(name: str, seed: int = 2, **options: object) -> Callable[[], PreTrainedModel]:
    return partial(build, name, seed, options)


ARCHITECTURES: dict[str, Callable[[], PreTrainedModel]] = {
    # Mixtures of experts.
    "glm4_moe": _of(
        "Glm4Moe",
        seed=0,
        head_dim=8,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=24,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
    ),
    "gpt_oss": _of(
        "GptOss", seed=7, head_dim=8, rope_parameters=_YARN, **LAYERS_MIXED, **_LOCAL_EXPERTS
    ),
    "granitemoe": _of("GraniteMoe", seed=4, **_LOCAL_EXPERTS),
    "mixtral": _of("Mixtral", **_LOCAL_EXPERTS),
    "mixtral-window": _of("Mixtral", seed=7, sliding_window=WINDOW, **_LOCAL_EXPERTS),
    "olmoe": _of("Olmoe", seed=4, num_experts=4, num_experts_per_tok=2),
    "qwen2_moe": _of("Qwen2Moe", seed=4, shared_expert_intermediate_size=24, **_EXPERTS),
    "qwen3_moe": _of("Qwen3Moe", seed=6, head_dim=8, **_EXPERTS),
    # Windows, soft caps, scales, a RoPE per layer type.
    "cohere2": _of("Cohere2", seed=3, **LAYERS_MIXED),
    "exaone4": _of("Exaone4", **LAYERS_MIXED),
    "gemma": _of("Gemma", seed=6, head_dim=8),
    "gemma2": _of(
        "Gemma2",
        seed=3,
        head_dim=8,
        query_pre_attn_scalar=11,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=10.0,
        **LAYERS_MIXED,
    ),
    "gemma3_text": _of("Gemma3Text", head_dim=8, query_pre_attn_scalar=11, **LAYERS_MIXED),
    "gemma4_text": _of("Gemma4Text", seed=6, **_GEMMA4),
    "gemma4_text-experts": _of(
        "Gemma4Text",
        seed=1,
        **{**_GEMMA4, "hidden_size_per_layer_input": 0},
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=24,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
    ),
    "gemma4_text-shared": _of(
        "Gemma4Text",
        seed=3,
        **{**_GEMMA4, "num_hidden_layers": 4, "layer_types": 2 * LAYERS_MIXED["layer_types"]},
        num_kv_shared_layers=2,
    ),
    "ministral": _of("Ministral", seed=4, head_dim=8, **LAYERS_MIXED),
    "olmo3": _of("Olmo3", seed=1, **LAYERS_MIXED),
    "phi3": _of("Phi3"),
    "phi3-window": _of("Phi3", seed=4, sliding_window=WINDOW),
    "starcoder2-window": _of("Starcoder2", seed=1, sliding_window=WINDOW),
    # Full attention.
    "arcee": _of("Arcee", seed=1),
    "cohere": _of("Cohere", seed=6),
    "ernie4_5": _of("Ernie4_5", seed=6, head_dim=8),
    "glm": _of("Glm", seed=4, head_dim=8),
    "glm4": _of("Glm4", seed=4, head_dim=8),
    "granite": _of(
        "Granite",
        seed=3,
        attention_multiplier=0.3,
        embedding_multiplier=5.0,
        residual_multiplier=0.4,
        logits_scaling=2.0,
    ),
    "hunyuan_v1_dense": _of("HunYuanDenseV1", seed=1, head_dim=8),
    "ministral3": _of("Ministral3", seed=4),
    "olmo": _of("Olmo", seed=6),
    "olmo2": _of("Olmo2", seed=0),
    "seed_oss": _of("SeedOss", seed=7, head_dim=8),
    "smollm3": _of("SmolLM3", seed=6, no_rope_layers=[1, 0]),
    "stablelm": _of("StableLm", seed=0),
    # Recurrent layers beside those of attention.
    "lfm2": _of("Lfm2", conv_bias=True, **_SHORT_CONVOLUTIONS),
    "lfm2_moe": _of("Lfm2Moe", num_dense_layers=1, **_SHORT_CONVOLUTIONS, **_EXPERTS),
    "qwen3_5": _of(
        "Qwen3_5Text",
        **{**_DELTA_NETS, "layer_types": [*_DELTA_NETS["layer_types"], "linear_attention"]},
        num_hidden_layers=3,
    ),
    "qwen3_5_moe": _of("Qwen3_5MoeText", **_DELTA_NETS, **_SHARED_EXPERT),
    "qwen3_next": _of("Qwen3Next", **_DELTA_NETS, **_SHARED_EXPERT),
}
HYBRIDS = ("lfm2", "lfm2_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next")


@functools.cache
def tiny(architecture: str) -> PreTrainedModel:
    """The model with transformers' eager attention: the oracle. Shared, so leave it as it is."""
    # The first who asks may do so in inference mode, which its weights must not inherit.
    with torch.inference_mode(False):
        model = ARCHITECTURES[architecture]()
        model.set_attn_implementation("eager")
        return model


@functools.cache
def loaded(architecture: str) -> Target:
    """What `load_target` makes of the model: our attention, packed and fused layers."""
    with torch.inference_mode(False):
        model = copy.deepcopy(tiny(architecture))
        model.set_attn_implementation(GROUPED)
        fuse_layers(pack_linears(model))
        return Target(model, None, name=architecture)
