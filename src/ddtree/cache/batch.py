"""Keys and values of R independent requests that decode side by side, one token each.

Row r holds the half-open interval [0, lengths[r]) of a buffer [0, capacity). A finished request's
row is simply overwritten by the next one. Knows the library's cache interface, as `hf` does.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Int64
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class _BatchLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer; where it writes is decided by the `BatchCache` that owns it."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, owner: BatchCache) -> None:
        super().__init__()
        self.owner = owner
        self.is_initialized = True
        self._stored: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        owner = self.owner
        if self._stored is None:
            _, heads, _, width = key_states.shape
            shape = (owner.num_rows, heads, owner.capacity, width)
            # Zeros, not garbage: a masked NaN would still poison the attention's sum.
            self._stored = key_states.new_zeros(shape), value_states.new_zeros(shape)
        keys, values = self._stored
        if owner.filling is not None:
            # Prefill of one row from position 0.
            row, end = owner.filling, key_states.shape[2]
            keys[row, :, :end] = key_states[0]
            values[row, :, :end] = value_states[0]
            return key_states, value_states
        keys[owner.rows, :, owner.lengths] = key_states[:, :, 0]
        values[owner.rows, :, owner.lengths] = value_states[:, :, 0]
        return keys[:, :, : owner.span], values[:, :, : owner.span]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class BatchCache(Cache):  # type: ignore[misc]
    """Caches of R rows of different lengths.

    Args:
        num_layers: layers of the target.
        num_rows: R.
        capacity: positions that each row has room for.
        device: where the model lives.
    """

    def __init__(self, num_layers: int, num_rows: int, capacity: int, device: torch.device) -> None:
        super().__init__(layers=[_BatchLayer(self) for _ in range(num_layers)])
        self.num_rows = num_rows
        self.capacity = capacity
        self.rows: Int64[Tensor, " R"] = torch.arange(num_rows, device=device)
        self.lengths: Int64[Tensor, " R"] = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.filling: int | None = None
        self.span = 1

    def begin_step(self) -> None:
        """Fix the columns that the longest row needs in this step, its new token included.

        Asked once a step and not once a layer: on a GPU it is a synchronisation.
        """
        self.span = int(self.lengths.max()) + 1

    def visible(self, window: int | None) -> Bool[Tensor, "R S"]:
        """What each row's new token sees: its own entries and itself, within the window."""
        columns = torch.arange(self.span, device=self.lengths.device)[None]
        own = columns <= self.lengths[:, None]
        return own if window is None else own & (self.lengths[:, None] - columns < window)
