"""The processors that transformers' own `generate` makes of options, in its own order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from tests.support.models import tiny_model


def library_processors(
    options: Mapping[str, object],
    num_prompt_tokens: int,
    own: Sequence[Callable[[Tensor, Tensor], Tensor]] = (),
) -> LogitsProcessorList:
    """Caught in the act: `generate` hands them to a decoding method that only looks.

    Args:
        options: by ddtree's names, `eos_token_id` beside them; greedy without a temperature.
        num_prompt_tokens: of the prompt.
        own: a user's processors.
    """
    caught: list[LogitsProcessorList] = []

    def look(model: object, input_ids: Tensor, logits_processor: object, **rest: object) -> Tensor:
        caught.append(logits_processor)
        return input_ids

    theirs = {name: value for name, value in options.items() if value}
    temperature = theirs.pop("temperature", None)
    if temperature is not None:
        # Top-k is 50 there unless it is switched off.
        theirs = {"top_k": 0, **theirs, "temperature": float(temperature), "do_sample": True}
    if bias := theirs.pop("logit_bias", None):
        theirs["sequence_bias"] = {(token,): float(value) for token, value in bias}
    if words := theirs.pop("bad_words_ids", None):
        theirs["bad_words_ids"] = [list(word) for word in words]
    if tokens := theirs.pop("suppress_tokens", None):
        theirs["suppress_tokens"] = list(tokens)
    if "eos_token_id" in theirs:
        theirs["pad_token_id"] = 0
    prompt = torch.ones(1, num_prompt_tokens, dtype=torch.int64)
    tiny_model("llama").generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=40,
        custom_generate=look,
        logits_processor=LogitsProcessorList(own),
        **{"do_sample": False, **theirs},
    )
    return caught[0]
