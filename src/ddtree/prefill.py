"""Stage 0: read the prompt. Everything but the first new token is in the caches afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ddtree.cache.hf import TargetCache
from ddtree.draft import Drafter, DraftSession
from ddtree.models.target import Target

# Bounds the features and activations held at once; large enough to keep any device busy.
CHUNK_TOKENS = 1024


@dataclass
class Context:
    """Everything committed of one request; mutated by `commit` alone.

    Args:
        cache: the target's keys and values of positions [0, T).
        session: the drafter's context of the same positions, or None without a drafter.
        token_ids: prompt and delivered tokens, T + 1 of them between rounds: the last is the root.
        layer_ids: the target layers that the drafter wants.
    """

    cache: TargetCache
    session: DraftSession | None
    token_ids: list[int]
    layer_ids: tuple[int, ...]

    @property
    def root_id(self) -> int:
        """The last token that is already decided; not yet in the target's KV cache."""
        return self.token_ids[-1]


@dataclass(frozen=True)
class Prefilled:
    """The context after the prompt, and the logits [1, V] for the first new token."""

    context: Context
    logits: Float[Tensor, "1 V"]


@torch.inference_mode()
def prefill(
    target: Target, drafter: Drafter | None, prompt_ids: Sequence[int], capacity: int
) -> Prefilled:
    """Feed the prompt through the target, in chunks, and its features to the drafter.

    Args:
        target: the target model.
        drafter: or None for plain decoding.
        prompt_ids: at least one token.
        capacity: positions to make room for.
    """
    layer_ids = tuple(drafter.layer_ids) if drafter else ()
    context = Context(
        target.new_cache(capacity),
        drafter.start(capacity) if drafter else None,
        list(prompt_ids),
        layer_ids,
    )
    ids = torch.tensor(context.token_ids, dtype=torch.int64, device=target.device)
    for chunk in torch.split(ids, CHUNK_TOKENS):
        output = target.prefill(chunk, context.cache, capture=layer_ids)
        if context.session is not None:
            context.session.extend(output.features, chunk)
    return Prefilled(context, output.logits)
