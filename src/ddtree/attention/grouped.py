"""Attention over grouped key-value heads without repeating them, for masked rows too.

transformers repeats keys and values for every query head as soon as there is a mask: a copy of the
whole context per layer and round, three times its size in the embedded default. In float32 on a CPU
our own kernel works, in which a row of a tree rounds as the same row of plain decoding. Soft-capped
scores and sinks are for neither: `plain` has them.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ddtree.attention import plain
from ddtree.attention.masks import additive
from ddtree.models import kernels


def attend(
    module: nn.Module,
    query: Float[Tensor, "R Hq N d"],
    key: Float[Tensor, "R Hkv S d"],
    value: Float[Tensor, "R Hkv S e"],
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    open_context: bool = False,
    softcap: float | None = None,
    s_aux: Float[Tensor, " Hq"] | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "R N Hq e"], None]:
    """An attention function as transformers calls it; `scaling` multiplies the scores.

    Without a mask, or off the CPU (where torch would leave its fast kernels), it is the library's.

    Args:
        open_context: said by `Target.verify` where every row sees the whole context, so that only
            the last N columns of the mask can hide anything.
        softcap: caps the scores (Gemma 2).
        s_aux: the sinks of the heads (gpt-oss).
    """
    mask, scale = attention_mask, query.shape[3] ** -0.5 if scaling is None else scaling
    if softcap is not None or s_aux is not None:
        attended = plain.attend(
            query, key, value, mask, scale=scale, softcap=softcap, sinks=s_aux, dropout=dropout
        )
        return attended, None
    biased = kwargs.get("position_bias") is not None
    if mask is not None and mask.dtype == torch.bool and mask.shape[:3] == (1, 1, 1):
        mask = additive(mask[0, 0], query.dtype)  # a plain step under a sliding window
    if dropout == 0.0 and not biased and kernels.can_attend(query, key, value, mask):
        num_open = key.shape[2] - query.shape[2] if open_context else 0
        return kernels.attention(query, key, value, mask, num_open=num_open, scale=scale), None
    if attention_mask is None or query.device.type != "cpu" or biased:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output, None
    attended = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended.transpose(1, 2).contiguous(), None
