"""Keys and values of tree rows: what is kept of a step, and what of it moves where."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

from ddtree.serving.step import Moves, Step, chain_of
from ddtree.serving.tree_keys import TreeKeys
from ddtree.types import DraftTree, Walk

NUM_ROWS = 24
# Rows of trees as a step has them: others between them, and gaps of different length.
ROWS = (2, 3, 4, 5, 9, 10, 11, 17, 18, 22)


def step_tensors(num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and slots of a step; every number says whose it is."""
    row = torch.arange(num_rows, dtype=torch.float32)
    keys = row[:, None, None] + torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])
    values = 100 + row[:, None, None] + torch.tensor([[0.1, 0.2], [0.3, 0.4]])
    slots = torch.tensor(Random(3).sample(range(1000), num_rows))
    return keys, values, slots


def test_what_moves_are_the_sources_keys_and_values_to_the_targets_slots() -> None:
    keys, values, slots = step_tensors(NUM_ROWS)
    kept = TreeKeys.of(keys, values, slots, torch.tensor(ROWS))
    sources, targets = np.array([5, 11, 10, 22, 18]), np.array([3, 9, 10, 17, 2])
    found = kept.moved(Moves(sources, targets))
    for got, expected in zip(found, (keys[sources], values[sources], slots[targets]), strict=True):
        assert torch.equal(got, expected)
        assert got.dtype == expected.dtype


@pytest.mark.parametrize("seed", range(20))
def test_any_rows_are_found_wherever_they_lie_in_the_step(seed: int) -> None:
    random = Random(seed)
    keys, values, slots = step_tensors(NUM_ROWS)
    rows = sorted(random.sample(range(NUM_ROWS), random.randrange(1, NUM_ROWS + 1)))
    kept = TreeKeys.of(keys, values, slots, torch.tensor(rows))
    sources, targets = (np.array(random.sample(rows, (len(rows) + 1) // 2)) for _ in range(2))
    got_keys, got_values, got_slots = kept.moved(Moves(sources, targets))
    assert torch.equal(got_keys, keys[sources])
    assert torch.equal(got_values, values[sources])
    assert torch.equal(got_slots, slots[targets])


def test_what_is_kept_outlives_the_memory_that_it_was_made_in() -> None:
    keys, values, slots = step_tensors(NUM_ROWS)
    before = tuple(each[list(ROWS)].clone() for each in (keys, values, slots))
    kept = TreeKeys.of(keys, values, slots, torch.tensor(ROWS))
    for each in (keys, values, slots):
        each.fill_(-1)
    for got, expected in zip((kept.keys, kept.values, kept.slots), before, strict=True):
        assert torch.equal(got, expected)


def test_slots_of_padding_behind_the_steps_rows_are_no_matter() -> None:
    """An engine's buffers are as long as its longest step, and so may what it hands over be."""
    keys, values, slots = step_tensors(NUM_ROWS)
    longer = torch.cat([slots, torch.full((8,), -1)])
    kept = TreeKeys.of(keys, values, longer, torch.tensor(ROWS))
    _, _, got = kept.moved(Moves(np.array([5]), np.array([3])))
    assert torch.equal(got, slots[[3]])


def test_moved_keys_make_a_cache_as_plain_decoding_would_have_it() -> None:
    """Two trees with a chunk of a prompt before each and a chain between: paths lie in order."""
    parents = np.array([-1, 0, 0, 1, 2, 4], np.int32)
    tree = DraftTree(
        np.array([9, 10, 20, 11, 21, 22]),
        parents,
        np.array([0, 1, 1, 2, 2, 3], np.int32),
        np.array([-1, 0, 1, 0, 0, 0], np.int32),
        np.zeros(6, np.float32),
    )
    step = Step(
        trees=(chain_of(0, ()), tree, chain_of(0, (1, 2)), chain_of(0, ()), tree),
        root_rows=np.array([2, 3, 9, 14, 15]),
        root_positions=np.array([2, 70, 8, 33, 5]),
        num_rows=21,
        decoding=(1, 2, 4),
    )
    paths = ((), (2, 4, 5), (1,), (), (1, 3))
    walks = [Walk(path=path, token_ids=(0,), finish_reason=None) for path in paths]
    keys, values, slots = step_tensors(step.num_rows)
    cache = dict(zip(slots.tolist(), range(step.num_rows), strict=True))
    kept = TreeKeys.of(keys, values, slots, torch.from_numpy(step.branching_rows))
    moves = step.moves(walks)
    assert moves is not None
    moved_keys, moved_values, moved_slots = kept.moved(moves)
    rows = [int(key[0, 0]) for key in moved_keys]
    assert rows == [int(value[0, 0]) - 100 for value in moved_values]
    cache.update(zip(moved_slots.tolist(), rows, strict=True))
    for root_row, path in zip(step.root_rows.tolist(), paths, strict=True):
        found = [cache[int(slots[root_row + place])] for place in range(len(path) + 1)]
        assert found == [root_row + node for node in (0, *path)]
