"""Writing a drafter in z-lab's DFlash format, whole or not at all (CHECKPOINTS A and C).

Knows no training: what it writes is what `load_drafter` reads and other engines serve.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ddtree.errors import CacheWriteError, OptionError, first_line, listed
from ddtree.models.draft_vocabulary import VOCABULARY_FILE, checked_token_ids
from ddtree.models.drafter_config import DFLASH, DFLASH2, DFLASH2_KEYS, DrafterConfig
from ddtree.models.drafter_network import DFlashNetwork
from ddtree.models.drafter_weights import TRANSITIONS_FILE, TRANSITIONS_PREFIX, check_tensors

PROVENANCE_FILE = "provenance.json"
_WEIGHTS_FILE = "model.safetensors"
_WRITTEN = frozenset(
    {
        "config.json",
        _WEIGHTS_FILE,
        VOCABULARY_FILE,
        PROVENANCE_FILE,
        Path(TRANSITIONS_FILE).parts[0],
    }
)


def save_drafter(
    network: DFlashNetwork,
    config: DrafterConfig,
    folder: Path,
    *,
    draft_token_ids: Sequence[int] | None,
    provenance: Mapping[str, object],
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a drafter as a folder that appears, or replaces an older drafter, when it is whole.

    A process that is killed leaves a sibling `<folder>.tmp-*` behind, with what it wrote so far; if
    it was hit between the two renames of an exchange, with the older drafter and the new one.

    Args:
        network: on any device, in any dtype.
        config: what the network was made from.
        folder: where; its parents are made if they are not there.
        draft_token_ids: the Vd tokens that it can propose, ascending; None for all. `config` may
            leave Vd open.
        provenance: how it came about, as JSON; for people.
        dtype: of the weights in the file.

    Raises:
        OptionError: `folder` holds other files too, or see `config_json`.
        CheckpointError: tensors or token ids that are not those of `config`.
        CacheWriteError: no room or no permission.
    """
    name = str(folder)
    if draft_token_ids is not None and config.draft_vocab_size is None:
        config = replace(config, draft_vocab_size=len(draft_token_ids))
    declared = {**config_json(config), "torch_dtype": str(dtype).removeprefix("torch.")}
    content: dict[str, object] = {"config.json": declared, PROVENANCE_FILE: dict(provenance)}
    if config.draft_vocab_size is not None:
        ids = [] if draft_token_ids is None else list(draft_token_ids)
        source = f"{name}/{VOCABULARY_FILE}"
        checked_token_ids(ids, config.draft_vocab_size, config.vocab_size, source)
        content[VOCABULARY_FILE] = {"token_ids": ids}
    texts = {file: json.dumps(value, indent=1) + "\n" for file, value in content.items()}
    tensors = {
        key: value.detach().to("cpu", dtype, copy=True).contiguous()
        for key, value in network.state_dict().items()
    }
    with torch.device("meta"):
        check_tensors(tensors, DFlashNetwork(config), name)
    selector = [key for key in tensors if key.startswith(TRANSITIONS_PREFIX)]
    ours = {} if config.is_dflash2 else {key: tensors.pop(key) for key in selector}
    write_folder(folder, texts, tensors, {TRANSITIONS_FILE: ours} if ours else {})


def write_folder(
    folder: Path,
    texts: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    beside: Mapping[str, Mapping[str, Tensor]] = MappingProxyType({}),
) -> None:
    """Write a checkpoint's files, as `save_drafter` promises: whole or not at all.

    Args:
        folder: where.
        texts: content by file name.
        tensors: of `model.safetensors`; no two may share memory.
        beside: of further safetensors files, by their path in the folder.

    Raises:
        OptionError: `folder` holds other files too.
        CacheWriteError: no room or no permission.
    """
    try:
        _check_replaceable(folder)
        _write(folder, texts, {_WEIGHTS_FILE: tensors, **beside})
    except (OSError, SafetensorError) as error:
        raise CacheWriteError(
            str(folder),
            expected="a folder that can be written, with room for the drafter",
            got=first_line(error),
            remedy="Free some space, or name another folder; an older drafter there is untouched.",
        ) from error


def _check_replaceable(folder: Path) -> None:
    """A folder is replaced only if nothing is lost but an older drafter."""
    others = sorted({path.name for path in folder.iterdir()} - _WRITTEN) if folder.exists() else []
    if others:
        raise OptionError(
            "folder",
            expected="a new folder, or one with nothing but a drafter of one file in it",
            got=f"{folder} with {listed(others)}",
            remedy="Name another folder, or move these files away.",
        )


def _write(
    folder: Path, texts: Mapping[str, str], tensors: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Write beside `folder`, then move into place."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f"{folder.name}.tmp-", dir=folder.parent, ignore_cleanup_errors=True
    ) as temp:
        made, older = Path(temp) / "made", Path(temp) / "older"
        made.mkdir()
        for file, text in texts.items():
            (made / file).write_text(text, encoding="utf-8")
        for file, content in tensors.items():
            weights = made / file
            weights.parent.mkdir(exist_ok=True)
            save_file(dict(content), weights, metadata={"format": "pt"})
            # safetensors makes files that only their owner can read.
            weights.chmod((made / "config.json").stat().st_mode)
        try:
            if folder.exists():
                folder.rename(older)
            made.rename(folder)
        finally:
            if older.exists() and not folder.exists():
                older.rename(folder)


def config_json(config: DrafterConfig) -> dict[str, Any]:
    """The `config.json` that `parse_drafter_config` reads back as `config`.

    The keys are z-lab's, with Qwen3's at the top, so that transformers' Qwen3Config reads it too.
    What is not declared, or is as the format has it by default, is left out.

    Raises:
        OptionError: what the format has no words for: slots that predict the position after their
            own, some windows and causality, a draft vocabulary of DFlash2's.
    """
    if config.sample_from_anchor:
        raise _unwritable("sample_from_anchor", "False", config)
    depth = config.num_target_layers
    return {
        "architectures": [DFLASH2 if config.is_dflash2 else DFLASH],
        "model_type": "qwen3",
        "block_size": config.block_size,
        **({} if depth is None else {"num_target_layers": depth}),
        "dflash_config": _dflash_config(config),
        **decoder_json(config),
    }


def decoder_json(config: DrafterConfig) -> dict[str, Any]:
    """The keys that Qwen3 has words for: the decoder's sizes, its RoPE and its windows.

    Raises:
        OptionError: windows of several sizes.
    """
    rope = dict(config.rope_parameters)
    theta = rope.pop("rope_theta")
    is_plain_rope = rope == {"rope_type": "default"}
    raw = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": theta,
        "tie_word_embeddings": True,
        "max_window_layers": config.num_layers,
        "initializer_range": 0.02,
        "use_cache": True,
    }
    declared = {key: value for key, value in raw.items() if value is not None}
    return {
        **declared,
        "rope_scaling": None if is_plain_rope else rope,
        **_window_keys(config),
    }


def _dflash_config(config: DrafterConfig) -> dict[str, Any]:
    """What Qwen3 has no words for; defaults are left out."""
    raw: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }
    if config.causal != tuple(window is not None for window in config.windows):
        if len(set(config.causal)) > 1:
            raise _unwritable("causal", "one value for all layers, or sliding layers alone", config)
        raw["is_causal"] = config.causal[0]
    for key, default in (
        ("output_multiplier", 1.0),
        ("final_logit_softcapping", None),
        ("input_embedding_scale", 1.0),
        ("draft_vocab_size", None),
    ):
        value = getattr(config, key)
        if value != default:
            raw[key] = value
    if config.is_dflash2:
        if config.draft_vocab_size is not None:
            wanted = "None, since DFlash2's codebooks have a row per token"
            raise _unwritable("draft_vocab_size", wanted, config)
        raw.update({key: getattr(config, key) for key in DFLASH2_KEYS})
    elif config.selector_rank is not None:
        # Not DFlash2's keys: by those, loaders of others would look for its convolutions.
        raw["transition_rank"] = config.selector_rank
        raw["transition_top_k"] = config.selector_top_k
    return raw


def _window_keys(config: DrafterConfig) -> dict[str, Any]:
    sizes = {window for window in config.windows if window is not None}
    if len(sizes) > 1:
        raise _unwritable("windows", "one size for all sliding layers", config)
    return {
        "layer_types": [
            "full_attention" if window is None else "sliding_attention" for window in config.windows
        ],
        "sliding_window": next(iter(sizes), None),
        "use_sliding_window": bool(sizes),
    }


def _unwritable(key: str, expected: str, config: DrafterConfig) -> OptionError:
    return OptionError(
        f"config.{key}",
        expected=expected,
        got=str(getattr(config, key)),
        remedy="z-lab's format has no words for it.",
    )
