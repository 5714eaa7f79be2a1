"""What follows a verify forward, on the device: the walk, keys and values moved, rows in order.

The readable twins are `step.walk_tree`, `Step.moves` and `Step.order`, which run on the host and
define what these give. Nothing here waits for the device and no value decides a shape, so all of
it can be compiled whole and captured in a CUDA graph. Needs torch alone.

Letters: S requests, N rows of a request (padded; the root is row 0, parents come before their
children), M rows of the step, K rows to move, Z blocks of a cache, C positions of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor


@dataclass(frozen=True)
class WalkedRows:
    """The accepted path of each request.

    Args:
        path: [S, N], its rows from the root down, padded with the root.
        num_accepted: [S], rows of the path besides the root.
        token_ids: [S, N], what is delivered: the path's tokens and the one behind it, padded with
            -1. Nothing where a request has no rows.
    """

    path: Int32[Tensor, "S N"]
    num_accepted: Int32[Tensor, " S"]
    token_ids: Int64[Tensor, "S N"]


def walk_rows(
    chosen: Int64[Tensor, "S N"],
    token_ids: Int64[Tensor, "S N"],
    parents: Int32[Tensor, "S N"],
    num_rows: Int32[Tensor, " S"],
    *,
    max_depth: int,
) -> WalkedRows:
    """Follow the target's choices down each tree: to the child that was given the chosen token.

    Args:
        chosen: [S, N], the target's token at each row.
        token_ids: [S, N], the token that each row was given to; siblings have different ones.
        parents: [S, N], each row's parent; the root's, and those of padding, are not looked at.
        num_rows: [S], real rows; they come first. 0 is legal.
        max_depth: no row is deeper; N - 1 is always right, and the drafter's L is cheaper.

    >>> walked = walk_rows(
    ...     torch.tensor([[7, 9, 4]]),
    ...     torch.tensor([[5, 8, 7]]),
    ...     torch.tensor([[-1, 0, 0]], dtype=torch.int32),
    ...     torch.tensor([3], dtype=torch.int32),
    ...     max_depth=1,
    ... )
    >>> walked.path.tolist(), walked.num_accepted.tolist(), walked.token_ids.tolist()
    ([[0, 2, 0]], [1], [[7, 4, -1]])
    """
    num_all = chosen.shape[1]
    rows_N = torch.arange(num_all, device=chosen.device)
    above_SN = parents.to(torch.int64).clamp(0, num_all - 1)
    above_SN = torch.where(rows_N > 0, above_SN, 0)
    # A row is on the path where it and all its ancestors were chosen at their parents. Each turn
    # asks for twice as many ancestors; the root is its own.
    on_path_SN = (token_ids == chosen.gather(1, above_SN)) | (rows_N == 0)
    on_path_SN &= rows_N < num_rows[:, None].clamp(min=1)
    for _ in range((max(1, max_depth) - 1).bit_length()):
        on_path_SN = on_path_SN & on_path_SN.gather(1, above_SN)
        above_SN = above_SN.gather(1, above_SN)
    # Siblings differ, so these rows are a chain; parents come first, so it is in order.
    places_SN = on_path_SN.cumsum(1) - 1
    num_accepted = places_SN[:, -1]
    path_SN = _scattered(places_SN, rows_N.expand_as(places_SN), on_path_SN)
    # The token of a row on the path is what was chosen at the row before it.
    is_said_SN = (rows_N <= num_accepted[:, None]) & (num_rows > 0)[:, None]
    return WalkedRows(
        path=path_SN.to(torch.int32),
        num_accepted=num_accepted.to(torch.int32),
        token_ids=torch.where(is_said_SN, chosen.gather(1, path_SN), -1),
    )


@dataclass(frozen=True)
class SettledMoves:
    """Rows of a paged cache to copy, all read before any is written; the same for every layer.

    Args:
        source_blocks: [K].
        source_places: [K], within their blocks.
        target_blocks: [K].
        target_places: [K].
    """

    source_blocks: Int64[Tensor, " K"]
    source_places: Int64[Tensor, " K"]
    target_blocks: Int64[Tensor, " K"]
    target_places: Int64[Tensor, " K"]

    def apply(self, cache: Float[Tensor, "Z C *content"]) -> None:
        """Mutates `cache`, of any strides; keys and values that lie side by side move together."""
        moved = cache[self.source_blocks, self.source_places]
        cache[self.target_blocks, self.target_places] = moved


def settle_moves(
    source_slots: Int64[Tensor, " K"],
    target_slots: Int64[Tensor, " K"],
    valid: Bool[Tensor, " K"],
    *,
    num_blocks: int,
    block_size: int,
) -> SettledMoves:
    """What `move_rows` does to a cache of such blocks, worked out once for all layers.

    Arguments as there; K >= 1.
    """
    # What moves nothing repeats the first move, and that one moves a row to itself if it has to:
    # a write of what was there before could undo the move of another row to the same slot.
    first = valid.to(torch.int32).argmax(keepdim=True)
    rows = torch.where(valid, torch.arange(valid.shape[0], device=valid.device), first)
    targets = target_slots[rows].clamp(0, num_blocks * block_size - 1)
    sources = torch.where(valid.any(), source_slots[rows], targets)
    return SettledMoves(
        sources // block_size,
        sources % block_size,
        targets // block_size,
        targets % block_size,
    )


def move_rows(
    cache: Float[Tensor, "Z C *content"],
    source_slots: Int64[Tensor, " K"],
    target_slots: Int64[Tensor, " K"],
    valid: Bool[Tensor, " K"],
) -> None:
    """Copy rows of a paged cache to other slots, as if all were read before any is written.

    Mutates `cache`. Slot s is position s % C of block s // C.

    Args:
        cache: of any strides; keys and values that lie side by side move together.
        source_slots: [K].
        target_slots: [K], no two alike among the valid ones.
        valid: [K], the others move nothing; their slots are not looked at.
    """
    if source_slots.shape[0] > 0:
        num_blocks, block_size = cache.shape[:2]
        settle_moves(
            source_slots, target_slots, valid, num_blocks=num_blocks, block_size=block_size
        ).apply(cache)


def path_order(
    path: Int32[Tensor, "S N"],
    num_accepted: Int32[Tensor, " S"],
    row_starts: Int32[Tensor, " S"],
    num_rows: Int32[Tensor, " S"],
    total_rows: int,
) -> Int64[Tensor, " M"]:
    """All rows of a step, each request's root and accepted path before its other rows.

    What reads rows as if drafts were chains then finds accepted rows where it looks for them:
    `hidden_states[order]`.

    Args:
        path: [S, N], see `WalkedRows`.
        num_accepted: [S].
        row_starts: [S], the step's row that is each request's root.
        num_rows: [S], of each request, one after another; 0 is legal.
        total_rows: M. Rows that belong to none of these requests stay where they are.

    >>> one = torch.tensor([1], dtype=torch.int32)
    >>> path_order(torch.tensor([[0, 2, 0]], dtype=torch.int32), one, one, 3 * one, 5).tolist()
    [0, 1, 3, 2, 4]
    """
    num_all = path.shape[1]
    rows_N = torch.arange(num_all, device=path.device)
    path_SN = path.to(torch.int64)
    is_step_SN = rows_N <= num_accepted[:, None]
    on_path_SN = _scattered(path_SN, torch.ones_like(is_step_SN), is_step_SN)
    places_SN = _scattered(path_SN, rows_N.expand_as(path_SN), is_step_SN)
    is_other_SN = ~on_path_SN & (rows_N < num_rows[:, None])
    other_places_SN = num_accepted[:, None] + is_other_SN.cumsum(1)
    places_SN = torch.where(on_path_SN, places_SN, other_places_SN)
    first_S1 = row_starts[:, None].to(torch.int64)
    # Padding goes to a row behind the last, which is cut off.
    is_row_SN = rows_N < num_rows[:, None]
    goals_SN = torch.where(is_row_SN, first_S1 + places_SN, total_rows)
    order = torch.arange(total_rows + 1, device=path.device)
    return order.scatter(0, goals_SN.flatten(), (first_S1 + rows_N).flatten())[:total_rows]


def _scattered(places_SN: Tensor, values_SN: Tensor, counts_SN: Tensor) -> Tensor:
    """[S, N]: the values that count, put at their places in [0, N); 0 elsewhere."""
    num_all = places_SN.shape[1]
    index_SN = torch.where(counts_SN, places_SN, num_all)
    padded = values_SN.new_zeros((places_SN.shape[0], num_all + 1))
    return padded.scatter(1, index_SN, values_SN)[:, :num_all]
