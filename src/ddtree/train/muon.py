"""Muon: a matrix moves along the orthogonal matrix that is nearest to its momentum.

All directions of a matrix then move alike, where a plain gradient moves a few strong ones. The
method is Keller Jordan's (https://kellerjordan.github.io/posts/muon), its step as long as AdamW's
(https://arxiv.org/abs/2502.16982), so that one learning rate serves both. `torch.optim.Muon` is the
same for one process; here the processes of a training share the work, which on a CPU is as much as
that of a small step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ddtree.train.peers import Peers

_MOMENTUM = 0.95
_ITERATIONS = 5
# Of the quintic that pulls singular values between about 0.7 and 1.2, as in the post named above.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_AS_LONG_AS_ADAMW = 0.2  # the usual root mean square of AdamW's step, per learning rate


class Muon(torch.optim.Optimizer):
    """Steps of matrices.

    Args:
        matrices: trained in place.
        learning_rate: as for AdamW.
        weight_decay: as for AdamW.
        products: in which the work is done, float32 or bfloat16.
        peers: processes that hold the same matrices and gradients, and share the work.
    """

    def __init__(
        self,
        matrices: Sequence[torch.nn.Parameter],
        *,
        learning_rate: float,
        weight_decay: float,
        products: torch.dtype,
        peers: Peers,
    ) -> None:
        super().__init__(matrices, {"lr": learning_rate, "weight_decay": weight_decay})
        self._products = products
        self._peers = peers

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Move every matrix by its gradient, which it must have."""
        (group,) = self.param_groups
        matrices, rate = group["params"], group["lr"]
        directions = self._shared([self._momentum(matrix) for matrix in matrices])
        for matrix, direction in zip(matrices, directions, strict=True):
            matrix.mul_(1 - rate * group["weight_decay"])
            length = _AS_LONG_AS_ADAMW * math.sqrt(max(matrix.shape))
            matrix.add_(direction, alpha=-rate * length)

    def _momentum(self, matrix: torch.nn.Parameter) -> Tensor:
        """The gradient with its past, a step ahead (Nesterov's)."""
        assert matrix.grad is not None
        state = self.state[matrix]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(matrix)
        momentum: Tensor = state["momentum"]
        momentum.lerp_(matrix.grad, 1 - _MOMENTUM)
        return matrix.grad.lerp(momentum, _MOMENTUM)

    def _shared(self, momenta: list[Tensor]) -> list[Tensor]:
        """The orthogonal matrix of each, every process making some of them."""
        by_work = sorted(range(len(momenta)), key=lambda i: -momenta[i].numel())
        mine = set(self._peers.share_of(by_work))
        made = [
            orthogonal(momentum, self._products) if i in mine else torch.zeros_like(momentum)
            for i, momentum in enumerate(momenta)
        ]
        if self._peers.size == 1:
            return made
        every = self._peers.sum_of(torch.cat([direction.flatten() for direction in made]))
        parts = torch.split(every, [direction.numel() for direction in made])
        return [part.view_as(direction) for part, direction in zip(parts, made, strict=True)]


def orthogonal(
    matrix: Float[Tensor, "m n"], products: torch.dtype = torch.float32
) -> Float[Tensor, "m n"]:
    """About U V^T of a matrix U S V^T: singular values between about 0.7 and 1.2 in place of S.

    Args:
        matrix: not all zero; the smallest singular values, below a thousandth of the norm, come out
            smaller.
        products: of the iteration.
    """
    a, b, c = _QUINTIC
    wide = matrix.shape[0] <= matrix.shape[1]
    x = (matrix if wide else matrix.T).to(products)
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.T).to(matrix.dtype)
