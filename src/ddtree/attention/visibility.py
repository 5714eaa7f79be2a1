"""Which entries a row of the verify forward may attend to, as booleans: the oracle of all backends.

A row sees the whole context, its ancestors and itself (paper, section 4). Under a sliding window it
sees of these only what lies fewer than `window` positions back: positions decide, not cache slots.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int64
from torch import Tensor


def visible(
    ancestors_NN: Bool[Tensor, "N N"],
    depths_N: Int64[Tensor, " N"],
    context_length: int,
    window: int | None,
) -> Bool[Tensor, "N S"]:
    """Visibility of context and tree for each row.

    Args:
        ancestors_NN: see `tree.geometry.ancestor_mask`.
        depths_N: depth of each row, the root 0.
        context_length: T, committed entries in the cache; the root's position.
        window: positions that a sliding layer shows, the row's own included; None shows all.

    Returns:
        [N, S] with S = T + N: T columns of context, then N of tree rows.

    >>> visible(torch.tensor([[True]]), torch.tensor([0]), 3, window=2).tolist()
    [[False, False, True, True]]
    """
    num_rows = depths_N.shape[0]
    context_NT = ancestors_NN.new_ones((num_rows, context_length))
    both_NS = torch.cat([context_NT, ancestors_NN], dim=1)
    if window is None:
        return both_NS
    row_positions = context_length + depths_N
    context_positions = torch.arange(context_length, device=depths_N.device)
    positions_S = torch.cat([context_positions, row_positions])
    return both_NS & (row_positions[:, None] - positions_S[None, :] < window)
