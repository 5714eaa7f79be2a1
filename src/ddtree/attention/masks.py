"""Additive masks of tree rows: 0 where a row may look, the dtype's lowest number elsewhere.

Every backend here adds its mask to the scores. Not -inf: rows of it alone would become NaN.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def additive(visible_NS: Bool[Tensor, "N S"], dtype: torch.dtype) -> Float[Tensor, "1 1 N S"]:
    """The mask that shows exactly what is visible.

    >>> additive(torch.tensor([[True, True]]), torch.float32).tolist()
    [[[[0.0, 0.0]]]]
    """
    zeros = torch.zeros(visible_NS.shape, dtype=dtype, device=visible_NS.device)
    return zeros.masked_fill_(~visible_NS, torch.finfo(dtype).min)[None, None]


class TreeMask:
    """The masks of one request's rounds, where every row sees the whole context.

    One buffer of zeros serves all rounds: only the N x N tail behind the context is written, and
    wiped by the next round, so a round costs N^2 and not N T.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, 0)
        self._tail: Tensor | None = None

    def of(
        self, ancestors_NN: Bool[Tensor, "N N"], context_length: int, dtype: torch.dtype
    ) -> Float[Tensor, "1 1 N S"]:
        """The mask of one round, S = T + N: a view that the next call changes.

        Args:
            ancestors_NN: see `tree.geometry.ancestor_mask`.
            context_length: T, committed entries in the cache.
            dtype: of the attention's queries.
        """
        num_rows = ancestors_NN.shape[0]
        end = context_length + num_rows
        if self._tail is not None:
            self._tail.zero_()
        self._reserve(num_rows, end, dtype, ancestors_NN.device)
        self._tail = self._buffer[:num_rows, context_length:end]
        self._tail.masked_fill_(~ancestors_NN, torch.finfo(dtype).min)
        return self._buffer[None, None, :num_rows, :end]

    def _reserve(self, num_rows: int, end: int, dtype: torch.dtype, device: torch.device) -> None:
        rows, columns = self._buffer.shape
        if num_rows <= rows and end <= columns and self._buffer.dtype == dtype:
            return
        if end > columns:
            # A multiple of 16 keeps every row aligned, as CUDA's kernels want it.
            columns = (end + end // 2 + 15) // 16 * 16
        shape = (max(rows, num_rows), columns)
        self._buffer = torch.zeros(shape, dtype=dtype, device=device)
