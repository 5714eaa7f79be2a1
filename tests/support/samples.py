"""Training samples of a tiny target, made by its own prefill."""

from __future__ import annotations

import torch

from ddtree.models.target import Target
from ddtree.train.samples import Sample, favourites, to_half


def sample_of(
    target: Target, token_ids: list[int], num_prompt_tokens: int, index: int, layer_ids: list[int]
) -> Sample:
    """What stage features would write for a text."""
    ids = torch.tensor(token_ids)
    num_new = len(token_ids) - num_prompt_tokens
    with torch.inference_mode():
        seen = ids[:-1]
        output = target.prefill(
            seen, target.new_cache(len(seen)), capture=layer_ids, num_logits=num_new
        )
        top_ids, top_log_probs = favourites(output.logits.float())
    return Sample(
        index=index,
        token_ids=ids.to(torch.int32),
        num_prompt_tokens=num_prompt_tokens,
        features=to_half(output.features).clone(),
        top_ids=top_ids.clone(),
        top_log_probs=top_log_probs.clone(),
    )


def random_samples(target: Target, layer_ids: list[int], count: int) -> list[Sample]:
    """Samples of random texts of different lengths; the prompts differ too."""
    generator = torch.Generator().manual_seed(count)
    found = []
    for index in range(count):
        num_prompt_tokens, num_new = 3 + index % 4, 6 + 3 * (index % 5)
        ids = torch.randint(target.vocab_size, (num_prompt_tokens + num_new,), generator=generator)
        found.append(sample_of(target, ids.tolist(), num_prompt_tokens, index, layer_ids))
    return found
