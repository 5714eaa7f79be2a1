"""The tree requests of one engine step: where their rows are, and who sees whom.

Letters in shapes: S tree requests of a step, M rows of all of them together, N rows of one (its
root included), W = ceil(most rows / 64) words, P blocks of a request's table.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Int32, Int64
from torch import Tensor


@dataclass(frozen=True)
class TreeRows:
    """What attention must know of the trees of a step. All on the step's device.

    A row sees the whole context of its request, its ancestors and itself. The context's keys and
    values are in the paged cache; those of the rows are the step's own, as the layer made them.

    Args:
        row_starts: [S], the step's row that is each request's root; its N rows follow one another.
        num_rows: [S], N of each request.
        context_lens: [S], T: tokens in the cache before the root, at least 0.
        block_tables: [S, P], the cache blocks that hold positions [0, T), in order.
        ancestor_words: [M, W], request after request: bit j % 64 of word j // 64 is set where row j
            of the same request is an ancestor of the row or the row itself.
        max_rows: the most of `num_rows`, known on the host.
        max_context_len: the most of `context_lens`, known on the host.
    """

    row_starts: Int32[Tensor, " S"]
    num_rows: Int32[Tensor, " S"]
    context_lens: Int32[Tensor, " S"]
    block_tables: Int32[Tensor, "S P"]
    ancestor_words: Int64[Tensor, "M W"]
    max_rows: int
    max_context_len: int
