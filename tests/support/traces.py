"""Generations of tiny models, recorded."""

from __future__ import annotations

from collections.abc import Sequence

from ddtree.config import DecodeConfig
from ddtree.pair import Pair
from ddtree.tracing.recording import Recording
from ddtree.tracing.trace import TracedGeneration
from ddtree.types import Generation


def recorded(
    pair: Pair,
    prompt_ids: Sequence[int],
    *,
    id: str = "0",
    num_ranks: int | None = 64,
    **options: object,
) -> tuple[TracedGeneration, Generation]:
    """Run and record one generation; `options` are those of `DecodeConfig`."""
    config = DecodeConfig(**options)
    recording = Recording(pair, config)
    *_, generation = pair.run(list(prompt_ids), config, observe=recording.observe)
    return recording.traced(generation, id=id, num_ranks=num_ranks), generation
