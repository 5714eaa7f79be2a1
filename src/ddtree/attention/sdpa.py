"""torch's scaled_dot_product_attention: a boolean mask, True where a row may look."""

from __future__ import annotations

import torch
from jaxtyping import Bool
from torch import Tensor


def mask(visible_NS: Bool[Tensor, "N S"], dtype: torch.dtype) -> Bool[Tensor, "1 1 N S"]:
    """The mask that transformers hands to SDPA unchanged; `dtype` is not needed here."""
    del dtype
    return visible_NS[None, None]
