"""Packed blocks of training give what the decoder's session gives for each block alone."""

from __future__ import annotations

import pytest
import torch

from ddtree.models.drafter import DFlashDrafter
from ddtree.train.fit import FrozenHead, hidden_of_blocks
from ddtree.train.packing import choose_anchors, pack, packed_mask
from ddtree.train.samples import Sample
from tests.support.drafters import feed
from tests.support.models import dflash_drafter, tiny_target
from tests.support.samples import random_samples

SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 5,
    "use_sliding_window": True,
}


def session_hidden(drafter: DFlashDrafter, sample: Sample, anchor: int) -> torch.Tensor:
    """Hidden states of the drafted slots, from the network that decodes."""
    session = drafter.start(64)
    feed(session, sample.features[:anchor].float())
    session._take_in()
    config = drafter.config
    ids = torch.full((config.block_size,), config.mask_token_id)
    ids[0] = int(sample.token_ids[anchor])
    block = drafter.target.embed(ids) * config.input_embedding_scale
    return drafter.network(block, session._stores)[1:]


@pytest.mark.parametrize("changes", [{}, SLIDING, {"is_causal": True}], ids=str)
@torch.inference_mode()
def test_every_packed_block_equals_the_decoders_pass(changes: dict[str, object]) -> None:
    target = tiny_target("llama")
    drafter = dflash_drafter(target, **changes)
    samples = random_samples(target, list(drafter.layer_ids), 3)
    anchors = [choose_anchors(sample, 4, seed=0, epoch=0) for sample in samples]
    batch = pack(samples, anchors, drafter.num_depths)
    hidden = hidden_of_blocks(drafter.network, FrozenHead.of(target, None), batch)
    for row, sample in enumerate(samples):
        for column, anchor in enumerate(anchors[row]):
            alone = session_hidden(drafter, sample, anchor)
            torch.testing.assert_close(hidden[row, column], alone, rtol=1e-4, atol=1e-5)


def test_labels_are_the_tokens_behind_the_anchor_and_end_with_the_text() -> None:
    target = tiny_target("llama")
    sample = random_samples(target, [0], 1)[0]
    total = sample.token_ids.shape[0]
    batch = pack([sample], [[total - 3]], 4)
    assert batch.anchor_ids[0, 0] == sample.token_ids[total - 3]
    assert batch.labels[0, 0, :2].tolist() == sample.token_ids[total - 2 :].tolist()
    assert batch.valid[0, 0].tolist() == [True, True, False, False]
    assert batch.top_ids[0, 0, 1].tolist() == sample.top_ids[-1].tolist()
    assert batch.num_blocks == 1


def test_a_block_sees_the_context_before_its_anchor_and_its_own_slots() -> None:
    mask = packed_mask(torch.tensor([[2, 3]]), 4, 2, window=None, causal=False)[0, 0].int()
    assert mask.tolist() == [
        [1, 1, 0, 0, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 1, 0, 0],
        [1, 1, 1, 0, 0, 0, 1, 1],
        [1, 1, 1, 0, 0, 0, 1, 1],
    ]


def test_a_sliding_causal_layer_sees_the_window_backwards_only() -> None:
    mask = packed_mask(torch.tensor([[3]]), 3, 3, window=3, causal=True)[0, 0].int()
    assert mask.tolist() == [[0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1]]


def test_anchors_are_distinct_response_positions_with_a_token_behind_them() -> None:
    sample = random_samples(tiny_target("llama"), [0], 1)[0]
    every = choose_anchors(sample, 100, seed=0, epoch=0)
    assert every == list(range(sample.num_prompt_tokens, sample.token_ids.shape[0] - 1))
    assert len(choose_anchors(sample, 2, seed=0, epoch=0)) == 2


def test_anchors_change_with_the_epoch_and_not_with_the_run() -> None:
    sample = random_samples(tiny_target("llama"), [0], 5)[4]
    drawn = [tuple(choose_anchors(sample, 4, seed=1, epoch=epoch)) for epoch in range(6)]
    assert drawn == [tuple(choose_anchors(sample, 4, seed=1, epoch=e)) for e in range(6)]
    assert len(set(drawn)) > 1
