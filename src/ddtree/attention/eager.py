"""transformers' eager attention: an additive mask. A boolean one would be added as 0 and 1."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def mask(visible_NS: Bool[Tensor, "N S"], dtype: torch.dtype) -> Float[Tensor, "1 1 N S"]:
    """0 where a row may look, the dtype's lowest number elsewhere."""
    additive = torch.zeros(visible_NS.shape, dtype=dtype, device=visible_NS.device)
    return additive.masked_fill(~visible_NS, torch.finfo(dtype).min)[None, None]
