"""The attention backends by the name that transformers gives them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ddtree.attention import eager, sdpa
from ddtree.errors import BackendError

MaskMaker = Callable[[Tensor, torch.dtype], Tensor]

BACKENDS: dict[str, MaskMaker] = {"sdpa": sdpa.mask, "eager": eager.mask}


def mask_maker(implementation: str | None) -> MaskMaker:
    """The function that turns visibility [N, S] into this backend's mask.

    Raises:
        BackendError: the implementation has no tree mask here.

    >>> mask_maker("sdpa")(torch.ones(1, 1, dtype=torch.bool), torch.float32).shape
    torch.Size([1, 1, 1, 1])
    """
    if implementation in BACKENDS:
        return BACKENDS[implementation]
    raise BackendError(
        "attention",
        expected=f"one of {', '.join(BACKENDS)}",
        got=repr(implementation),
        remedy='Call model.set_attn_implementation("sdpa") on the target first.',
    )
