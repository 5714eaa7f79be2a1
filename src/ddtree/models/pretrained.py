"""Models and tokenizers as transformers reads them, and what it cannot read as errors of ours.

Knows no target and no drafter: a PARD drafter is read by the same three functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ddtree.attention.backends import GROUPED
from ddtree.errors import CheckpointError, first_line, listed

# How transformers fails on values that it does not check itself.
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError)


def parse_model_config(folder: Path, raw: Mapping[str, object], what: str) -> Any:
    """The configuration of a folder.

    Args:
        folder: of the model.
        raw: its `config.json`.
        what: "target" or "drafter" and its name, for messages.

    Raises:
        CheckpointError: values that the architecture cannot have.
    """
    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, StrictDataclassError, *_MALFORMED) as error:
        raise CheckpointError(
            f"{what}: config.json",
            expected=f"the configuration of a {raw['model_type']} model",
            got=" ".join(str(error).split()),
            remedy="Download the file again.",
        ) from error


def read_model(
    folder: Path, what: str, dtype: torch.dtype, reader: type = AutoModelForCausalLM
) -> PreTrainedModel:
    """The causal language model of a folder, on the CPU, with our attention.

    Args:
        folder: of the model.
        what: "target" or "drafter" and its name, for messages.
        dtype: of the weights.
        reader: the library's class for models of this kind.

    Raises:
        CheckpointError: unreadable weights, or tensors missing, left over or misshapen; names them.
    """
    try:
        model, info = reader.from_pretrained(  # type: ignore[attr-defined]
            folder,
            dtype=dtype,
            attn_implementation=GROUPED,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # an error of ours, which names them
        )
    except (OSError, SafetensorError, RuntimeError, ImportError, *_MALFORMED) as error:
        raise CheckpointError(
            what,
            expected="readable weights (*.safetensors) of the declared shapes",
            got=f"{type(error).__name__}: {first_line(error)}",
            remedy="Download the checkpoint again, or check config.json against it.",
        ) from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            raise CheckpointError(
                what,
                expected="exactly the tensors of its architecture",
                got=f"{kind.replace('_', ' ')}: {listed(map(str, info[kind]))}",
                remedy="transformers would fill them at random; fix the checkpoint.",
            )
    return model


def read_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer beside a model; None where there are no tokenizer files at all.

    Raises:
        CheckpointError: files that transformers cannot read.
    """
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if not any((folder / name).exists() for name in names):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, *_MALFORMED) as error:
        raise CheckpointError(
            f"tokenizer in {folder}",
            expected="tokenizer files that transformers can read",
            got=first_line(error),
            remedy="Download them again, or remove them to work with token ids alone.",
        ) from error
