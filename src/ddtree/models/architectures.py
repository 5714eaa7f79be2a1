"""Which targets are let in, and what each of their layer types shows a row.

The table has what the tests hold against transformers' own `generate`. What is not in it is
refused, or let in on request if its layers are ones that a tree mask is known for. Knows
configurations and class attributes, and runs nothing.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from ddtree.errors import UnsupportedModelError
from ddtree.models.recurrent import recurrent_layer_type
from ddtree.models.text_part import WITH_TEXT_PART

# Proven by tests/lossless, one by one; docs/models.md says what each of them has.
SUPPORTED_MODEL_TYPES = (
    "arcee",
    "cohere",
    "cohere2",
    "ernie4_5",
    "exaone4",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "glm",
    "glm4",
    "glm4_moe",
    "gpt_oss",
    "granite",
    "granitemoe",
    "hunyuan_v1_dense",
    "lfm2",
    "lfm2_moe",
    "llama",
    "ministral",
    "ministral3",
    "mistral",
    "mixtral",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
)

# Without `layer_types`, these read `sliding_window` as the window of every layer.
_ONE_WINDOW = ("ministral3", "mistral", "mixtral", "phi3", "qwen3_moe", "starcoder2")

_ATTENTION = ("full_attention", "sliding_attention")

# What a tree cannot be fed to, whoever asks: by the words of `layer_types`.
_HOPELESS_LAYERS = {
    "chunked_attention": "chunks start at multiples of a length, whatever a row's ancestors are",
    "linear_attention": "a recurrent state has no mask, and only known families follow trees",
    "conv": "a convolution has no mask, and only known families follow trees",
}
_UNKNOWN_LAYER = "no tree mask is known for them"

_IMAGES = "it takes images too; give its id or folder, and its text part alone is loaded"
_NO_TEXT_MODEL = "transformers has no causal LM of its text part alone"

# Without a word in `layer_types` that would say it.
_HOPELESS_TYPES = {
    "gemma3n": "its layers mix several predictions of the same token, which is not tested",
    "gemma3n_text": "its layers mix several predictions of the same token, which is not tested",
    "llama4": "chunked attention: chunks start at multiples of a length",
    "llama4_text": "chunked attention: chunks start at multiples of a length",
    "qwen2_5_vl": _NO_TEXT_MODEL,
    "qwen2_vl": _NO_TEXT_MODEL,
    "qwen3_vl": _NO_TEXT_MODEL,
    "qwen3_vl_moe": _NO_TEXT_MODEL,
}


def check_model_type(model_type: object, name: str, *, allow_untested: bool = False) -> None:
    """Refuse a model type that is not in the table, before anything is read.

    Args:
        model_type: as `config.json` has it.
        name: of the target, for messages.
        allow_untested: refuse only what is known to be hopeless.

    Raises:
        UnsupportedModelError: says what is in the way.
    """
    if isinstance(model_type, str) and model_type in _HOPELESS_TYPES:
        raise _refused(model_type, name, _HOPELESS_TYPES[model_type])
    known = (*SUPPORTED_MODEL_TYPES, *WITH_TEXT_PART)
    if model_type not in known and not allow_untested:
        raise unsupported_architecture(model_type, name)


def check_architecture(config: Any, name: str, *, allow_untested: bool = False) -> bool:
    """Whether a target of this configuration may be used; True if it is not in the table.

    Args:
        config: of a text model, by transformers.
        name: of the target, for messages.
        allow_untested: let in what is not in the table but has known layers.

    Raises:
        UnsupportedModelError: says what is in the way.
    """
    model_type = config.model_type
    if model_type in WITH_TEXT_PART:
        raise _refused(model_type, name, _IMAGES)
    check_model_type(model_type, name, allow_untested=allow_untested)
    window_by_layer_type(config, name)
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        raise _refused(model_type, name, "attention looks ahead: this is no causal model")
    if model_type in SUPPORTED_MODEL_TYPES:
        return False
    if getattr(config, "attention_chunk_size", None) is not None:
        raise _refused(model_type, name, _HOPELESS_LAYERS["chunked_attention"])
    if getattr(config, "is_encoder_decoder", False):
        raise _refused(model_type, name, "an encoder and a decoder: this is no causal model")
    for key in ("hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"):
        if not isinstance(getattr(config, key, None), int):
            raise _refused(model_type, name, f"its configuration has no {key}")
    return True


def check_layers(model: PreTrainedModel, name: str) -> None:
    """Whether a model that is not in the table is built of attention layers that take a mask.

    Raises:
        UnsupportedModelError: recurrent, or built in a way that is not known.
    """
    config: Any = model.config
    if getattr(model, "_is_stateful", False):
        raise _refused(config.model_type, name, _HOPELESS_LAYERS["linear_attention"])
    if not model._supports_attention_backend:
        raise _refused(config.model_type, name, "its attention takes no mask from outside")
    layers = getattr(model.get_decoder(), "layers", ())
    if len(layers) != config.num_hidden_layers:
        raise _refused(config.model_type, name, "its decoder has no list of layers to tap")


def unsupported_architecture(model_type: object, name: str) -> UnsupportedModelError:
    """The error for a target of an architecture that is not among the tested ones."""
    return UnsupportedModelError(
        "target",
        expected=f"an architecture among {', '.join(SUPPORTED_MODEL_TYPES)}",
        got=f"{model_type!r} ({name})",
        remedy="Its attention or state may need a tree mask that is not tested yet; "
        "allow_untested=True (--allow-untested) tries it, if its layers are of known kinds, "
        "and checks it on the first prompt.",
    )


def window_by_layer_type(config: Any, name: str) -> dict[str, int | None]:
    """The sliding window of each attention layer type that occurs; None for full attention.

    Raises:
        UnsupportedModelError: another kind of layer, by name.
    """
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        one = config.model_type in _ONE_WINDOW
        if window and not one and config.model_type not in SUPPORTED_MODEL_TYPES:
            reason = "sliding_window is set, but nothing says which layers slide"
            raise _refused(config.model_type, name, reason)
        return {"all": window if one else None}
    # Recurrent layers of known families follow the tree by themselves (`models.recurrent`).
    kinds = set(layer_types) - {recurrent_layer_type(config.model_type)}
    unknown = sorted(kinds - set(_ATTENTION))
    if unknown:
        reason = _HOPELESS_LAYERS.get(unknown[0], _UNKNOWN_LAYER)
        raise _refused(config.model_type, name, f"layers of {', '.join(unknown)}: {reason}")
    known = {"full_attention": None, "sliding_attention": window}
    return {kind: known[kind] for kind in sorted(kinds)}


def longest_context(config: Any) -> int:
    """The most positions in which a row's result does not depend on the rows beside it.

    LongRoPE turns all positions otherwise as soon as one lies beyond the length of its first
    training, so a deep node would turn the root; transformers itself starts anew there.
    """
    limit = int(config.max_position_embeddings)
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in (parameters, *parameters.values()):
        if isinstance(rope, dict) and rope.get("rope_type") == "longrope":
            limit = min(limit, int(rope["original_max_position_embeddings"]))
    return limit


def _refused(model_type: object, name: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        "target",
        expected="layers of full or sliding attention",
        got=f"{model_type!r} ({name}): {reason}",
        remedy="Choose another target: text from this one could be silently wrong.",
    )
