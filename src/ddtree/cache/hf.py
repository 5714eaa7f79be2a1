"""The target's cache as transformers wants it, over our own stores.

All that differs between transformers 5.17 and the newest 5.x about caches is in this file: the name
of the forward's cache argument, and what the library asks of a cache layer.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ddtree.attention.masks import TreeMask
from ddtree.cache.store import KVStore


class _StoreLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of the library's cache, kept in a `KVStore`.

    A sliding-window layer keeps every entry too: rejected rows would otherwise have pushed out
    entries that the accepted path still sees. The mask decides what a window shows.
    """

    is_sliding = False
    # Buffers are made on the first append, when their shape is known.
    supports_early_init = False

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.store = KVStore(capacity)
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.store.append(key_states, value_states)
        return self.store.keys, self.store.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.store.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.store.length

    def get_max_length(self) -> int:
        return -1


class TargetCache(Cache):  # type: ignore[misc]
    """Keys and values of all target layers for one request, and the masks of its rounds.

    Args:
        num_layers: layers of the target.
        capacity: rows to make room for at first.
    """

    def __init__(self, num_layers: int, capacity: int) -> None:
        super().__init__(layers=[_StoreLayer(capacity) for _ in range(num_layers)])
        self.tree_mask = TreeMask()

    @property
    def length(self) -> int:
        """Entries held: the committed context, and the rows of a round that is being verified."""
        return int(self.layers[0].store.length)

    @property
    def num_bytes(self) -> int:
        """Memory held by all layers."""
        return sum(layer.store.num_bytes for layer in self.layers)

    @property
    def stores(self) -> list[KVStore]:
        """The store of each layer."""
        return [layer.store for layer in self.layers]

    def keep(self, start: int, rows: tuple[int, ...]) -> None:
        """Keep of [start, length) the rows start + rows, in order (see `KVStore.keep`)."""
        if rows == tuple(range(len(rows))):
            # The chain case: the accepted rows are already where they belong.
            for store in self.stores:
                store.crop(start + len(rows))
            return
        index = torch.tensor(rows, dtype=torch.int64, device=self.stores[0].keys.device)
        for store in self.stores:
            store.keep(start, index)


def cache_argument(model: torch.nn.Module) -> str:
    """The name under which this model's forward takes a cache: `past_key_values`, or `cache`.

    transformers renamed it in 5.24; asking the signature also serves custom model classes.
    """
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"
