"""Medusa heads and PARD models as they are published, written by the test for the tiny models.

Names and shapes are copied from what the published code reads, not asked of our code.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

from tests.support.checkpoints import Tensors, edit_json
from tests.support.models import HIDDEN_SIZE, VOCAB_SIZE
from tests.support.tokenizers import tiny_tokenizer

NUM_HEADS = 4
MASK = 7
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
PARD_MODELS: dict[str, Callable[[int], PreTrainedModel]] = {
    "llama": lambda size: LlamaForCausalLM(LlamaConfig(**{**_SIZES, "vocab_size": size})),
    "qwen3-tied": lambda size: Qwen3ForCausalLM(
        Qwen3Config(**{**_SIZES, "vocab_size": size}, head_dim=8, tie_word_embeddings=True)
    ),
}


def medusa_tensors(
    num_heads: int = NUM_HEADS, num_layers: int = 1, *, linears: bool = True, seed: int = 0
) -> Tensors:
    """Random heads: residual blocks, then a linear layer each where `linears` says so."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    tensors = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            tensors[f"{head}.{layer}.linear.weight"] = random(HIDDEN_SIZE, HIDDEN_SIZE)
            tensors[f"{head}.{layer}.linear.bias"] = random(HIDDEN_SIZE)
        if linears:
            tensors[f"{head}.{num_layers}.weight"] = random(VOCAB_SIZE, HIDDEN_SIZE)
    return tensors


def write_medusa(
    folder: Path,
    *,
    tensors: Tensors | None = None,
    edit: Callable[[Tensors], object] | None = None,
    pickled: bool = False,
    **changes: object,
) -> Path:
    """Heads that fit the tiny models; like the published ones they declare fewer than they hold.

    Args:
        folder: made if it is not there.
        tensors: in place of random ones.
        edit: changes them in place before they are written.
        pickled: as `.pt` in place of safetensors.
        changes: to `config.json`; a key with None is left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "medusa_num_heads": 2,
        "medusa_num_layers": 1,
        "base_model_name_or_path": "some/target",
        **changes,
    }
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = dict(medusa_tensors() if tensors is None else tensors)
    if edit is not None:
        edit(tensors)
    if pickled:
        torch.save(tensors, folder / "medusa_lm_head.pt")
    else:
        save_file(tensors, folder / "medusa_lm_head.safetensors")
    return folder


def write_pard(
    folder: Path,
    architecture: str = "llama",
    *,
    model: PreTrainedModel | None = None,
    vocab_size: int = VOCAB_SIZE,
    tokenizer: bool = True,
    **changes: object,
) -> Path:
    """A small causal model with the keys that PARD's training adds.

    Args:
        folder: made if it is not there.
        architecture: among `PARD_MODELS`.
        model: in place of a random one.
        vocab_size: of a random one.
        tokenizer: write the tiny targets' one beside it.
        changes: to `config.json`; a key with None is left out.
    """
    if model is None:
        torch.manual_seed(3)
        model = PARD_MODELS[architecture](vocab_size)
    model.save_pretrained(folder)
    if tokenizer:
        tiny_tokenizer().save_pretrained(folder)
    keys = {"pard_token": MASK, "spd_type": "pard", **changes}
    edit_json(folder / "config.json", **keys)
    return folder
