"""The text part of a vision-language checkpoint, as a causal LM of its own.

transformers reads the whole checkpoint, by its own rules for names; the parts for images are then
let go. Knows no files.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

# A text model inside that has a causal LM of its own. Of the others below, transformers reads the
# text part alone by itself.
_WITH_TEXT_MODEL = ("gemma3", "gemma4", "mistral3")
WITH_TEXT_PART = (*_WITH_TEXT_MODEL, "qwen3_5", "qwen3_5_moe")


def text_config(config: Any) -> Any:
    """The configuration of the text part; of a text model, its own."""
    return config.get_text_config() if config.model_type in WITH_TEXT_PART else config


def reader_of(model_type: str) -> type:
    """The library's class that reads checkpoints of this type."""
    inside = model_type in _WITH_TEXT_MODEL
    reader: type = AutoModelForImageTextToText if inside else AutoModelForCausalLM
    return reader


def text_part(model: PreTrainedModel) -> PreTrainedModel:
    """The text part of a loaded model, sharing its weights; a text model comes back as it is."""
    if model.config.model_type not in _WITH_TEXT_MODEL:
        return model
    config = text_config(model.config)
    with torch.device("meta"):
        text = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    text.model = model.get_decoder()
    text.lm_head = model.get_output_embeddings()
    text.generation_config = model.generation_config
    return text.eval()
