"""Checkpoints as they are published, written by the test: a tiny target, and both DFlash formats.

Names and shapes are copied from CHECKPOINTS A to C, not asked of the code that reads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.models import drafter_config, tiny_model
from tests.support.tokenizers import tiny_tokenizer

Tensors = dict[str, Tensor]

# What a DFlash2 drafter for the tiny models declares besides, as the published ones do.
DFLASH2: Mapping[str, object] = {
    "architectures": ["DFlash2DraftModel"],
    "layer_types": ["sliding_attention", "sliding_attention"],
    "sliding_window": 6,
    "is_causal": False,
    "dflash_config": {
        "mask_token_id": 3,
        "target_layer_ids": [0, 2],
        "conv_kernel_size": 2,
        "conv_group_size": 4,
        "selector_rank": 5,
        "selector_top_k": 6,
    },
}


def write_target(folder: Path, architecture: str = "llama", *, tokenizer: bool = True) -> Path:
    """A tiny target as `save_pretrained` writes it, with a chat template or without a tokenizer."""
    tiny_model(architecture).save_pretrained(folder)
    if tokenizer:
        tiny_tokenizer().save_pretrained(folder)
    return folder


def drafter_shapes(config: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """The tables of CHECKPOINTS A and C for a `config.json` with flat sizes and nested taps."""
    hidden, wide, head = (config[k] for k in ("hidden_size", "intermediate_size", "head_dim"))
    queries, keys = (config[k] * head for k in ("num_attention_heads", "num_key_value_heads"))
    taps = len(config["dflash_config"]["target_layer_ids"])
    shapes = {"fc.weight": (hidden, taps * hidden), "hidden_norm.weight": (hidden,)}
    for i in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (queries, hidden),
            "self_attn.k_proj.weight": (keys, hidden),
            "self_attn.v_proj.weight": (keys, hidden),
            "self_attn.o_proj.weight": (hidden, queries),
            "self_attn.q_norm.weight": (head,),
            "self_attn.k_norm.weight": (head,),
            "mlp.gate_proj.weight": (wide, hidden),
            "mlp.up_proj.weight": (wide, hidden),
            "mlp.down_proj.weight": (hidden, wide),
        }
        if config.get("attention_bias"):
            layer |= {
                f"self_attn.{k}.bias": layer[f"self_attn.{k}.weight"][:1]
                for k in ("q_proj", "k_proj", "v_proj", "o_proj")
            }
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return {**shapes, "norm.weight": (hidden,), **_dflash2_shapes(config)}


def _dflash2_shapes(config: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """The table of CHECKPOINTS C, for a configuration that has its keys."""
    keys = ("conv_kernel_size", "conv_group_size", "selector_rank")
    if any(key not in config["dflash_config"] for key in keys):
        return {}
    taps, group, rank = (config["dflash_config"][key] for key in keys)
    hidden, vocab_size = config["hidden_size"], config["vocab_size"]
    shapes = {
        "candidate_selector.predecessor_codebook": (vocab_size, rank),
        "candidate_selector.successor_codebook": (vocab_size, rank),
        "candidate_selector.hidden_projection.weight": (rank, hidden),
    }
    for i in range(config["num_hidden_layers"]):
        for conv in ("attention_conv", "mlp_conv"):
            name = f"layers.{i}.{conv}."
            shapes[name + "base_kernel"] = (2, taps, hidden)
            shapes[name + "kernel_projection.weight"] = (2 * taps * hidden // group, hidden)
    return shapes


def drafter_tensors(config: Mapping[str, object], seed: int = 0) -> Tensors:
    """Random weights, large enough that every part of the network shows in its output."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * (1.0 if "codebook" in name else 0.3)
        + ("norm" in name)
        for name, shape in drafter_shapes(config).items()
    }


def write_drafter(
    folder: Path,
    *,
    weights: Tensors | None = None,
    edit: Callable[[Tensors], object] | None = None,
    sharded: bool = False,
    prefix: str = "",
    draft_token_ids: list[int] | None = None,
    **changes: object,
) -> Path:
    """A DFlash drafter that fits the tiny models.

    Args:
        folder: made if it is not there.
        weights: in place of those that the configuration implies.
        edit: changes the tensors in place before they are written.
        sharded: two files with an index in place of one.
        prefix: put before each tensor's name, such as "model.".
        draft_token_ids: of a reduced vocabulary; its side file, and its size in `config.json`.
        changes: to `config.json`; a key with None is left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {k: v for k, v in drafter_config(**changes).items() if v is not None}
    tensors = drafter_tensors(config) if weights is None else dict(weights)
    if edit is not None:
        edit(tensors)
    tensors = {prefix + name: tensor for name, tensor in tensors.items()}
    if draft_token_ids is not None:
        size = {"draft_vocab_size": len(draft_token_ids)}
        config["dflash_config"] = {**config["dflash_config"], **size}
        vocabulary = json.dumps({"token_ids": draft_token_ids})
        (folder / "draft_vocabulary.json").write_text(vocabulary)
    (folder / "config.json").write_text(json.dumps(config))
    if not sharded:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = list(tensors)
    parts = (names[::2], names[1::2])
    files = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for file, part in zip(files, parts, strict=True):
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {n: file for file, part in zip(files, parts, strict=True) for n in part}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


_NESTED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "hidden_act",
    "attention_bias",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
)


def speculators_config(
    decoder: Mapping[str, object] | None = None, **changes: object
) -> dict[str, object]:
    """A `config.json` in speculators' format that fits the tiny models; all tokens by default."""
    plain = drafter_config()
    config = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "block_size": 8,
        "mask_token_id": 3,
        "aux_hidden_state_layer_ids": [1, 3],
        "draft_vocab_size": plain["vocab_size"],
        "target_hidden_size": None,
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
            "verifier": {"name_or_path": "/somewhere/else", "architectures": []},
        },
        "transformer_layer_config": {
            "model_type": "qwen3",
            **{key: plain[key] for key in _NESTED},
            **(decoder or {}),
        },
    }
    return {**config, **changes}


def speculators_tensors(architecture: str, draft_token_ids: list[int] | None) -> Tensors:
    """The tensors of `write_drafter`, with a tiny model's embedding and head rows and the map."""
    model = tiny_model(architecture)
    embedding = model.get_input_embeddings().weight.detach().clone()
    head = model.get_output_embeddings().weight.detach().clone()
    tensors = {**drafter_tensors(drafter_config()), "embed_tokens.weight": embedding}
    if draft_token_ids is None:
        return {**tensors, "lm_head.weight": head}
    return {
        **tensors,
        "lm_head.weight": head[draft_token_ids],
        "d2t": torch.tensor([token_id - i for i, token_id in enumerate(draft_token_ids)]),
        "t2d": torch.tensor([i in draft_token_ids for i in range(embedding.shape[0])]),
    }


def write_speculators(
    folder: Path,
    architecture: str = "llama",
    *,
    draft_token_ids: list[int] | None = None,
    edit: Callable[[Tensors], object] | None = None,
    decoder: Mapping[str, object] | None = None,
    **changes: object,
) -> Path:
    """A DFlash drafter in speculators' format, with the weights of `write_drafter`'s.

    Args:
        folder: made if it is not there.
        architecture: of the tiny model whose embedding and head it carries.
        draft_token_ids: of a reduced vocabulary; None for all tokens.
        edit: changes the tensors in place before they are written.
        decoder: changes to the nested `transformer_layer_config`.
        changes: to the top of `config.json`; a key with None is left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = speculators_tensors(architecture, draft_token_ids)
    size = tensors["lm_head.weight"].shape[0]
    if edit is not None:
        edit(tensors)
    config = speculators_config(decoder, **{"draft_vocab_size": size, **changes})
    kept = {k: v for k, v in config.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    save_file(tensors, folder / "model.safetensors")
    return folder


def edit_json(path: Path, **changes: object) -> None:
    """Change keys of a JSON file; a key with None is left out."""
    merged = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in merged.items() if v is not None}))
