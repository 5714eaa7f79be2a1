"""The compiled kernels of native/, on tensors: float32 on a CPU with AVX2, for a few rows.

Each row's result is the same bit for bit whatever rows are beside it. So a model that runs on these
alone computes for a row of a tree exactly what plain decoding computes at that place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import BFloat16, Float
from torch import Tensor

try:
    from ddtree.models import _kernels as compiled
except ImportError:  # not built, or no OpenMP of torch to share
    AVAILABLE = PAIRS_AVAILABLE = False
else:
    AVAILABLE = compiled.supported()
    PAIRS_AVAILABLE = AVAILABLE and compiled.pairs_supported()

PANEL = 16
"""Outputs that lie side by side in a packed weight, as in native/linear.h."""

# Vectors of this many floats, as in native/attention.h.
_LANES = 8


def runs_here(*tensors: Tensor) -> bool:
    """Whether these tensors are such that the kernels can work on them."""
    return AVAILABLE and all(t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)


def linear(
    x: Float[Tensor, "*rows in"],
    panels: Float[Tensor, "panels width 16"],
    bias: Float[Tensor, " padded"] | None,
    out_features: int,
    *,
    lanes: int = 16,
) -> Float[Tensor, "*rows out"]:
    """x W^T + b.

    Args:
        x: rows.
        panels: the weight, [outputs / 16, in, 16], padded with zeros.
        bias: padded to whole panels, or None.
        out_features: outputs without the padding.
        lanes: floats of a vector at most, 8 or 16, where the processor has such; no bit depends on
            it.
    """
    sizes = out_features, panels.shape[1]
    return _multiplied(compiled.linear, x, panels, bias, sizes, lanes)


def linear_pairs(
    x: Float[Tensor, "*rows in"],
    panels: BFloat16[Tensor, "panels pairs 16 2"],
    bias: Float[Tensor, " padded"] | None,
    out_features: int,
    in_features: int,
) -> Float[Tensor, "*rows out"]:
    """x W^T + b with products of bfloat16 and sums of float32, where `PAIRS_AVAILABLE`.

    Args:
        x: rows in float32; they are rounded to bfloat16.
        panels: the weight, [outputs / 16, in / 2, 16, 2], padded with zeros.
        bias: padded to whole panels, or None.
        out_features: outputs without the padding.
        in_features: inputs without the padding.
    """
    return _multiplied(compiled.linear_pairs, x, panels, bias, (out_features, in_features))


def _multiplied(
    kernel: Callable[..., None],
    x: Tensor,
    panels: Tensor,
    bias: Tensor | None,
    sizes: tuple[int, int],
    *more: int,
) -> Tensor:
    """What a kernel makes of rows and a packed weight of these outputs and inputs."""
    x = x.contiguous()
    out_features, in_features = sizes
    out = x.new_empty((*x.shape[:-1], out_features))
    kernel(
        x.data_ptr(),
        panels.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        x.numel() // in_features,
        out_features,
        in_features,
        torch.get_num_threads(),
        *more,
    )
    return out


def can_attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether `attention` takes these: single rows, or a mask of floats for all heads alike."""
    if not runs_here(query, key, value) or _wants_gradients(query, key, value):
        return False
    requests, _, rows, width = query.shape
    if mask is None:
        masked = rows == 1
    else:
        whole = mask.shape == (requests, 1, rows, key.shape[2]) and mask.stride(3) == 1
        masked = whole and runs_here(mask)
    dense = all(t.stride(3) == 1 for t in (query, key, value))
    return masked and dense and value.shape[3] == width and width % _LANES == 0


def _wants_gradients(*tensors: Tensor) -> bool:
    """The kernels leave no trace in autograd: gradients would silently end with them."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def attention(
    query: Float[Tensor, "R Hq N d"],
    key: Float[Tensor, "R Hkv S d"],
    value: Float[Tensor, "R Hkv S d"],
    mask: Float[Tensor, "R 1 N S"] | None,
    *,
    num_open: int,
    scale: float,
) -> Float[Tensor, "R N Hq d"]:
    """Softmax attention of grouped heads; see `can_attend`.

    Args:
        query: of each row.
        key: of each entry.
        value: of each entry.
        mask: added to the scores; an entry below -1e30 is hidden.
        num_open: the first entries, whose mask is 0 in every row and is not looked at.
        scale: multiplies the scores.
    """
    num_requests, num_heads, num_rows, width = query.shape
    num_kv_heads, num_keys = key.shape[1:3]
    out = query.new_empty((num_requests, num_rows, num_heads, width))
    compiled.attention(
        (query.data_ptr(), *query.stride()[:3]),
        (key.data_ptr(), *key.stride()[:3]),
        (value.data_ptr(), *value.stride()[:3]),
        (0, 0, 0) if mask is None else (mask.data_ptr(), mask.stride(0), mask.stride(2)),
        out.data_ptr(),
        (num_requests, num_rows, num_keys, num_open),
        (num_heads, num_kv_heads, width),
        scale,
        torch.get_num_threads(),
    )
    return out


def rms_norm(
    x: Float[Tensor, "*rows d"], weight: Float[Tensor, " d"], eps: float
) -> Float[Tensor, "*rows d"]:
    """weight * x / sqrt(mean(x^2) + eps)."""
    x = x.contiguous()
    out = torch.empty_like(x)
    width = x.shape[-1]
    compiled.rms_norm(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // width, width, eps
    )
    return out


def swiglu(gate: Float[Tensor, "*rows d"], up: Float[Tensor, "*rows d"]) -> Tensor:
    """silu(gate) * up."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    compiled.swiglu(
        gate.data_ptr(), up.data_ptr(), out.data_ptr(), gate.numel(), torch.get_num_threads()
    )
    return out
