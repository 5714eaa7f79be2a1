"""What turns gradients into steps: AdamW for all weights, or Muon for the matrices of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from ddtree.models.drafter_network import DFlashNetwork
from ddtree.train.fit_config import FitConfig
from ddtree.train.muon import Muon
from ddtree.train.peers import Peers


class Optimizers:
    """Some optimisers as one, each for its own weights.

    Args:
        parts: at least one.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = list(parts)

    def set_learning_rate(self, rate: float) -> None:
        """The same for all."""
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = rate

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for part in self._parts:
            part.zero_grad(set_to_none=True)

    def step(self) -> None:
        """Move all weights."""
        for part in self._parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """All that a training needs to go on."""
        return {str(i): part.state_dict() for i, part in enumerate(self._parts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        for i, part in enumerate(self._parts):
            part.load_state_dict(state[str(i)])


def optimizers_for(
    network: DFlashNetwork, config: FitConfig, products: torch.dtype, peers: Peers
) -> Optimizers:
    """The optimisers that a training asks for.

    Args:
        network: whose weights they move.
        config: which, and how fast.
        products: of Muon's work, see `Muon`.
        peers: see `Muon`.
    """
    matrices: list[torch.nn.Parameter] = []
    if config.optimizer == "muon":
        hidden = chain(network.layers.parameters(), network.fc.parameters())
        matrices = [parameter for parameter in hidden if parameter.ndim == 2]
    theirs = {id(matrix) for matrix in matrices}
    others = [p for p in network.parameters() if id(p) not in theirs]
    # Kernels of convolutions have three dimensions; like norms, they are around 1.
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in others if p.ndim == 2], "weight_decay": config.weight_decay},
            {"params": [p for p in others if p.ndim != 2], "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(0.9, 0.95),
        fused=next(network.parameters()).device.type in ("cpu", "cuda"),
    )
    if not matrices:
        return Optimizers([adamw])
    muon = Muon(
        matrices,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        products=products,
        peers=peers,
    )
    return Optimizers([muon, adamw])
