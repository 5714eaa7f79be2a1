"""Preallocated keys and values of one layer, written in place.

Entries are the half-open interval [0, length) of the buffer [0, capacity). A round appends its N
rows at [length, length + N), then keeps the accepted ones and forgets the rest. Knows no library.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor


class KVStore:
    """Keys and values of one attention layer, batch 1.

    Args:
        capacity: rows to make room for at first, >= 1; the buffer grows by half when they run out.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    @property
    def keys(self) -> Float[Tensor, "1 H T d"]:
        """A view of the entries' keys, H key-value heads of width d."""
        assert self._keys is not None, "nothing appended yet"
        return self._keys[:, :, : self.length]

    @property
    def values(self) -> Float[Tensor, "1 H T d"]:
        """A view of the entries' values."""
        assert self._values is not None, "nothing appended yet"
        return self._values[:, :, : self.length]

    @property
    def num_bytes(self) -> int:
        """Memory held, used or not."""
        held = [t for t in (self._keys, self._values) if t is not None]
        return sum(t.numel() * t.element_size() for t in held)

    def append(self, keys: Float[Tensor, "1 H N d"], values: Float[Tensor, "1 H N e"]) -> None:
        """Write N rows behind the last entry, without copying the entries before them."""
        end = self.length + keys.shape[2]
        self._reserve(end, keys, values)
        assert self._keys is not None
        assert self._values is not None
        self._keys[:, :, self.length : end] = keys
        self._values[:, :, self.length : end] = values
        self.length = end

    def keep(self, start: int, rows: Int64[Tensor, " A"]) -> None:
        """Keep, of the entries [start, length), those at start + rows in this order; drop the rest.

        Args:
            start: first entry in question; entries [0, start) stay as they are.
            rows: [A] offsets from `start`, on the buffer's device.
        """
        if self._keys is None or self._values is None:
            return
        end = start + rows.shape[0]
        for buffer in (self._keys, self._values):
            # index_select copies first, so overlapping source and destination are safe.
            buffer[:, :, start:end] = buffer.index_select(2, rows + start)
        self.length = end

    def crop(self, length: int) -> None:
        """Forget the entries from `length` on."""
        assert 0 <= length <= self.length
        self.length = length

    def _reserve(self, end: int, keys: Tensor, values: Tensor) -> None:
        if self._keys is None or self._values is None:
            self.capacity = max(self.capacity, end)
            self._keys = keys.new_empty((1, keys.shape[1], self.capacity, keys.shape[3]))
            self._values = values.new_empty((1, values.shape[1], self.capacity, values.shape[3]))
        elif end > self.capacity:
            self.capacity = max(end, self.capacity + self.capacity // 2)
            self._keys = self._grown(self._keys)
            self._values = self._grown(self._values)

    def _grown(self, buffer: Tensor) -> Tensor:
        shape = (*buffer.shape[:2], self.capacity, buffer.shape[3])
        grown = torch.empty(shape, dtype=buffer.dtype, device=buffer.device)
        grown[:, :, : self.length] = buffer[:, :, : self.length]
        return grown
