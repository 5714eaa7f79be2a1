"""The configuration of a DFlash checkpoint as the speculators library writes it, in and out.

The decoder's sizes are nested and feature layers are counted from the embedding (CHECKPOINTS B).
Knows no tensors (`speculators_tensors` has those), no files and no target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ddtree.errors import CheckpointError, OptionError, UnsupportedModelError
from ddtree.models.drafter_config import (
    DFLASH2_KEYS,
    LARGEST_COUNT,
    DrafterConfig,
    parse_drafter_config,
)
from ddtree.models.drafter_export import decoder_json

# What decides how the decoder runs; the rest of `transformer_layer_config` has no say in it.
_DECODER_KEYS = (
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
    "rope_parameters",
    "partial_rotary_factor",
    "attention_value_scale",
    "attention_sink_bias",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
)
# z-lab's words for what this format does not describe, with the values that change nothing.
_FOREIGN: Mapping[str, tuple[object, ...]] = {
    "is_causal": (None,),
    "output_multiplier": (None, 1),
    "final_logit_softcapping": (None,),
    "input_embedding_scale": (None, 1),
    **dict.fromkeys(DFLASH2_KEYS, (None,)),
}
_REMEDY = (
    "Give the checkpoint as the speculators library saved it (docs/architecture.md, Drafters)."
)


def is_speculators(raw: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is one of the speculators library's, of whatever kind of drafter.

    >>> is_speculators({"speculators_model_type": "eagle3"}), is_speculators({"dflash_config": {}})
    (True, False)
    """
    return "speculators_model_type" in raw or "speculators_config" in raw


def verifier_name(raw: Mapping[str, Any]) -> str | None:
    """The target that such a checkpoint says it was made for: a hub id, or a path of its maker."""
    told = raw.get("speculators_config")
    verifier = told.get("verifier") if isinstance(told, Mapping) else None
    name = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    return name if isinstance(name, str) and name else None


# The configuration.


def parse_speculators_config(raw: Mapping[str, Any], source: str) -> DrafterConfig:
    """Read the configuration of a DFlash drafter in speculators' format.

    Args:
        raw: the parsed `config.json`.
        source: the file, for messages.

    Raises:
        UnsupportedModelError: another kind of drafter, or a variant that would be silently wrong.
        CheckpointError: a key missing, out of range, or told twice.
    """
    nested = raw.get("transformer_layer_config")
    _refuse_variants(raw, nested if isinstance(nested, Mapping) else {}, source)
    if not isinstance(nested, Mapping):
        raise _broken(source, "transformer_layer_config", "an object", repr(nested))
    _refuse_twice(raw, nested, source)
    block_size = _count(raw, "block_size", 2, source)
    sample_from_anchor = _samples_from_anchor(raw, block_size, source)
    dflash: dict[str, object] = {
        "block_size": block_size,
        "mask_token_id": _count(raw, "mask_token_id", 0, source),
        "target_layer_ids": _target_layer_ids(raw, source),
    }
    if _flag(raw, "sliding_window_non_causal", source):
        dflash["is_causal"] = False
    decoder = {key: nested.get(key) for key in _DECODER_KEYS}
    if decoder["use_sliding_window"] and decoder["layer_types"] is None:
        # Which layers slide would follow from max_window_layers, differently from z-lab's format.
        raise _broken(source, "layer_types", "one type per layer beside use_sliding_window", "none")
    config = parse_drafter_config(
        {**decoder, "architectures": ["DFlashDraftModel"], "dflash_config": dflash},
        f"{source}: transformer_layer_config",
    )
    vocab_size = _count(nested, "vocab_size", 1, f"{source}: transformer_layer_config")
    size = _count(raw, "draft_vocab_size", 1, source)
    if size > vocab_size:
        raise _broken(source, "draft_vocab_size", f"at most {vocab_size}, the vocab_size", size)
    if raw.get("target_hidden_size") not in (None, config.hidden_size):
        got = f"{raw['target_hidden_size']!r} beside hidden_size {config.hidden_size}"
        raise _refused(source, f"target_hidden_size {got}", "Features are as wide as the drafter.")
    return replace(
        config,
        draft_vocab_size=None if size == vocab_size else size,
        sample_from_anchor=sample_from_anchor,
    )


def _refuse_variants(raw: Mapping[str, Any], nested: Mapping[str, Any], source: str) -> None:
    kind = raw.get("speculators_model_type")
    if kind != "dflash":
        why = "Only its DFlash drafters are supported."
        raise _refused(source, f"speculators_model_type {kind!r}", why)
    if "dflash_config" in raw:
        got = "dflash_config beside speculators_model_type"
        raise _refused(
            source, got, "The speculators format has no such key: give the files of one format."
        )
    if raw.get("projector_type") not in (None, "dflash"):
        raise _refused(source, f"projector_type {raw['projector_type']!r}", "Not supported yet.")
    if raw.get("shift_label"):
        why = "What it shifts is not told by this format; sample_from_anchor is supported."
        raise _refused(source, "shift_label true", why)
    for place in (raw, nested):
        if place.get("quantization_config") is not None:
            why = "Quantised drafters are not supported; use bf16."
            raise _refused(source, "quantization_config", why)
        for key, neutral in _FOREIGN.items():
            if place.get(key) not in neutral:
                why = "What it means in this format is not known, so it is refused."
                raise _refused(source, f"{key} {place[key]!r}", why)


def _refuse_twice(raw: Mapping[str, Any], nested: Mapping[str, Any], source: str) -> None:
    """Some exporters repeat decoder keys at the top: fine while both say the same."""
    for key in _DECODER_KEYS:
        outer = raw.get(key)
        if outer is not None and outer != nested.get(key):
            wanted = f"{nested.get(key)!r}, as in transformer_layer_config, or no such key"
            raise _broken(source, key, wanted, repr(outer))


def _samples_from_anchor(raw: Mapping[str, Any], block_size: int, source: str) -> bool:
    """Whether slots predict the position after their own, so that the root's is used too."""
    told = raw.get("speculators_config")
    methods = told.get("proposal_methods") if isinstance(told, Mapping) else None
    for method in methods if isinstance(methods, list) else ():
        count = method.get("speculative_tokens") if isinstance(method, Mapping) else None
        # One more than a block has depths: sampled from the anchor too, though it is not said.
        if type(count) is int and count >= block_size and "sample_from_anchor" not in raw:
            got = f"speculative_tokens {count} of block_size {block_size}, no sample_from_anchor"
            why = "Which position its slots predict is not told: config.json must say it."
            raise _refused(source, got, why)
    return _flag(raw, "sample_from_anchor", source)


def _target_layer_ids(raw: Mapping[str, Any], source: str) -> list[int]:
    """0-based layers; here 0 is the embedding's output and i the output of layer i - 1."""
    key = "aux_hidden_state_layer_ids"
    declared = raw.get(key)
    whole = isinstance(declared, list) and all(type(i) is int and i >= 0 for i in declared)
    if not whole or not declared or len(set(declared)) != len(declared):
        raise _broken(source, key, "a list of distinct indices of hidden states", repr(declared))
    if 0 in declared:
        why = "0 is the embedding's output; only outputs of layers, from 1 on, are supported."
        raise _refused(source, f"{key} {declared!r}", why)
    return [i - 1 for i in declared]


def speculators_json(
    config: DrafterConfig,
    *,
    vocab_size: int,
    dtype: torch.dtype,
    verifier: str,
    architectures: Sequence[str],
) -> dict[str, Any]:
    """The `config.json` that `parse_speculators_config` reads back, but for the target's depth.

    Args:
        config: of the drafter.
        vocab_size: V of the target.
        dtype: of the weights in the file.
        verifier: the target's name.
        architectures: of the target, as its own `config.json` has them.

    Raises:
        OptionError: something that the format has no words for.
    """
    if config.is_dflash2:
        raise _unwritable("conv_kernel_size", "a drafter without DFlash2's layers", "DFlash2")
    for key, neutral in (
        ("output_multiplier", 1.0),
        ("final_logit_softcapping", None),
        ("input_embedding_scale", 1.0),
        ("selector_rank", None),
    ):
        if getattr(config, key) != neutral:
            raise _unwritable(key, str(neutral), getattr(config, key))
    layers = list(zip(config.causal, config.windows, strict=True))
    sliding = {causal for causal, window in layers if window is not None}
    if len(sliding) > 1 or any(causal for causal, window in layers if window is None):
        raise _unwritable("causal", "full layers that are not causal", config.causal)
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": config.num_depths,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "draft_vocab_size": config.draft_vocab_size or vocab_size,
        "target_hidden_size": config.hidden_size,
        "sample_from_anchor": config.sample_from_anchor,
        # vLLM 0.32 makes all layers causal where this is false, those without a window too.
        "sliding_window_non_causal": True not in sliding,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": {"name_or_path": verifier, "architectures": list(architectures)},
        },
        "transformer_layer_config": {
            "model_type": "qwen3",
            **decoder_json(replace(config, vocab_size=vocab_size)),
            "tie_word_embeddings": False,
        },
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


# Reading keys, and saying what is wrong with them.


def _count(raw: Mapping[str, Any], key: str, low: int, source: str) -> int:
    value = raw.get(key)
    if type(value) is not int or value < low:
        raise _broken(source, key, f"a whole number >= {low}", repr(value))
    if value > LARGEST_COUNT:
        raise _broken(source, key, f"a whole number <= {LARGEST_COUNT}", value)
    return value


def _flag(raw: Mapping[str, Any], key: str, source: str) -> bool:
    value = raw.get(key, False)
    if not isinstance(value, bool):
        raise _broken(source, key, "true or false", repr(value))
    return value


def _broken(source: str, key: str, expected: str, got: object) -> CheckpointError:
    return CheckpointError(f"{source}: {key}", expected=expected, got=got, remedy=_REMEDY)


def _refused(source: str, what: str, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        "drafter",
        expected="a plain DFlash checkpoint in speculators' format",
        got=f"{what} in {source}",
        remedy=why,
    )


def _unwritable(key: str, expected: str, got: object) -> OptionError:
    return OptionError(
        f"config.{key}",
        expected=expected,
        got=str(got),
        remedy="speculators' format has no words for it: stay with z-lab's.",
    )
