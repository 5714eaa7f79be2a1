"""Which candidates the batched builder looks at, and where it finds what is said of them.

All of it follows from sizes alone, so it is made once and kept on the device. Why these candidates
are enough is said in `batched`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Int32, Int64
from numpy import ndarray
from torch import Tensor

# int64 is the one word that every torch device and compiler can shift, mask, gather and index
# with (unsigned words lack kernels), and a tree of 63 nodes and its root fit into one.
WORD_BITS = 64


@dataclass(frozen=True)
class Plan:
    """What follows from (B, L, K) and the kind of draft alone, on the device.

    C candidates by number, the root being 0; they fill S >= N slots: the root, the kept ones of
    each level in order, and nothings up to N.

    Args:
        level_sizes: candidates of each depth, the root's included.
        nums_kept: how many slots they get, from depth 1 on.
        num_slots: S.
        parent_places: the parent's place in its level, from 0.
        parent_slots: the parent's slot.
        cells: 0 for the root's token, else 1 + index into the flat [L, K] tables. In a first-order
            draft the flat [L - 1, K, K] ones follow, and the cell is that behind rank 0.
        cells_per_parent: from there to the cell behind the next rank.
        depths: [C].
        ranks: [C].
        rootless_parents: the parents of rows that have none: -1 for the root, else the row.
        own_words: the bit of each row.
    """

    level_sizes: tuple[int, ...]
    nums_kept: tuple[int, ...]
    num_slots: int
    parent_places: Int64[Tensor, " C"]
    parent_slots: Int64[Tensor, " C"]
    cells: Int64[Tensor, " C"]
    cells_per_parent: int
    depths: Int32[Tensor, " C"]
    ranks: Int32[Tensor, " C"]
    rootless_parents: Int64[Tensor, " N"]
    own_words: Int64[Tensor, "N W"]


def make_plan(
    budget: int, num_depths: int, num_ranks: int, is_first_order: bool, device: torch.device
) -> Plan:
    """Number the candidates. A node at depth d has d - 1 above it, so B depths are enough."""
    places, slots, cells = [np.zeros(1, np.int64)], [np.zeros(1, np.int64)], [np.zeros(1, np.int64)]
    depths, ranks = [np.zeros(1, np.int32)], [np.full(1, -1, np.int32)]
    nums_kept: list[int] = []
    num_slots = num_parents = 1
    for depth in range(1, min(num_depths, budget) + 1):
        counts = _counts(depth, num_parents, num_ranks, budget, is_first_order)
        place = np.repeat(np.arange(num_parents), counts)
        rank = np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts)
        places.append(place)
        slots.append(num_slots - num_parents + place)
        row = depth - 1
        if is_first_order and depth > 1:
            row = num_depths + (depth - 2) * num_ranks
        cells.append(1 + row * num_ranks + rank)
        depths.append(np.full(len(place), depth, np.int32))
        ranks.append(rank.astype(np.int32))
        num_parents = min(len(place), budget)
        nums_kept.append(num_parents)
        num_slots += num_parents
    num_rows = budget + 1
    rows = np.arange(num_rows)
    own_words = np.zeros((num_rows, budget // WORD_BITS + 1), np.uint64)
    own_words[rows, rows // WORD_BITS] = np.uint64(1) << (rows % WORD_BITS).astype(np.uint64)

    def put(table: ndarray) -> Tensor:
        return torch.from_numpy(table).to(device)

    return Plan(
        level_sizes=tuple(map(len, places)),
        nums_kept=tuple(nums_kept),
        num_slots=max(num_slots, num_rows),
        parent_places=put(np.concatenate(places)),
        parent_slots=put(np.concatenate(slots)),
        cells=put(np.concatenate(cells)),
        cells_per_parent=num_ranks,
        depths=put(np.concatenate(depths)),
        ranks=put(np.concatenate(ranks)),
        rootless_parents=put(np.where(rows > 0, rows, -1)),
        own_words=put(own_words.view(np.int64)),
    )


def _counts(
    depth: int, num_parents: int, num_ranks: int, budget: int, is_first_order: bool
) -> Int64[ndarray, " P"]:
    """How many ranks behind each parent of the depth before can be among the best B nodes."""
    places = np.arange(1, num_parents + 1)
    most = budget + 2 - depth - places if is_first_order else budget // places
    return most.clip(0, num_ranks)


_remembered_plan = lru_cache(maxsize=64)(make_plan)


# torch.compile calls this while it traces and keeps the plan as a constant of the graph.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def cached_plan(
    budget: int, num_depths: int, num_ranks: int, is_first_order: bool, device: torch.device
) -> Plan:
    """The same, remembered."""
    return _remembered_plan(budget, num_depths, num_ranks, is_first_order, device)
