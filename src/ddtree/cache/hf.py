"""The target's cache as transformers wants it, over our own stores.

All that differs between transformers 5.17 and the newest 5.x about caches is in this file: the name
of the forward's cache argument, and what the library asks of a cache layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

from ddtree.attention.masks import TreeMask
from ddtree.cache.recurrent import RecurrentState, RecurrentStore
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


@runtime_checkable
class States(Protocol):
    """Where the states of a recurrent layer are kept, as the library reads and writes them."""

    @property
    def state(self) -> RecurrentState:
        """Behind the last committed token of each request in the forward."""
        ...

    def write_conv(self, conv: Float[Tensor, "R C W"]) -> None:
        """The convolution's part of the next state."""
        ...

    def write_matrix(self, matrix: Float[Tensor, "R H dk dv"]) -> None:
        """The recurrence's part of it; comes after the convolution's."""
        ...


class StateLayer(LinearAttentionCacheLayerMixin):  # type: ignore[misc]
    """One recurrent layer of the library's cache.

    The library reads the attributes below by the index of a state, of which there is one. Nothing
    is ever changed in place, so a state stays what it was until the next one takes its place.

    Args:
        states: where they are.
    """

    number_of_states = 1
    is_compileable = False
    # Or a single token would be written into the convolution's state in place.
    record_past = True

    def __init__(self, states: States) -> None:
        self.states = states

    @property
    def has_previous_state(self) -> dict[int, bool]:
        """Always: before the first token it is the fresh state."""
        return {0: True}

    @property
    def conv_states(self) -> dict[int, Tensor]:
        """The convolution's part."""
        return {0: self.states.state.conv}

    @property
    def recurrent_states(self) -> dict[int, Tensor | None]:
        """The recurrence's part."""
        return {0: self.states.state.matrix}

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def update_conv_state(self, conv_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Take new inputs [R, C, M]; what the convolution must see for them [R, C, W + M]."""
        before = self.states.state.conv
        seen = torch.cat([before, conv_states], dim=-1)
        # Cloned: a view would keep the inputs of a whole prompt.
        self.states.write_conv(seen[..., seen.shape[-1] - before.shape[-1] :].clone())
        return seen

    def update_recurrent_state(self, recurrent_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Take the state behind these inputs."""
        self.states.write_matrix(recurrent_states)
        return recurrent_states


class TargetCache(Cache):  # type: ignore[misc]
    """What all target layers remember of one request, and the masks of its rounds.

    Args:
        num_layers: layers of the target, one of attention among them.
        capacity: rows to make room for at first.
        fresh_states: of its recurrent layers, by 0-based id.
    """

    def __init__(
        self,
        num_layers: int,
        capacity: int,
        fresh_states: Mapping[int, RecurrentState] | None = None,
    ) -> None:
        self.recurrent_stores = {i: RecurrentStore(s) for i, s in (fresh_states or {}).items()}
        layers = [
            StateLayer(self.recurrent_stores[i])
            if i in self.recurrent_stores
            else _StoreLayer(capacity)
            for i in range(num_layers)
        ]
        super().__init__(layers=layers)
        self.stores = [layer.store for layer in layers if isinstance(layer, _StoreLayer)]
        self.tree_mask = TreeMask()

    @property
    def length(self) -> int:
        """Entries held: the committed context, and the rows of a round that is being verified."""
        return self.stores[0].length

    @property
    def num_bytes(self) -> int:
        """Memory held by all layers."""
        kept = sum(store.num_bytes for store in self.stores)
        return kept + sum(store.num_bytes for store in self.recurrent_stores.values())

    def keep(self, start: int, rows: tuple[int, ...]) -> None:
        """Keep of [start, length) the rows start + rows, in order (see `KVStore.keep`).

        Args:
            start: where the rows of the last forward begin.
            rows: each the parent of the next, from 0 on.
        """
        in_place = rows == tuple(range(len(rows)))
        if self.recurrent_stores or not in_place:
            index = torch.tensor(rows, dtype=torch.int64, device=self.stores[0].keys.device)
        for store in self.stores:
            if in_place:
                # The chain case: the accepted rows are already where they belong.
                store.crop(start + len(rows))
            else:
                store.keep(start, index)
        for states in self.recurrent_stores.values():
            states.keep(index)


def cache_argument(model: torch.nn.Module) -> str:
    """The name under which this model's forward takes a cache: `past_key_values`, or `cache`.

    transformers renamed it in 5.24; asking the signature also serves custom model classes.
    """
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"
