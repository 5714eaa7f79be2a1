"""Vision-language checkpoints: the text part alone is loaded, and says what the whole says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from ddtree.errors import UnsupportedModelError
from ddtree.models.loading import load_target, read_target_shape
from ddtree.pair import Pair
from tests.support import drafters
from tests.support.architectures import LAYERS_MIXED, SIZES, VOCAB_SIZE
from tests.support.models import greedy_reference

PROMPT = [(7 * i + 3) % 50 for i in range(14)]
NUM_NEW = 10
# The tokens that stand for images are the last of the vocabulary, and in no prompt.
_TEXT = {**SIZES, "head_dim": 8}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def _whole(name: str, text: dict[str, object], **options: object) -> PreTrainedModel:
    config = getattr(transformers, f"{name}Config")(text_config=text, **options)
    torch.manual_seed(4)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(0.2)
    model.generation_config.eos_token_id = None
    return model


WHOLE: dict[str, Callable[[], PreTrainedModel]] = {
    "gemma3": lambda: _whole(
        "Gemma3",
        {**_TEXT, **LAYERS_MIXED},
        vision_config=_VISION,
        mm_tokens_per_image=4,
        image_token_index=60,
        boi_token_index=59,
        eoi_token_index=58,
    ),
    "gemma4": lambda: _whole(
        "Gemma4",
        {
            **_TEXT,
            **LAYERS_MIXED,
            "pad_token_id": 0,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
        },
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
        },
        audio_config=None,
        # Beyond the vocabulary: a text that said one would go on otherwise in the whole model.
        image_token_id=1000,
        video_token_id=1001,
        audio_token_id=1002,
    ),
    "mistral3": lambda: _whole(
        "Mistral3",
        {**_TEXT, "model_type": "mistral", "sliding_window": None},
        vision_config={**_VISION, "model_type": "pixtral", "head_dim": 8},
        image_token_index=60,
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_the_text_part_alone_says_what_the_whole_model_says(name: str, tmp_path: Path) -> None:
    whole = WHOLE[name]()
    whole.save_pretrained(tmp_path)
    reference = greedy_reference(whole, PROMPT, NUM_NEW)
    assert len(set(reference)) > 2
    target = load_target(tmp_path, device="cpu")
    assert target.config.model_type == whole.config.text_config.model_type
    assert not [key for key in target.model.state_dict() if "vision" in key]
    assert read_target_shape(str(tmp_path)) == target.shape.__class__(
        name=str(tmp_path), hidden_size=32, num_layers=2, vocab_size=VOCAB_SIZE
    )
    script = PROMPT + reference
    drafter = drafters.right_at_rank(lambda p: p % 3, script, VOCAB_SIZE, layer_ids=(0, 1))
    for method in ("ar", "ddtree"):
        text = Pair(target, drafter).generate(
            PROMPT, method=method, budget=24, max_new_tokens=NUM_NEW
        )
        assert list(text.token_ids) == reference


def test_a_loaded_model_with_images_is_refused_with_the_way_out() -> None:
    with pytest.raises(UnsupportedModelError, match="its text part alone is loaded"):
        load_target(WHOLE["mistral3"]())


def test_one_whose_text_part_has_no_class_of_its_own_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl"}')
    with pytest.raises(UnsupportedModelError, match="no causal LM of its text part"):
        load_target(tmp_path, allow_untested=True)
