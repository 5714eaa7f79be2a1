"""DFlash2's grouped dynamic convolutions: each slot of a block is mixed with the slots before it.

One stands around each sublayer of the drafter, attention and feed-forward (CHECKPOINTS C). Knows
blocks only: nothing of the context, and nothing of the selector (`models.transitions`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from ddtree.models.drafter_config import DrafterConfig

Sublayer = Callable[[Tensor], Tensor]


class GroupedConvolution(nn.Module):
    """Mixes slots before a sublayer and after it; parameter names are those of z-lab's checkpoints.

    Side 0 works on the sublayer's input and side 1 on its output. The weight of a channel at a tap
    is its own, `base_kernel`, plus one that the input at the slot gives to its group of channels.

    Args:
        hidden_size: D.
        kernel_size: t, taps; tap 0 is the slot itself, tap 1 the one before it.
        group_size: g, neighbouring channels that share a dynamic weight; a divisor of D.
    """

    def __init__(self, hidden_size: int, *, kernel_size: int, group_size: int) -> None:
        super().__init__()
        self.kernel_size = kernel_size
        self.num_groups = hidden_size // group_size
        base = torch.zeros(2, kernel_size, hidden_size)
        base[:, 0] = 1.0
        self.base_kernel = nn.Parameter(base)
        num_weights = 2 * kernel_size * self.num_groups
        self.kernel_projection = nn.Linear(hidden_size, num_weights, bias=False)

    def forward(
        self, x: Float[Tensor, "S Q D"], sublayer: Sublayer, block_size: int
    ) -> Float[Tensor, "S Q D"]:
        """The sublayer with its convolutions.

        Args:
            x: input of the sublayer, normed; Q slots of whole blocks, side by side.
            sublayer: gives rows like those that it gets.
            block_size: b, slots of one block; no block sees another.
        """
        blocks = torch.unflatten(x, 1, (-1, block_size))
        shape = (2, self.kernel_size, self.num_groups)
        dynamic = torch.unflatten(self.kernel_projection(blocks), -1, shape)
        before = self._convolved(blocks, dynamic, side=0)
        after = torch.unflatten(sublayer(before.flatten(1, 2)), 1, (-1, block_size))
        return self._convolved(after, dynamic, side=1).flatten(1, 2)

    def _convolved(
        self, y: Float[Tensor, "S A b D"], dynamic: Float[Tensor, "S A b 2 t G"], *, side: int
    ) -> Float[Tensor, "S A b D"]:
        """Sum over taps of weight times the slot that lies so far back; zero before slot 0."""
        grouped = torch.unflatten(y, -1, (self.num_groups, -1))
        base = torch.unflatten(self.base_kernel[side], -1, (self.num_groups, -1))
        size = y.shape[2]
        out = torch.zeros_like(grouped)
        for tap in range(min(self.kernel_size, size)):
            weights = base[tap] + dynamic[..., side, tap, :, None]
            earlier = functional.pad(grouped[:, :, : size - tap], (0, 0, 0, 0, tap, 0))
            out = out + weights * earlier
        return out.flatten(-2)


def convolution(config: DrafterConfig) -> GroupedConvolution | None:
    """A new one of the declared shape; None for a drafter without them."""
    if config.conv_kernel_size is None:
        return None
    return GroupedConvolution(
        config.hidden_size,
        kernel_size=config.conv_kernel_size,
        group_size=config.conv_group_size,
    )


def convolved(
    around: GroupedConvolution | None, x: Tensor, sublayer: Sublayer, block_size: int
) -> Tensor:
    """The sublayer with its convolutions, or alone where there are none."""
    if around is None:
        return sublayer(x)
    out: Tensor = around(x, sublayer, block_size)
    return out
