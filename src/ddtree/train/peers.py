"""Processes that share each training step: every one takes some of its sequences.

On a CPU that other work shares, two processes of one thread train faster than one of two; alone
they are even. All keep the same weights: they start from the same and follow the same gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, distributed, nn

_PATIENCE = timedelta(minutes=30)


class Peers:
    """This process and its equals.

    Args:
        rank: which one this is; 0 saves and speaks.
        size: how many there are; 1 needs no communication.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    @classmethod
    def join(cls, meeting_point: Path, rank: int, size: int) -> Peers:
        """Meet the others at a file that none of them has used before."""
        distributed.init_process_group(
            "gloo",
            init_method=meeting_point.resolve().as_uri(),
            rank=rank,
            world_size=size,
            timeout=_PATIENCE,
        )
        return cls(rank, size)

    def share_of(self, items: Sequence[int]) -> list[int]:
        """This process's part of a step."""
        return list(items[self.rank :: self.size])

    def average_gradients(self, network: nn.Module) -> None:
        """Replace every gradient by its mean over all processes, in place."""
        if self.size == 1:
            return
        gradients = [p.grad for p in network.parameters() if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        distributed.all_reduce(flat)
        flat /= self.size
        means = torch.split(flat, [gradient.numel() for gradient in gradients])
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean.view_as(gradient))

    def sum_of(self, values: Tensor) -> Tensor:
        """The sum of every process's values [M], the same in all of them."""
        if self.size == 1:
            return values
        total = values.clone()
        distributed.all_reduce(total)
        return total

    def leave(self) -> None:
        """Say goodbye."""
        if self.size > 1:
            distributed.destroy_process_group()
