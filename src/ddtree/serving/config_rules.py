"""What draft trees cannot be combined with in vLLM, as a table: one rule for each flag or target.

`compatibility.check_config` reads it. Knows neither vllm nor torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from ddtree.errors import BackendError, OptionError, UnsupportedModelError, UserError

# 16-bit and 32-bit floats; all else is quantised.
_KV_DTYPES = ("auto", "float16", "bfloat16", "float32")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One thing that must be so.

    `attribute` is a dotted path from vLLM's configuration; a path that is not there is a
    difference to the vLLM that this was written for, and an error of its own.
    """

    attribute: str
    argument: str
    fine: Callable[[object], bool]
    expected: str
    remedy: str
    error: type[UserError] = OptionError


def _is_off(value: object) -> bool:
    return not value


def _is_one(value: object) -> bool:
    return value == 1


def _is_value(wanted: object, value: object) -> bool:
    return value == wanted


def _is_full_attention(text_config: object) -> bool:
    """Whether no layer of a target forgets: no window, no chunks, no recurrence."""
    layer_types = getattr(text_config, "layer_types", None)
    if layer_types:
        return all(kind in ("full_attention", "attention") for kind in layer_types)
    return getattr(text_config, "sliding_window", None) is None


def _has_no_sinks(text_config: object) -> bool:
    names = ("attention_sink_bias", "add_swa_attention_sink_bias", "add_full_attention_sink_bias")
    has_bias = any(getattr(text_config, name, None) for name in names)
    return not has_bias and getattr(text_config, "model_type", None) != "gpt_oss"


def _parallel(attribute: str, flag: str) -> Rule:
    return Rule(
        attribute=f"parallel_config.{attribute}",
        argument=flag,
        fine=_is_one,
        expected="1 with draft trees",
        remedy=f"Leave {flag} out; --tensor-parallel-size works.",
    )


def _target(attribute: str, what: str, fine: Callable[[object], bool] = _is_off) -> Rule:
    return Rule(
        attribute=f"model_config.{attribute}",
        argument="MODEL",
        fine=fine,
        expected=f"a target without {what}",
        remedy="Serve another model, or this one without ddtree.",
        error=UnsupportedModelError,
    )


def _without(attribute: str, flag: str, what: str) -> Rule:
    return Rule(
        attribute=attribute,
        argument=flag,
        fine=_is_off,
        expected=f"no {what} with draft trees",
        remedy=f"Leave {flag} out.",
    )


def _speculative(attribute: str, wanted: object) -> Rule:
    said = "null" if wanted is None else f"{str(wanted).lower()}"
    return Rule(
        attribute=f"speculative_config.{attribute}",
        argument=f"--speculative-config {attribute}",
        fine=partial(_is_value, wanted),
        expected=f"{said} with draft trees",
        remedy=f"Leave {attribute} out.",
    )


RULES = (
    Rule(
        attribute="scheduler_config.async_scheduling",
        argument="--async-scheduling",
        fine=_is_off,
        expected="synchronous scheduling",
        remedy="Give --no-async-scheduling.",
    ),
    Rule(
        attribute="use_v2_model_runner",
        argument="VLLM_USE_V2_MODEL_RUNNER",
        fine=_is_off,
        expected="the V1 model runner",
        remedy="Set VLLM_USE_V2_MODEL_RUNNER=0 in the environment.",
    ),
    _parallel("pipeline_parallel_size", "--pipeline-parallel-size"),
    _parallel("data_parallel_size", "--data-parallel-size"),
    _parallel("prefill_context_parallel_size", "--prefill-context-parallel-size"),
    _parallel("decode_context_parallel_size", "--decode-context-parallel-size"),
    _without(
        "model_config.enable_prompt_embeds", "--enable-prompt-embeds", "prompts of embeddings"
    ),
    _without("parallel_config.enable_dbo", "--enable-dbo", "dual batch overlap"),
    _without("lora_config", "--enable-lora", "LoRA adapters"),
    _target("uses_mrope", "M-RoPE"),
    _target("is_multimodal_model", "images, sound or video"),
    _target("is_hybrid", "recurrent layers"),
    _target("has_inner_state", "recurrent layers"),
    _target("is_encoder_decoder", "an encoder"),
    _target("use_mla", "latent attention (MLA)"),
    _target("is_diffusion", "diffusion decoding"),
    _target("hf_text_config", "sliding-window or chunked layers", _is_full_attention),
    _target("hf_text_config", "attention sinks", _has_no_sinks),
    Rule(
        attribute="model_config.runner_type",
        argument="--runner",
        fine=partial(_is_value, "generate"),
        expected="generate",
        remedy="Draft trees are for models that generate text.",
    ),
    Rule(
        attribute="model_config.disable_cascade_attn",
        argument="--no-disable-cascade-attn",
        fine=bool,
        expected="no cascade attention with draft trees",
        remedy="Leave --no-disable-cascade-attn out.",
    ),
    Rule(
        attribute="cache_config.cache_dtype",
        argument="--kv-cache-dtype",
        fine=_KV_DTYPES.__contains__,
        expected=f"one of {', '.join(_KV_DTYPES)}: no quantised cache",
        remedy="Leave --kv-cache-dtype out.",
    ),
    _without("cache_config.kv_sharing_fast_prefill", "--kv-sharing-fast-prefill", "fast prefill"),
    _without("cache_config.kv_offloading_size", "--kv-offloading-size", "offloaded cache"),
    _without("kv_transfer_config", "--kv-transfer-config", "KV connector"),
    _without(
        "attention_config.backend_per_kind",
        "--attention-config backend_per_kind",
        "backend by kind of layer",
    ),
)

SPECULATIVE_RULES = (
    Rule(
        attribute="speculative_config.method",
        argument="--speculative-config method",
        fine=partial(_is_value, "dflash"),
        expected="dflash, whose drafter the trees are made from",
        remedy='Give --speculative-config \'{"method": "dflash", "model": ..., '
        '"num_speculative_tokens": 16}\'.',
    ),
    _speculative("disable_padded_drafter_batch", False),
    _speculative("use_heterogeneous_vocab", False),
    _speculative("num_speculative_tokens_per_batch_size", None),
    _speculative("rejection_sample_method", "standard"),
    _speculative("draft_sample_method", "greedy"),
    Rule(
        attribute="speculative_config.kv_cache_dtype",
        argument="--speculative-config kv_cache_dtype",
        fine=(None, *_KV_DTYPES).__contains__,
        expected=f"one of {', '.join(_KV_DTYPES)}: no quantised cache",
        remedy="Leave kv_cache_dtype out.",
    ),
)


def backend_rule(backends: Collection[str]) -> Rule:
    """An attention backend is left to vLLM, or is one of these, which know trees."""
    return Rule(
        attribute="attention_config.backend",
        argument="--attention-backend",
        fine=lambda value: value is None or getattr(value, "name", value) in backends,
        expected=backends_said(backends),
        remedy="Leave --attention-backend out.",
        error=BackendError,
    )


def logits_processors_rule(own: Collection[str]) -> Rule:
    """No custom logits processors but these, which are ours."""
    return Rule(
        attribute="model_config.logits_processors",
        argument="--logits-processors",
        fine=lambda value: all(name in own for name in (value or ())),  # type: ignore[attr-defined]
        expected="no custom logits processors with draft trees",
        remedy="Leave --logits-processors out.",
    )


def backends_said(backends: Collection[str]) -> str:
    """What is expected of an attention backend."""
    return f"one that knows trees: {', '.join(sorted(backends))}"
