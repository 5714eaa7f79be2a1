"""A tiny tokenizer, trained in the test, whose ids fit the tiny models."""

from __future__ import annotations

import functools

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.support.models import VOCAB_SIZE

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_TEXT = "the quick brown fox jumps over the lazy dog; user: assistant: system: hello world why not"


@functools.cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with 61 entries and a chat template; shared."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=["<|end|>"], show_progress=False
    )
    tokenizer.train_from_iterator([_TEXT] * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.chat_template = CHAT_TEMPLATE
    assert len(fast) <= VOCAB_SIZE
    return fast
