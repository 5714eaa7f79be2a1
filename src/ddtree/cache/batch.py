"""Caches of R independent requests that decode side by side, one token each.

Row r holds the half-open interval [0, lengths[r]) of a buffer [0, capacity). A finished request's
row is simply overwritten by the next one, and so is the state of a recurrent layer. Knows the
library's cache interface, as `hf` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ddtree.cache.hf import StateLayer
from ddtree.cache.recurrent import RecurrentState


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
            # Prefill of one row, behind what it shares with another one.
            row, begin = owner.filling, owner.shared
            end = begin + key_states.shape[2]
            keys[row, :, begin:end] = key_states[0]
            values[row, :, begin:end] = value_states[0]
            if begin == 0:
                return key_states, value_states
            return keys[row : row + 1, :, :end], values[row : row + 1, :, :end]
        keys[owner.rows, :, owner.lengths] = key_states[:, :, 0]
        values[owner.rows, :, owner.lengths] = value_states[:, :, 0]
        return keys[:, :, : owner.span], values[:, :, : owner.span]

    def copy(self, source: int, target: int, length: int) -> None:
        """Give a row the first entries of another one."""
        for entries in self._stored or ():  # none where it reads another layer's
            entries[target, :, :length] = entries[source, :, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class _BatchStates:
    """The states of one recurrent layer; whose they are is decided by the owner, as above."""

    def __init__(self, owner: BatchCache, fresh: RecurrentState) -> None:
        self.owner = owner
        self._fresh = fresh
        matrix = None if fresh.matrix is None else _for_each_row(fresh.matrix, owner.num_rows)
        conv = _for_each_row(fresh.conv, owner.num_rows)
        self._all = RecurrentState(conv=conv, matrix=matrix)

    @property
    def state(self) -> RecurrentState:
        return self._all if self.owner.filling is None else self._fresh

    def write_conv(self, conv: Float[Tensor, "R C W"]) -> None:
        if self.owner.filling is None:
            self._all = replace(self._all, conv=conv)
        else:
            self._all.conv[self.owner.filling] = conv[0]

    def write_matrix(self, matrix: Float[Tensor, "R H dk dv"]) -> None:
        if self.owner.filling is None:
            self._all = replace(self._all, matrix=matrix)
        else:
            assert self._all.matrix is not None
            self._all.matrix[self.owner.filling] = matrix[0]


def _for_each_row(fresh: Tensor, num_rows: int) -> Tensor:
    return fresh.repeat(num_rows, *[1] * (fresh.dim() - 1))


class BatchCache(Cache):  # type: ignore[misc]
    """Caches of R rows of different lengths.

    Args:
        num_layers: layers of the target.
        num_rows: R.
        capacity: positions that each row has room for.
        device: where the model lives.
        fresh_states: of its recurrent layers, by 0-based id, for one request.
    """

    def __init__(
        self,
        num_layers: int,
        num_rows: int,
        capacity: int,
        device: torch.device,
        fresh_states: Mapping[int, RecurrentState] | None = None,
    ) -> None:
        fresh = fresh_states or {}
        self.num_rows = num_rows
        self.filling: int | None = None
        self.shared = 0
        self.can_share = not fresh
        super().__init__(
            layers=[
                StateLayer(_BatchStates(self, fresh[i])) if i in fresh else _BatchLayer(self)
                for i in range(num_layers)
            ]
        )
        self.capacity = capacity
        self.rows: Int64[Tensor, " R"] = torch.arange(num_rows, device=device)
        self.lengths: Int64[Tensor, " R"] = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.span = 1

    def begin_filling(self, row: int, *, like: int | None = None, shared: int = 0) -> None:
        """The next tokens are a prompt, for this row alone.

        Args:
            row: to fill.
            like: a row that is in use and begins with the same tokens; None: there is none.
            shared: how many; they are taken over and not run again.
        """
        self.filling, self.shared = row, 0
        if like is not None and shared > 0:
            assert self.can_share, "a recurrent state has no beginning to share"
            self.shared = shared
            for layer in self.layers:
                layer.copy(like, row, shared)

    def end_filling(self) -> None:
        """The next tokens are again one for each row."""
        self.filling, self.shared = None, 0

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
