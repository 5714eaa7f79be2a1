"""SDPA over grouped key-value heads without repeating them, for masked rows too.

transformers repeats keys and values for every query head as soon as there is a mask: a copy of the
whole context per layer and round, three times its size in the embedded default.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward


def attend(
    module: nn.Module,
    query: Float[Tensor, "R Hq N d"],
    key: Float[Tensor, "R Hkv S d"],
    value: Float[Tensor, "R Hkv S e"],
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "R N Hq e"], None]:
    """An attention function as transformers calls it; `scaling` multiplies the scores.

    Without a mask, or off the CPU (where torch would leave its fast kernels), it is the library's.
    """
    if attention_mask is None or query.device.type != "cpu":
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
