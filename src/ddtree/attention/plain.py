"""Attention by its formula, for what no kernel here has: soft-capped scores and attention sinks.

score = cap(query . key * scale) + mask; a sink is one more score per head that takes its share of
the softmax and gives no value (gpt-oss). Heads that share keys are not repeated. Knows no layers.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional


def attend(
    query: Float[Tensor, "R Hq N d"],
    key: Float[Tensor, "R Hkv S d"],
    value: Float[Tensor, "R Hkv S e"],
    mask: Tensor | None,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Tensor, " Hq"] | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "R N Hq e"]:
    """Attention of grouped heads, softmax in float32.

    Args:
        query: of each row.
        key: of each entry.
        value: of each entry.
        mask: for all heads alike: added to the scores, or of booleans that say what is seen. None
            is causal, as the library means it: the rows are the first S, or one row sees all.
        scale: multiplies the scores.
        softcap: caps them at this size, before the mask.
        sinks: a score per head.
        dropout: of the weights, where a model is trained.

    >>> ones = torch.ones(1, 1, 1, 1)
    >>> attend(ones, ones, ones, None, scale=1.0, sinks=torch.ones(1)).item()
    0.5
    """
    requests, num_heads, num_rows, width = query.shape
    num_kv_heads, num_keys = key.shape[1:3]
    rows = query.reshape(requests, num_kv_heads, -1, width)
    scores = (rows @ key.mT).view(requests, num_heads, num_rows, num_keys).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None and num_rows > 1:
        mask = torch.ones(num_rows, num_keys, dtype=torch.bool, device=query.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    if sinks is not None:
        column = sinks.float()[None, :, None, None].expand(requests, -1, num_rows, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(dim=-1)[..., :num_keys].to(value.dtype)
    weights = functional.dropout(weights, dropout)
    grouped = weights.reshape(requests, num_kv_heads, -1, num_keys) @ value
    attended = grouped.view(requests, num_heads, num_rows, value.shape[3])
    return attended.transpose(1, 2).contiguous()
