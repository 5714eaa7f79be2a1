"""Draft trees of R requests at once, in tensors of fixed shape; node for node as in `reference`.

Runs on any device and never waits for it: no value decides a shape, a branch or an exception, so
the builder can be compiled whole and captured in a CUDA graph. The price is padding, and that bad
input is reported in `valid` and not raised. Knows no attention and no model.

How: level by level (DESIGN 3, builder 3). A level's candidates are the pairs (place of the parent
in its own level, rank), both from 1 here, with place * rank <= B; the best B of a level are kept,
then the best B of all levels. Costs (negated scores, never -0.0) take the place of scores.

Why that is the contract's order (score, depth, parent's place, rank):

- Candidates are numbered from 1 by (depth, place, rank), compared lexicographically, and sorted by
  the unique key (cost's bits, number): the bits of floats >= 0 order as the floats do, and no sort
  needs to be stable. Within a level the order is (score, place in the level above, rank), over
  all levels (score, depth, place in the level above, rank).
- The place in the level above may stand for the contract's place in the whole order: candidates
  of one depth have parents of one depth, and the whole order seen on one depth only is, as the
  depth is equal there, that level's order (by induction over depths).
- Nothing is lost. Rounded addition is monotone, so (place, rank) comes after all other (p, r) with
  p <= place and r <= rank: after place * rank - 1. The best B of all levels hold at most the best
  B of each, and with a node its parent, whose cost is no higher and whose depth is lower.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from operator import index

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int32, Int64
from numpy import ndarray
from torch import Tensor

from ddtree.errors import MarginalsError
from ddtree.types import DraftTree

# int64 is the one word that every torch device and compiler can shift, mask, gather and index
# with (unsigned words lack kernels), and a tree of 63 nodes and its root fit into one.
WORD_BITS = 64

# A key is cost bits * 2^32 + candidate number. Number 0 is the root, or nothing if the cost is inf.
_COST_UNIT = 1 << 32
_NOTHING = 0x7F800000 * _COST_UNIT


@dataclass(frozen=True)
class BatchedTrees:
    """Draft trees of R requests, each padded to N = B + 1 rows; real rows come first.

    A padding row has the root's token, depth 0 and rank -1, score -inf, itself as its parent, and
    only its own bit: it can be embedded, gathered and attended from, and no search for a child
    from a real row finds it. But for column 0, the root's -1, `parents` is safe to gather with.

    Args:
        token_ids: [R, N].
        parents: [R, N], see `DraftTree`.
        depths: [R, N].
        ranks: [R, N].
        log_probs: [R, N], the scores.
        num_rows: [R], real rows, the root included.
        valid: [R], False where the marginals were not legal (NaN, a log-prob above 0, a row out
            of order): that request's tree is its root alone.
        ancestor_words: [R, N, W], W = ceil(N / 64); bit j % 64 of word j // 64 is set where node j
            is the row's node or an ancestor of it.
    """

    token_ids: Int64[Tensor, "R N"]
    parents: Int32[Tensor, "R N"]
    depths: Int32[Tensor, "R N"]
    ranks: Int32[Tensor, "R N"]
    log_probs: Float32[Tensor, "R N"]
    num_rows: Int32[Tensor, " R"]
    valid: Bool[Tensor, " R"]
    ancestor_words: Int64[Tensor, "R N W"]

    def tree(self, request: int) -> DraftTree:
        """Copy one request's tree to the host, without its padding; waits for the device.

        Raises:
            MarginalsError: the request's marginals were not legal.
        """
        if not bool(self.valid[request]):
            raise MarginalsError(
                "marginals",
                expected="legal marginals in every request",
                got=f"illegal ones in request {request}",
                remedy="`HostMarginals.of` on this request's marginals says what and where.",
            )
        rows = slice(0, int(self.num_rows[request]))
        return DraftTree(
            self.token_ids[request, rows].cpu().numpy().copy(),
            self.parents[request, rows].cpu().numpy().copy(),
            self.depths[request, rows].cpu().numpy().copy(),
            self.ranks[request, rows].cpu().numpy().copy(),
            self.log_probs[request, rows].cpu().numpy().copy(),
        )


def build_trees(
    log_probs: Float32[Tensor, "R L K"],
    token_ids: Int64[Tensor, "R L K"],
    root_ids: Int64[Tensor, " R"],
    budget: int,
) -> BatchedTrees:
    """Build the draft tree of highest expected acceptance length of each request.

    The first call for a (B, L, K, device) copies index lists to the device: make it before a CUDA
    graph is captured, as warming up does.

    Args:
        log_probs: [R, L, K], L, K >= 1; per request as in `Marginals`.
        token_ids: [R, L, K].
        root_ids: [R], the tokens at node 0.
        budget: B >= 0, the most nodes besides the root, of every request.

    Returns:
        Trees of N = B + 1 rows on the device of `log_probs`; legality is told by `valid`.

    Raises:
        MarginalsError: shapes that do not belong together. Values never raise.

    Source: arXiv 2604.12989, Algorithm 1, level by level.

    >>> q = torch.tensor([[[0.6, 0.4], [0.9, 0.1]]])
    >>> trees = build_trees(q.log(), torch.tensor([[[7, 8], [5, 6]]]), torch.tensor([1]), budget=3)
    >>> trees.token_ids.tolist(), trees.parents.tolist()
    ([[1, 7, 5, 8]], [[-1, 0, 1, 0]])
    """
    if token_ids.shape != log_probs.shape or root_ids.shape != log_probs.shape[:1]:
        shapes = (tuple(tensor.shape) for tensor in (log_probs, token_ids, root_ids))
        raise MarginalsError(
            "marginals",
            expected="log_probs and token_ids of one shape [R, L, K], and root_ids [R]",
            got=", ".join(map(str, shapes)),
            remedy="Gather the token ids with the same top-k as the log-probs, one root each.",
        )
    num_requests, num_depths, num_ranks = log_probs.shape
    device = log_probs.device
    # Fake tensors (tracing, torch.export) must not end up in the cache of real ones.
    make_plan = _cached_plan if type(log_probs) is Tensor else _make_plan
    # index: where torch.compile made a size symbolic, because it changed once, use its value.
    plan = make_plan(index(budget), index(num_depths), index(num_ranks), device)
    # Detached: a plan made in inference mode could not be saved for a backward pass.
    log_probs_RLK = log_probs.detach().to(torch.float32)
    # Written so that NaN is False.
    is_sorted_RL = (log_probs_RLK[:, :, 1:] <= log_probs_RLK[:, :, :-1]).all(dim=2)
    valid_R = ((log_probs_RLK <= 0).all(dim=2) & is_sorted_RL).all(dim=1)
    costs_RLK = log_probs_RLK.abs().masked_fill(~valid_R[:, None, None], torch.inf)

    keys_RN, slots_RN = _best(costs_RLK, plan)
    costs_RN = (keys_RN >> 32).to(torch.int32).view(torch.float32)
    is_real_RN = costs_RN < torch.inf
    numbers_RN = (keys_RN & (_COST_UNIT - 1)).masked_fill(~is_real_RN, 0)

    # Where each kept candidate went; a parent is always among those that went somewhere.
    rows_N = torch.arange(budget + 1, device=device)
    place_of_slot_RS = slots_RN.new_zeros((num_requests, plan.num_slots)).scatter(
        1, slots_RN, rows_N.expand(num_requests, -1)
    )
    parents_RN = torch.where(
        numbers_RN > 0,
        place_of_slot_RS.gather(1, plan.parent_slots[numbers_RN]),
        plan.rootless_parents,
    )
    tokens_RX = torch.cat([root_ids[:, None], token_ids.flatten(1)], dim=1)
    return BatchedTrees(
        token_ids=tokens_RX.gather(1, plan.cells[numbers_RN]),
        parents=parents_RN.to(torch.int32),
        depths=plan.depths[numbers_RN],
        ranks=plan.ranks[numbers_RN],
        log_probs=(-costs_RN).masked_fill(costs_RN == 0, 0.0),  # never -0.0
        num_rows=is_real_RN.sum(dim=1).to(torch.int32),
        valid=valid_R,
        ancestor_words=_ancestor_words(parents_RN, plan),
    )


def expand_ancestors(ancestor_words: Int64[Tensor, "R N W"]) -> Bool[Tensor, "R N N"]:
    """Unpack `BatchedTrees.ancestor_words` to the mask of `geometry.ancestor_mask`, padded.

    Returns:
        [R, N, N]; real rows see their ancestors and themselves, never padding. A padding row sees
        itself alone: a softmax over no entries would be NaN, and NaN in a row nobody reads still
        spreads through reductions and caches.

    >>> expand_ancestors(torch.tensor([[[0b01], [0b11]]])).tolist()
    [[[True, False], [True, True]]]
    """
    columns_N = torch.arange(ancestor_words.shape[1], device=ancestor_words.device)
    words_RNN = ancestor_words[:, :, columns_N // WORD_BITS]
    return ((words_RNN >> (columns_N % WORD_BITS)) & 1).bool()


@dataclass(frozen=True)
class _Plan:
    """What follows from (B, L, K) alone, on the device.

    C candidates by number, the root being 0; they fill S >= N slots: the root, the kept ones of
    each level in order, and nothings up to N.

    Args:
        level_sizes: candidates of each depth, the root's included.
        nums_kept: how many slots they get, from depth 1 on.
        num_slots: S.
        parent_places: the parent's place in its level, from 0.
        parent_slots: the parent's slot.
        cells: 0 for the root's token, else 1 + index into the flat [L, K] tables.
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
    depths: Int32[Tensor, " C"]
    ranks: Int32[Tensor, " C"]
    rootless_parents: Int64[Tensor, " N"]
    own_words: Int64[Tensor, "N W"]


def _make_plan(budget: int, num_depths: int, num_ranks: int, device: torch.device) -> _Plan:
    """Number the candidates. A node at depth d has d - 1 above it, so B depths are enough."""
    places, slots, cells = [np.zeros(1, np.int64)], [np.zeros(1, np.int64)], [np.zeros(1, np.int64)]
    depths, ranks = [np.zeros(1, np.int32)], [np.full(1, -1, np.int32)]
    nums_kept: list[int] = []
    num_slots = num_parents = 1
    for depth in range(1, min(num_depths, budget) + 1):
        place, rank = _pairs(num_parents, num_ranks, budget)
        places.append(place)
        slots.append(num_slots - num_parents + place)
        cells.append(1 + (depth - 1) * num_ranks + rank)
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

    return _Plan(
        level_sizes=tuple(map(len, places)),
        nums_kept=tuple(nums_kept),
        num_slots=max(num_slots, num_rows),
        parent_places=put(np.concatenate(places)),
        parent_slots=put(np.concatenate(slots)),
        cells=put(np.concatenate(cells)),
        depths=put(np.concatenate(depths)),
        ranks=put(np.concatenate(ranks)),
        rootless_parents=put(np.where(rows > 0, rows, -1)),
        own_words=put(own_words.view(np.int64)),
    )


def _pairs(
    num_parents: int, num_ranks: int, budget: int
) -> tuple[Int64[ndarray, " C"], Int64[ndarray, " C"]]:
    """(place, rank), both from 0, with (place + 1) * (rank + 1) <= B; in lexicographic order."""
    counts = np.minimum(budget // np.arange(1, num_parents + 1), num_ranks)
    place = np.repeat(np.arange(num_parents), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    return place, np.arange(len(place)) - first


_remembered_plan = lru_cache(maxsize=64)(_make_plan)


# torch.compile calls this while it traces and keeps the plan as a constant of the graph.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _cached_plan(budget: int, num_depths: int, num_ranks: int, device: torch.device) -> _Plan:
    return _remembered_plan(budget, num_depths, num_ranks, device)


def _best(
    costs_RLK: Float32[Tensor, "R L K"], plan: _Plan
) -> tuple[Int64[Tensor, "R N"], Int64[Tensor, "R N"]]:
    """Keys of the root and the best B candidates, in order, and the slot that each came from."""
    num_rows = plan.rootless_parents.shape[0]
    costs_RX = torch.cat([torch.zeros_like(costs_RLK[:, 0, :1]), costs_RLK.flatten(1)], dim=1)
    steps_RC = costs_RX.index_select(1, plan.cells)
    numbers_C = torch.arange(steps_RC.shape[1], device=steps_RC.device)
    sizes = list(plan.level_sizes)
    _, *places = torch.split(plan.parent_places, sizes)
    kept_costs, *steps = torch.split(steps_RC, sizes, dim=1)
    _, *numbers = torch.split(numbers_C, sizes)
    kept_keys = [torch.zeros_like(kept_costs, dtype=torch.int64)]
    for place, step, number, num_kept in zip(places, steps, numbers, plan.nums_kept, strict=True):
        costs = kept_costs.index_select(1, place) + step
        keys = torch.add(number, costs.view(torch.int32), alpha=_COST_UNIT)
        best = torch.topk(keys, num_kept, dim=1, largest=False, sorted=True)
        kept_costs = costs.gather(1, best.indices)
        kept_keys.append(best.values)
    num_nothings = plan.num_slots - sum(keys.shape[1] for keys in kept_keys)
    kept_keys.append(kept_keys[0].new_full((len(costs_RLK), num_nothings), _NOTHING))
    best = torch.topk(torch.cat(kept_keys, dim=1), num_rows, dim=1, largest=False, sorted=True)
    return best.values, best.indices


def _ancestor_words(parents_RN: Int64[Tensor, "R N"], plan: _Plan) -> Int64[Tensor, "R N W"]:
    """Join each row's bits with those of the row 1, 2, 4, ... steps up; rows without a parent stay.

    After k joins a row has its 2^k nearest, itself included, which must reach past the deepest.
    """
    num_requests = parents_RN.shape[0]
    words_RNW = plan.own_words.expand(num_requests, -1, -1)
    up_RN = parents_RN.clamp(min=0)
    for _ in range(len(plan.nums_kept).bit_length()):
        up_RNW = up_RN[:, :, None].expand_as(words_RNW)
        words_RNW = words_RNW | words_RNW.gather(1, up_RNW)
        up_RN = up_RN.gather(1, up_RN)
    return words_RNW
