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

In a first-order draft, parents of one depth have rows of their own, and nothing is known of (p, r)
with another p. But (place, rank) at a depth comes after its rank - 1 siblings, after its parent
and the place - 1 parents before that one, and after the depth - 2 ancestors above them, all of them
different nodes: only those with place + rank + depth <= B + 2 can be chosen, at depth 1 too. Which
rows they are in depends on the parents kept, so costs are gathered level by level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

import torch
from jaxtyping import Bool, Float32, Int32, Int64
from torch import Tensor

from ddtree.errors import MarginalsError
from ddtree.tree.batched_plan import WORD_BITS, Plan, cached_plan, make_plan
from ddtree.types import DraftTree, Transitions

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
            of order, a rank that there is none of): that request's tree is its root alone.
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
    transitions: Transitions | None = None,
) -> BatchedTrees:
    """Build the draft tree of highest expected acceptance length of each request.

    The first call for a (B, L, K, device) copies index lists to the device: make it before a CUDA
    graph is captured, as warming up does.

    Args:
        log_probs: [R, L, K], L, K >= 1; per request as in `Marginals`.
        token_ids: [R, L, K].
        root_ids: [R], the tokens at node 0.
        budget: B >= 0, the most nodes besides the root, of every request.
        transitions: [R, L - 1, K, K], of first-order drafts.

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
    _check_shapes(log_probs, token_ids, root_ids, transitions)
    num_requests, num_depths, num_ranks = log_probs.shape
    device = log_probs.device
    # Fake tensors (tracing, torch.export) must not end up in the cache of real ones.
    plan_of = cached_plan if type(log_probs) is Tensor else make_plan
    # index: where torch.compile made a size symbolic, because it changed once, use its value.
    sizes = index(budget), index(num_depths), index(num_ranks)
    plan = plan_of(*sizes, transitions is not None, device)
    tables = _tables_of(log_probs, token_ids, root_ids, transitions)

    best = _best(tables, plan)
    costs_RN = (best.keys >> 32).to(torch.int32).view(torch.float32)
    is_real_RN = costs_RN < torch.inf
    numbers_RN = (best.keys & (_COST_UNIT - 1)).masked_fill(~is_real_RN, 0)

    # Where each kept candidate went; a parent is always among those that went somewhere.
    rows_N = torch.arange(budget + 1, device=device)
    place_of_slot_RS = best.slots.new_zeros((num_requests, plan.num_slots)).scatter(
        1, best.slots, rows_N.expand(num_requests, -1)
    )
    parents_RN = torch.where(
        numbers_RN > 0,
        place_of_slot_RS.gather(1, plan.parent_slots[numbers_RN]),
        plan.rootless_parents,
    )
    return BatchedTrees(
        token_ids=tables.token_ids.gather(1, best.cells.masked_fill(~is_real_RN, 0)),
        parents=parents_RN.to(torch.int32),
        depths=plan.depths[numbers_RN],
        ranks=plan.ranks[numbers_RN],
        log_probs=(-costs_RN).masked_fill(costs_RN == 0, 0.0),  # never -0.0
        num_rows=is_real_RN.sum(dim=1).to(torch.int32),
        valid=tables.valid,
        ancestor_words=_ancestor_words(parents_RN, plan),
    )


def _check_shapes(
    log_probs: Tensor, token_ids: Tensor, root_ids: Tensor, transitions: Transitions | None
) -> None:
    tensors = [log_probs, token_ids, root_ids]
    expected = [log_probs.shape, log_probs.shape, log_probs.shape[:1]]
    if transitions is not None:
        num_requests, num_depths, num_ranks = log_probs.shape
        tensors += [transitions.log_probs, transitions.ranks]
        expected += [torch.Size((num_requests, num_depths - 1, num_ranks, num_ranks))] * 2
    if [tensor.shape for tensor in tensors] != expected:
        raise MarginalsError(
            "marginals",
            expected="log_probs and token_ids of one shape [R, L, K], root_ids [R]"
            + (", transitions [R, L - 1, K, K]" if transitions is not None else ""),
            got=", ".join(str(tuple(tensor.shape)) for tensor in tensors),
            remedy="Gather the token ids with the same top-k as the log-probs, one root each.",
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
class _Tables:
    """What a draft says, in X cells: the root, [L, K], and if it is a first-order one [L-1, K, K].

    Args:
        costs: [R, X], negated log-probs; infinite in requests that are not legal.
        token_ids: [R, X].
        columns: [R, X], the token's rank in [L, K], 0 for the root; None without transitions.
        valid: [R].
    """

    costs: Float32[Tensor, "R X"]
    token_ids: Int64[Tensor, "R X"]
    columns: Int64[Tensor, "R X"] | None
    valid: Bool[Tensor, " R"]


def _tables_of(
    log_probs_RLK: Tensor, token_ids_RLK: Tensor, root_ids: Tensor, behind: Transitions | None
) -> _Tables:
    # Detached: a plan made in inference mode could not be saved for a backward pass.
    said = log_probs_RLK.detach().to(torch.float32)
    token_ids, columns = [root_ids[:, None], token_ids_RLK.flatten(1)], None
    in_range = torch.ones_like(root_ids, dtype=torch.bool)
    if behind is not None:
        num_requests, num_depths, num_ranks = log_probs_RLK.shape
        said = torch.cat([said, behind.log_probs.detach().to(torch.float32).flatten(1, 2)], dim=1)
        # A rank out of range would stop the device where it is looked up.
        ranks = behind.ranks.clamp(0, num_ranks - 1)
        in_range = (ranks == behind.ranks).flatten(1).all(dim=1)
        followers = token_ids_RLK[:, 1:, None].expand(ranks.shape).gather(3, ranks)
        token_ids.append(followers.flatten(1))
        alone = torch.arange(num_ranks, device=ranks.device).repeat(num_depths)
        roots = torch.zeros_like(root_ids)[:, None]
        columns = torch.cat([roots, alone.expand(num_requests, -1), ranks.flatten(1)], dim=1)
    # Written so that NaN is False.
    is_sorted = (said[:, :, 1:] <= said[:, :, :-1]).all(dim=2)
    valid = ((said <= 0).all(dim=2) & is_sorted).all(dim=1) & in_range
    costs = said.abs().masked_fill(~valid[:, None, None], torch.inf).flatten(1)
    costs = torch.cat([torch.zeros_like(costs[:, :1]), costs], dim=1)
    return _Tables(costs, torch.cat(token_ids, dim=1), columns, valid)


@dataclass(frozen=True)
class _Best:
    """The root and the best B candidates of all levels, in order.

    Args:
        keys: [R, N].
        slots: [R, N], where each was kept, see `Plan`.
        cells: [R, N], of each one's token, see `_Tables`.
    """

    keys: Int64[Tensor, "R N"]
    slots: Int64[Tensor, "R N"]
    cells: Int64[Tensor, "R N"]


def _best(tables: _Tables, plan: Plan) -> _Best:
    sizes = list(plan.level_sizes)
    _, *places = torch.split(plan.parent_places, sizes)
    _, *cells = torch.split(plan.cells, sizes)
    numbers_C = torch.arange(plan.cells.shape[0], device=plan.cells.device)
    _, *numbers = torch.split(numbers_C, sizes)
    # Where no parent matters, one look-up serves all levels.
    alone: Sequence[Tensor] = ()
    if tables.columns is None:
        alone = torch.split(tables.costs.index_select(1, plan.cells), sizes, dim=1)
    kept_costs = tables.costs[:, :1]
    kept_keys = [torch.zeros_like(kept_costs, dtype=torch.int64)]
    kept_cells = kept_keys.copy()
    for depth, (place, number, num_kept) in enumerate(
        zip(places, numbers, plan.nums_kept, strict=True)
    ):
        if tables.columns is None:
            steps = alone[depth + 1]
        else:
            parents = tables.columns.gather(1, kept_cells[-1]).index_select(1, place)
            cells_RC = cells[depth] + parents * plan.cells_per_parent
            steps = tables.costs.gather(1, cells_RC)
        costs = kept_costs.index_select(1, place) + steps
        keys = torch.add(number, costs.view(torch.int32), alpha=_COST_UNIT)
        best = torch.topk(keys, num_kept, dim=1, largest=False, sorted=True)
        kept_costs = costs.gather(1, best.indices)
        kept_keys.append(best.values)
        if tables.columns is not None:
            kept_cells.append(cells_RC.gather(1, best.indices))
    num_nothings = plan.num_slots - sum(keys.shape[1] for keys in kept_keys)
    kept_keys.append(kept_keys[0].new_full((len(tables.costs), num_nothings), _NOTHING))
    num_rows = plan.rootless_parents.shape[0]
    best = torch.topk(torch.cat(kept_keys, dim=1), num_rows, dim=1, largest=False, sorted=True)
    if tables.columns is None:
        cells_RN = plan.cells[best.values & (_COST_UNIT - 1)]
    else:
        kept_cells.append(torch.zeros_like(kept_keys[-1]))
        cells_RN = torch.cat(kept_cells, dim=1).gather(1, best.indices)
    return _Best(best.values, best.indices, cells_RN)


def _ancestor_words(parents_RN: Int64[Tensor, "R N"], plan: Plan) -> Int64[Tensor, "R N W"]:
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
