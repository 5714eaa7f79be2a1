"""Stage 5: keep the accepted rows, forget the rest.

Afterwards the caches equal, to rounding, those of plain decoding. The next root is in neither.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ddtree.prefill import Context


@torch.inference_mode()
def commit(
    context: Context, start: int, path: tuple[int, ...], features: Float[Tensor, "N F"]
) -> None:
    """Move the accepted rows' keys and values into place and extend the drafter's context.

    Args:
        context: mutated: both caches then hold start + 1 + len(path) positions. Its tokens are
            already those of this round.
        start: the root's position, where the verified rows begin in the cache.
        path: accepted node indices, in order; the root is always kept.
        features: of every verified row.
    """
    rows = (0, *path)
    context.cache.keep(start, rows)
    if context.session is not None:
        token_ids = context.token_ids[start : start + len(rows)]
        # Side by side: one copy to the device, not two.
        index, ids = torch.tensor([rows, token_ids], dtype=torch.int64, device=features.device)
        context.session.extend(features.index_select(0, index), ids)
