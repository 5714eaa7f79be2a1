"""Tree attention in two parts: the context without any mask, and the N x N tail.

Each part gives its output and the log-sum-exp of its scores; the two are merged by these, which is
exact. The context part needs no mask, so it runs in the kernels that take none.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ddtree.attention import grouped

_Part = tuple[Tensor, Tensor]


def attend(
    module: nn.Module,
    query: Float[Tensor, "R Hq N d"],
    key: Float[Tensor, "R Hkv S d"],
    value: Float[Tensor, "R Hkv S e"],
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    open_context: bool = False,
    **kwargs: Any,
) -> tuple[Float[Tensor, "R N Hq e"], None]:
    """An attention function as transformers calls it.

    Args:
        open_context: said by `Target.verify` where every row sees the whole context, so that only
            the last N columns of the mask can hide anything. Else `grouped` does the work.
    """
    num_rows, context_length = query.shape[2], key.shape[2] - query.shape[2]
    # What changes scores beyond scale and mask is left to `grouped`, as are widths of two kinds.
    scored = any(kwargs.get(name) is not None for name in ("softcap", "s_aux", "position_bias"))
    unusual = scored or value.shape[3] != query.shape[3]
    if attention_mask is None or not open_context or context_length == 0 or unusual:
        return grouped.attend(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # The heads that share keys become rows, so nothing is repeated.
    num_groups = query.shape[1] // key.shape[1]
    rows = query.reshape(query.shape[0], key.shape[1], num_groups * num_rows, query.shape[3])
    tail_mask = attention_mask[..., context_length:].repeat(1, 1, num_groups, 1)
    context, tail = key[:, :, :context_length], key[:, :, context_length:]
    merged = merge(
        _unmasked(rows, context, value[:, :, :context_length], scale),
        _masked(rows, tail, value[:, :, context_length:], tail_mask, scale),
    )
    return merged.view_as(query).transpose(1, 2).contiguous(), None


def merge(a: _Part, b: _Part) -> Tensor:
    """One attention over the entries of both parts.

    Args:
        a, b: output [..., M, d] and log-sum-exp [..., M] of the scores of disjoint entries.
    """
    weight = torch.sigmoid(a[1] - b[1])[..., None].to(a[0].dtype)
    return torch.lerp(b[0], a[0], weight)


def _masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> _Part:
    """Plain softmax in float32: N columns are few."""
    scores = (query @ key.mT).float() * scale + mask.float()
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse[..., None]).to(value.dtype)
    return weights @ value, lse


def _unmasked(query: Tensor, key: Tensor, value: Tensor, scale: float) -> _Part:
    """The fused kernel of this device that also returns its log-sum-exp."""
    aten = torch.ops.aten
    if query.device.type == "cpu":
        output, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, scale=scale
        )
    elif query.device.type == "cuda" and query.dtype != torch.float32:
        output, lse, *_ = aten._scaled_dot_product_flash_attention(query, key, value, scale=scale)
    elif query.device.type == "cuda":
        output, lse, *_ = aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, scale=scale
        )
    else:
        scores = (query @ key.mT).float() * scale
        return scores.softmax(-1).to(value.dtype) @ value, torch.logsumexp(scores, dim=-1)
    # Some kernels pad the rows of the log-sum-exp.
    return output, lse[..., : query.shape[2]]
