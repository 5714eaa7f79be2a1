"""From samples to one training step: random anchors, and their blocks packed behind the context.

A block is [anchor token, mask, ..., mask]; its slot k is to say the token at anchor + k. All blocks
of a response share one pass over its features. Who sees whom: a slot sees the context strictly
before its anchor and the slots of its own block (CHECKPOINTS A; arXiv 2602.06036).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from ddtree.train.samples import Sample
from ddtree.train.schedule import generator_of


@dataclass(frozen=True, kw_only=True)
class PackedBlocks:
    """The blocks of S sequences, A anchors each, L = b - 1 labels a block.

    Args:
        features: [S, T, F], padded at the end.
        anchors: [S, A], positions; 0 where a sequence has fewer than A.
        anchor_ids: [S, A], the tokens there.
        labels: [S, A, L], the tokens behind the anchor, as they stand in the text.
        valid: [S, A, L], False where the text had ended.
        top_ids: [S, A, L, k], the target's favourites at the same places.
        top_log_probs: their log-probabilities.
    """

    features: Float[Tensor, "S T F"]
    anchors: Int64[Tensor, "S A"]
    anchor_ids: Int64[Tensor, "S A"]
    labels: Int64[Tensor, "S A L"]
    valid: Bool[Tensor, "S A L"]
    top_ids: Int64[Tensor, "S A L k"]
    top_log_probs: Float[Tensor, "S A L k"]

    @property
    def num_blocks(self) -> int:
        """Blocks with at least one label."""
        return int(self.valid[..., 0].sum())

    def to(self, device: torch.device) -> PackedBlocks:
        """The same on another device."""
        moved = {name: getattr(self, name).to(device) for name in self.__dataclass_fields__}
        return PackedBlocks(**moved)


def choose_anchors(sample: Sample, num_anchors: int, *, seed: int, epoch: int) -> list[int]:
    """Distinct positions of response tokens with at least one token behind them, in order.

    They depend on the seed, the epoch and the sample alone, so a resumed run draws the same ones.
    """
    generator = generator_of(f"{seed} {epoch} {sample.index}")
    num_places = sample.num_response_tokens - 1
    places = torch.randperm(num_places, generator=generator)[:num_anchors]
    return sorted((places + sample.num_prompt_tokens).tolist())


def pack(
    samples: Sequence[Sample], anchors: Sequence[Sequence[int]], num_depths: int
) -> PackedBlocks:
    """Lay out the blocks of some samples.

    Args:
        samples: S of them.
        anchors: positions for each; lists of different lengths are padded.
        num_depths: L.
    """
    num_samples, most_anchors = len(samples), max(map(len, anchors))
    # Features beyond the last anchor are seen by nobody.
    length = max(places[-1] for places in anchors)
    num_ranks = samples[0].top_ids.shape[1]
    shape = (num_samples, most_anchors, num_depths)
    features = torch.zeros((num_samples, length, samples[0].features.shape[1]))
    batch = PackedBlocks(
        features=features,
        anchors=torch.zeros(shape[:2], dtype=torch.int64),
        anchor_ids=torch.zeros(shape[:2], dtype=torch.int64),
        labels=torch.zeros(shape, dtype=torch.int64),
        valid=torch.zeros(shape, dtype=torch.bool),
        top_ids=torch.zeros((*shape, num_ranks), dtype=torch.int64),
        top_log_probs=torch.zeros((*shape, num_ranks)),
    )
    for row, (sample, places) in enumerate(zip(samples, anchors, strict=True)):
        _fill_row(batch, row, sample, torch.tensor(places))
    return batch


def _fill_row(batch: PackedBlocks, row: int, sample: Sample, places: Tensor) -> None:
    """Write one sample's context and blocks, in place."""
    num_context = int(places[-1])
    batch.features[row, :num_context] = sample.features[:num_context].float()
    num_anchors, num_depths = len(places), batch.labels.shape[2]
    total = sample.token_ids.shape[0]
    positions = places[:, None] + torch.arange(1, num_depths + 1)[None]
    inside = positions.clamp(max=total - 1)
    batch.anchors[row, :num_anchors] = places
    batch.anchor_ids[row, :num_anchors] = sample.token_ids[places].long()
    batch.labels[row, :num_anchors] = sample.token_ids[inside].long()
    batch.valid[row, :num_anchors] = positions < total
    in_response = inside - sample.num_prompt_tokens
    batch.top_ids[row, :num_anchors] = sample.top_ids[in_response].long()
    batch.top_log_probs[row, :num_anchors] = sample.top_log_probs[in_response].float()


def slot_positions(anchors: Int64[Tensor, "S A"], block_size: int) -> Int64[Tensor, "S Q"]:
    """The position of each slot, Q = A b, block by block."""
    offsets = torch.arange(block_size, device=anchors.device)
    return (anchors[..., None] + offsets).flatten(1)


def packed_mask(
    anchors: Int64[Tensor, "S A"],
    context_length: int,
    block_size: int,
    *,
    window: int | None,
    causal: bool,
) -> Bool[Tensor, "S 1 Q T+Q"]:
    """Which slot sees which context position and which slot, in one kind of drafter layer.

    Args:
        anchors: position of each block's first slot.
        context_length: T.
        block_size: b.
        window: sliding window or None.
        causal: whether a slot sees only earlier slots of its block.
    """
    device = anchors.device
    queries = slot_positions(anchors, block_size)
    context = torch.arange(context_length, device=device).expand(anchors.shape[0], -1)
    keys = torch.cat([context, queries], dim=1)
    distance = queries[:, :, None] - keys[:, None, :]
    block_of_slot = torch.arange(queries.shape[1], device=device) // block_size
    before_anchor = context[:, None, :] < anchors.repeat_interleave(block_size, 1)[:, :, None]
    same_block = (block_of_slot[:, None] == block_of_slot[None]).expand(anchors.shape[0], -1, -1)
    seen = torch.cat([before_anchor, same_block], dim=2)
    if window is not None:
        seen = seen & (distance < window) & (-distance < window)
    if causal:
        seen = seen & (distance >= 0)
    return seen[:, None]
