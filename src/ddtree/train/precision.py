"""What a training multiplies in: float32, or bfloat16 where the machine has instructions for it.

Weights, their gradients, the optimiser and the loss stay float32; only products are rounded.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

PRECISIONS = ("auto", "float32", "bfloat16")


def pick_precision(name: str, device: torch.device) -> torch.dtype:
    """The dtype of products.

    Args:
        name: one of `PRECISIONS`; auto takes bfloat16 where it is faster than float32.
        device: where the training runs.
    """
    if name == "auto":
        return torch.bfloat16 if has_bfloat16_products(device) else torch.float32
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def has_bfloat16_products(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 itself; others convert, which is slower."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu":
        # torch has no public question for it; AMX always comes with AVX512-BF16.
        return bool(torch.cpu._is_avx512_bf16_supported())
    return False


def products_in(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[Any]:
    """Within it, matrix products and attention are computed in `dtype`."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype is torch.bfloat16)
