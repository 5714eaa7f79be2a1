"""Keys and values of a step's tree rows, kept by each attention layer until the walk is over."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ddtree.serving.step import Moves


@dataclass(frozen=True)
class TreeKeys:
    """What one layer wrote to the cache for the rows of trees.

    Args:
        rows: [X], of the step, rising.
        keys: as the layer made them, any width.
        values: likewise.
        slots: [X], where in the paged cache each row was written to.
    """

    rows: Int64[Tensor, " X"]
    keys: Float[Tensor, "X KVH D"]
    values: Float[Tensor, "X KVH Dv"]
    slots: Int64[Tensor, " X"]

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, slots: Int64[Tensor, " M"], rows: Tensor) -> TreeKeys:
        """Copies of the rows named, out of those of a whole step: the engine reuses its memory."""
        return cls(rows, keys[rows], values[rows], slots[rows])

    def moved(self, moves: Moves) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of the sources, and the slots of the targets."""
        rows = self.rows.cpu().numpy()
        sources = torch.from_numpy(np.searchsorted(rows, moves.sources)).to(self.rows.device)
        targets = torch.from_numpy(np.searchsorted(rows, moves.targets)).to(self.rows.device)
        return self.keys[sources], self.values[sources], self.slots[targets]
