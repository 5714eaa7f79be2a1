"""Reading a DFlash `config.json`: z-lab's keys, checked, with refusal by name.

Keys are read as `dflash_config[key]` first, then at the top level (CHECKPOINTS A).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from ddtree.errors import CheckpointError, UnsupportedModelError

# RoPE types whose frequencies do not move with the length: cached keys stay right. With the numbers
# that each needs.
_ROPE_NEEDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
DFLASH, DFLASH2 = "DFlashDraftModel", "DFlash2DraftModel"
# What DFlash2 adds to `dflash_config`, all or none of it.
DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
# What no checkpoint comes near; beyond it torch would fail, or build layers for hours.
LARGEST_COUNT = 2**31
_MOST_LAYERS = _MOST_SLOTS = 1000
_FORMAT_REMEDY = "Give a DFlash checkpoint as it was published (docs/architecture.md, Drafters)."


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """What a DFlash checkpoint declares, in our own words.

    Args:
        block_size: b, slots of one pass, the root included.
        mask_token_id: row of the target's embedding that fills the undecided slots.
        target_layer_ids: 0-based target layers whose outputs are the features.
        num_target_layers: depth of the target it was made for, or None if not declared.
        hidden_size: D, the target's.
        intermediate_size: width of the MLP.
        num_layers: decoder layers of the drafter.
        num_heads: query heads.
        num_kv_heads: key-value heads.
        head_dim: width of a head.
        vocab_size: V of the target, or None if not declared.
        rms_norm_eps: epsilon of all norms.
        attention_bias: whether the attention projections have biases.
        max_position_embeddings: what the drafter's RoPE was scaled for.
        rope_parameters: the drafter's own RoPE, as transformers 5 writes it.
        windows: per layer, the sliding window or None for full attention.
        causal: per layer, whether slots see only earlier slots of the block.
        output_multiplier: factor on the logits.
        final_logit_softcapping: cap c of c * tanh(logits / c), or None.
        input_embedding_scale: factor on the block's embeddings.
        draft_vocab_size: Vd, how many of the target's tokens it can propose, or None for all.
        selector_rank: r of its transition head (DFlash2's selector), or None without one, see
            `models.transitions`.
        selector_top_k: candidates per depth that the transition head scores.
        conv_kernel_size: t, taps of DFlash2's convolutions, or None without them, see
            `models.dflash2`.
        conv_group_size: g, neighbouring channels that share their dynamic weights.
        sample_from_anchor: slot k predicts the position after its own, the root's slot included.
    """

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int | None
    rms_norm_eps: float
    attention_bias: bool
    max_position_embeddings: int
    rope_parameters: Mapping[str, Any]
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    input_embedding_scale: float = 1.0
    draft_vocab_size: int | None = None
    selector_rank: int | None = None
    selector_top_k: int = 16
    conv_kernel_size: int | None = None
    conv_group_size: int = 16
    sample_from_anchor: bool = False

    @property
    def first_slot(self) -> int:
        """The slot that predicts the position behind the root."""
        return 0 if self.sample_from_anchor else 1

    @property
    def is_dflash2(self) -> bool:
        """Whether it is of the format's second version, which has convolutions and a selector."""
        return self.conv_kernel_size is not None

    @property
    def num_depths(self) -> int:
        """L, the positions of one pass."""
        return self.block_size - self.first_slot


class _Keys:
    """Typed reading of the configuration, nested keys first."""

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self._top = raw
        nested = raw.get("dflash_config")
        self._nested: Mapping[str, Any] = nested if isinstance(nested, Mapping) else {}
        self._source = source

    def get(self, key: str) -> Any:
        value = self._nested.get(key)
        return self._top.get(key) if value is None else value

    def error(self, key: str, expected: str, got: object) -> CheckpointError:
        return CheckpointError(
            f"{self._source}: {key}", expected=expected, got=got, remedy=_FORMAT_REMEDY
        )

    def count(self, key: str, *, low: int = 1, high: int = LARGEST_COUNT) -> int:
        value = self.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise self.error(key, f"a whole number >= {low}", repr(value))
        if value > high:
            raise self.error(key, f"a whole number <= {high}", value)
        return value

    def optional_count(self, key: str) -> int | None:
        return None if self.get(key) is None else self.count(key)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        if not _is_positive(value):
            raise self.error(key, "a number > 0", repr(value))
        return float(value)

    def optional_flag(self, key: str) -> bool | None:
        value = self.get(key)
        if not isinstance(value, bool | None):
            raise self.error(key, "true or false", repr(value))
        return value


def _is_positive(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def parse_drafter_config(raw: Mapping[str, Any], source: str) -> DrafterConfig:
    """Read a DFlash configuration.

    Args:
        raw: the parsed `config.json`.
        source: the file, for messages.

    Raises:
        UnsupportedModelError: another format, or a variant that would load and be wrong.
        CheckpointError: a key missing or out of range.
    """
    keys = _Keys(raw, source)
    _refuse_other_formats(raw, keys, source)
    num_layers = keys.count("num_hidden_layers", high=_MOST_LAYERS)
    num_heads = keys.count("num_attention_heads")
    num_kv_heads = keys.count("num_key_value_heads")
    if num_heads % num_kv_heads:
        raise keys.error("num_key_value_heads", f"a divisor of {num_heads}", num_kv_heads)
    head_dim = keys.count("head_dim", low=2)
    if head_dim % 2:
        raise keys.error("head_dim", "an even number, for RoPE", head_dim)
    windows = _windows(keys, num_layers)
    cap = keys.get("final_logit_softcapping")
    # A head of ours has keys of its own, since it comes without the rest of DFlash2.
    head = "selector" if _is_dflash2(raw, keys) else "transition"
    selector_rank = keys.optional_count(f"{head}_rank")
    if selector_rank is not None and keys.get("draft_vocab_size") is None:
        keys.count("vocab_size")  # rows of its codebooks
    return DrafterConfig(
        block_size=keys.count("block_size", low=2, high=_MOST_SLOTS),
        mask_token_id=keys.count("mask_token_id", low=0),
        target_layer_ids=_layer_ids(keys, num_layers),
        num_target_layers=keys.optional_count("num_target_layers"),
        hidden_size=keys.count("hidden_size"),
        intermediate_size=keys.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=keys.optional_count("vocab_size"),
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        attention_bias=bool(keys.optional_flag("attention_bias")),
        max_position_embeddings=keys.optional_count("max_position_embeddings") or 32768,
        rope_parameters=_rope(keys),
        windows=windows,
        causal=_causal(keys, windows),
        output_multiplier=keys.number("output_multiplier", 1.0),
        final_logit_softcapping=None if cap is None else keys.number("final_logit_softcapping"),
        input_embedding_scale=keys.number("input_embedding_scale", 1.0),
        draft_vocab_size=keys.optional_count("draft_vocab_size"),
        selector_rank=selector_rank,
        selector_top_k=keys.optional_count(f"{head}_top_k") or 16,
        conv_kernel_size=keys.optional_count("conv_kernel_size"),
        conv_group_size=_group_size(keys),
    )


def _is_dflash2(raw: Mapping[str, Any], keys: _Keys) -> bool:
    """Whether it is DFlash2, which has all of its keys or none."""
    found = [key for key in DFLASH2_KEYS if keys.get(key) is not None]
    if not found and DFLASH2 not in (raw.get("architectures") or ()):
        return False
    beside = ", ".join(found) or f"architectures {DFLASH2}"
    for key in DFLASH2_KEYS:
        if key not in found:
            raise keys.error(key, f"a whole number >= 1, as DFlash2 has beside {beside}", "none")
    for key in ("transition_rank", "draft_vocab_size"):
        if keys.get(key) is not None:
            raise keys.error(key, f"no such key beside {beside}", repr(keys.get(key)))
    return True


def _group_size(keys: _Keys) -> int:
    """Channels that share a weight of DFlash2's convolutions."""
    size, hidden_size = keys.optional_count("conv_group_size"), keys.count("hidden_size")
    if size is not None and hidden_size % size:
        raise keys.error("conv_group_size", f"a divisor of hidden_size {hidden_size}", size)
    return size or 16


def _refuse_other_formats(raw: Mapping[str, Any], keys: _Keys, source: str) -> None:
    def refuse(what: str, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            "drafter",
            expected="a DFlash or DFlash2 checkpoint, Medusa heads or a PARD model",
            got=f"{what} in {source}",
            remedy=why,
        )

    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list):
        raise keys.error("architectures", "a list of names", repr(architectures))
    if "speculators_model_type" in raw:
        raise refuse(
            "the speculators format", "Load it with `load_drafter`, which reads both formats."
        )
    if "dflash_config" not in raw and not any(name in architectures for name in (DFLASH, DFLASH2)):
        raise refuse(
            f"architectures {architectures!r} without a dflash_config",
            "Check that --drafter names the drafter and not the target.",
        )
    if keys.get("projector_type") not in (None, "dflash"):
        raise refuse(f"projector_type {keys.get('projector_type')!r}", "Not supported yet.")
    if keys.get("quantization_config") is not None:
        raise refuse("quantization_config", "Quantised drafters are not supported; use bf16.")
    rope = keys.get("rope_parameters") or keys.get("rope_scaling")
    in_rope = rope.get("partial_rotary_factor") if isinstance(rope, Mapping) else None
    if any(f not in (None, 1) for f in (keys.get("partial_rotary_factor"), in_rope)):
        raise refuse("partial_rotary_factor", "Partial rotary drafters are not supported.")
    for key in ("attention_value_scale", "attention_sink_bias"):
        if keys.get(key) is not None:
            raise refuse(key, "This variant would load and be silently wrong.")
    for key in ("sample_from_anchor", "shift_label"):
        if keys.get(key) not in (None, False):
            raise refuse(key, "What it would shift in z-lab's format is not known.")
    if keys.get("hidden_act") not in (None, "silu"):
        raise refuse(f"hidden_act {keys.get('hidden_act')!r}", "Only silu is supported.")


def _layer_ids(keys: _Keys, num_layers: int) -> tuple[int, ...]:
    """The declared taps, or the rule by which older checkpoints left them out."""
    declared = keys.get("target_layer_ids")
    if declared is None:
        depth = keys.count("num_target_layers", low=5)
        if num_layers == 1:
            return (depth // 2,)
        return tuple(round(1 + i * (depth - 4) / (num_layers - 1)) for i in range(num_layers))
    whole = isinstance(declared, list) and all(type(i) is int and i >= 0 for i in declared)
    if not whole or not declared or len(set(declared)) != len(declared):
        raise keys.error("target_layer_ids", "a list of distinct 0-based layer ids", repr(declared))
    return tuple(declared)


def _windows(keys: _Keys, num_layers: int) -> tuple[int | None, ...]:
    """Sliding window per layer. `layer_types` decides; without it, `use_sliding_window` does."""
    layer_types = keys.get("layer_types")
    if layer_types is None:
        wanted = keys.optional_flag("use_sliding_window")
        sliding = wanted and keys.get("sliding_window") is not None
        layer_types = ["sliding_attention" if sliding else "full_attention"] * num_layers
    known = ("full_attention", "sliding_attention")
    listed = isinstance(layer_types, list) and len(layer_types) == num_layers
    if not listed or any(kind not in known for kind in layer_types):
        raise keys.error("layer_types", f"{num_layers} of {' or '.join(known)}", repr(layer_types))
    if "sliding_attention" not in layer_types:
        return (None,) * num_layers
    window = keys.count("sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _causal(keys: _Keys, windows: tuple[int | None, ...]) -> tuple[bool, ...]:
    declared = keys.optional_flag("is_causal")
    if declared is not None:
        return (declared,) * len(windows)
    return tuple(window is not None for window in windows)


def _rope(keys: _Keys) -> dict[str, Any]:
    """The drafter's own RoPE; it may differ from the target's in every number."""
    parameters = keys.get("rope_parameters") or keys.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise keys.error("rope_scaling", "an object or null", repr(parameters))
    merged = dict(parameters)
    merged.setdefault("rope_type", merged.pop("type", "default"))
    if "rope_theta" not in merged:
        merged["rope_theta"] = keys.number("rope_theta")
    rope_type = merged["rope_type"]
    if not isinstance(rope_type, str) or rope_type not in _ROPE_NEEDS:
        raise keys.error("rope_type", f"one of {', '.join(_ROPE_NEEDS)}", repr(rope_type))
    if any(isinstance(value, Mapping) for value in merged.values()):
        raise keys.error("rope_parameters", "one RoPE for all layers", repr(parameters))
    for key in ("rope_theta", *_ROPE_NEEDS[rope_type]):
        if not _is_positive(merged.get(key)):
            raise keys.error(f"{key} of RoPE {rope_type}", "a number > 0", repr(merged.get(key)))
    return merged
