"""Layers with a recurrent state, run over the rows of a tree: every row continues its parent.

Gated delta nets (Qwen3-Next, Qwen3.5) and short convolutions (LFM2). A layer's own projections,
norm and weights are used; only what runs along the sequence is ours. A model is not changed: its
layers' `forward` is ours for one forward over a tree and theirs otherwise, in prefill as in plain
decoding. Knows no drafter and nothing of the walk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from ddtree.cache.recurrent import PendingRows, RecurrentState, RecurrentStore
from ddtree.errors import UnsupportedModelError
from ddtree.models.delta_rule import DeltaRows, TreePaths, tree_delta_rule

# What the pending rows of a round may take, all layers together, unless a target says otherwise.
ROUND_BYTES = 2**30


@dataclass(frozen=True)
class LayerRun:
    """What one layer makes of a tree's rows.

    Args:
        output: [N, D], in the model's dtype.
        rows: pending, for the layer's store.
    """

    output: Float[Tensor, "N D"]
    rows: PendingRows


@runtime_checkable
class RecurrentLayer(Protocol):
    """One recurrent layer of a model, seen from its rows.

    Attributes:
        module: whose `forward` it stands in for.
        width: W, inputs before a row that its convolution sees.
        bytes_per_row: what a pending row holds.
        bytes_per_pair: what is needed while it runs, for each two rows.
    """

    module: nn.Module
    width: int
    bytes_per_row: int
    bytes_per_pair: int

    def fresh_state(self) -> RecurrentState:
        """The state of a request before its first token."""
        ...

    def run(
        self, hidden: Float[Tensor, "N D"], state: RecurrentState, paths: TreePaths
    ) -> LayerRun:
        """The layer over N rows of one request."""
        ...


@dataclass(frozen=True, kw_only=True)
class _PendingRows:
    """Rows of any layer here: inputs of the convolution, and the delta rule's if there is one."""

    inputs: Float[Tensor, "N C"]
    delta: DeltaRows | None

    @property
    def num_bytes(self) -> int:
        inputs = self.inputs.numel() * self.inputs.element_size()
        return inputs + (0 if self.delta is None else self.delta.num_bytes)

    def state_after(self, state: RecurrentState, path: Int64[Tensor, " A"]) -> RecurrentState:
        width, matrix = state.conv.shape[2], state.matrix
        seen = torch.cat([state.conv[0], self.inputs.index_select(0, path).T], dim=1)
        # Cloned: a view would keep all of it.
        conv = seen[None, :, seen.shape[1] - width :].clone()
        if self.delta is not None:
            assert matrix is not None
            matrix = self.delta.state_after(matrix[0], path)[None]
        return RecurrentState(conv=conv, matrix=matrix)


class GatedDeltaNet:
    """A gated delta net of Qwen3-Next or Qwen3.5.

    Args:
        module: the layer's `linear_attn`.
        interleaved: projections are fused and ordered by key head (Qwen3-Next), or apart (Qwen3.5).
    """

    def __init__(self, module: Any, *, interleaved: bool) -> None:
        self.module = module
        self.width = int(module.conv_kernel_size) - 1
        self._interleaved = interleaved
        self._activation: nn.Module = ACT2FN[module.activation]
        element = module.conv1d.weight.element_size()
        shared = module.key_dim + module.value_dim + module.num_v_heads
        self.bytes_per_row = 4 * shared + element * module.conv_dim
        # Of N x N numbers a head has four at once: fading, keys, the system, reads.
        self.bytes_per_pair = 4 * 4 * module.num_v_heads

    def fresh_state(self) -> RecurrentState:
        """See `RecurrentLayer`; the matrix is float32, as the library keeps it."""
        module = self.module
        weight = module.conv1d.weight
        shape = (1, module.num_v_heads, module.head_k_dim, module.head_v_dim)
        return RecurrentState(
            conv=weight.new_zeros(1, module.conv_dim, self.width),
            matrix=torch.zeros(shape, dtype=torch.float32, device=weight.device),
        )

    def run(
        self, hidden: Float[Tensor, "N D"], state: RecurrentState, paths: TreePaths
    ) -> LayerRun:
        """See `RecurrentLayer`."""
        module = self.module
        assert state.matrix is not None
        inputs, gate, strength, step = self._project(hidden)
        mixed = self._activation(_convolve(inputs, state.conv[0], module.conv1d, paths))
        sizes = [module.key_dim, module.key_dim, module.value_dim]
        queries, keys, values = (
            part.unflatten(1, (-1, width)).transpose(0, 1).to(torch.float32)
            for part, width in zip(
                mixed.split(sizes, dim=1),
                (module.head_k_dim, module.head_k_dim, module.head_v_dim),
                strict=True,
            )
        )
        log_decays = -module.A_log.float().exp() * functional.softplus(
            step.float() + module.dt_bias.float()
        )
        outputs, rows = tree_delta_rule(
            queries=_unit(queries) * module.head_k_dim**-0.5,
            keys=_unit(keys),
            values=values,
            log_decays=log_decays.T,
            strengths=strength.sigmoid().float().T,
            state=state.matrix[0],
            paths=paths,
        )
        # The norm is of each head's output by itself, and takes rows of [dv].
        outputs = outputs.transpose(0, 1).to(hidden.dtype)
        gated = module.norm(outputs.flatten(0, 1), gate.reshape(-1, module.head_v_dim))
        output = module.out_proj(gated.view(hidden.shape[0], -1))
        return LayerRun(output, _PendingRows(inputs=inputs, delta=rows))

    def _project(self, hidden: Float[Tensor, "N D"]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Inputs of the convolution [N, C], output gate, strength and step [N, H]."""
        module = self.module
        if not self._interleaved:
            return (
                module.in_proj_qkv(hidden),
                module.in_proj_z(hidden),
                module.in_proj_b(hidden),
                module.in_proj_a(hidden),
            )
        heads = module.num_k_heads
        group = module.num_v_heads // heads
        values = group * module.head_v_dim
        fused = module.in_proj_qkvz(hidden).unflatten(1, (heads, -1))
        *mixed, gate = fused.split([module.head_k_dim, module.head_k_dim, values, values], dim=2)
        pairs = module.in_proj_ba(hidden).unflatten(1, (heads, 2, group))
        inputs = torch.cat([part.flatten(1) for part in mixed], dim=1)
        return inputs, gate.flatten(1), pairs[:, :, 0].flatten(1), pairs[:, :, 1].flatten(1)


class ShortConvolution:
    """A gated short convolution of LFM2.

    Args:
        module: the layer's `conv`.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.width = int(module.conv_kernel_size) - 1
        weight = module.conv.weight
        self.bytes_per_row = weight.shape[0] * weight.element_size()
        self.bytes_per_pair = 0

    def fresh_state(self) -> RecurrentState:
        """See `RecurrentLayer`."""
        weight = self.module.conv.weight
        return RecurrentState(conv=weight.new_zeros(1, weight.shape[0], self.width), matrix=None)

    def run(
        self, hidden: Float[Tensor, "N D"], state: RecurrentState, paths: TreePaths
    ) -> LayerRun:
        """See `RecurrentLayer`."""
        module = self.module
        before, after, signal = module.in_proj(hidden).chunk(3, dim=1)
        inputs = before * signal
        mixed = _convolve(inputs, state.conv[0], module.conv, paths)
        return LayerRun(module.out_proj(after * mixed), _PendingRows(inputs=inputs, delta=None))


def _convolve(
    inputs: Float[Tensor, "N C"], before: Float[Tensor, "C W"], conv: nn.Conv1d, paths: TreePaths
) -> Float[Tensor, "N C"]:
    """Each row's causal convolution over its own path and the inputs before the root."""
    seen = torch.cat([before.T, inputs])
    windows = seen[paths.windows].transpose(1, 2)
    mixed = functional.conv1d(
        windows.to(conv.weight.dtype), conv.weight, conv.bias, groups=inputs.shape[1]
    )
    return mixed[:, :, 0].to(inputs.dtype)


def _unit(x: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:
    """Each row at length 1, as these layers take queries and keys."""
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6)


def _delta_net(decoder_layer: Any, *, interleaved: bool) -> RecurrentLayer:
    return GatedDeltaNet(decoder_layer.linear_attn, interleaved=interleaved)


def _short_convolution(decoder_layer: Any) -> RecurrentLayer:
    return ShortConvolution(decoder_layer.conv)


# By model type: the layer type that is recurrent, and how such a layer is seen.
_FAMILIES: dict[str, tuple[str, Callable[[Any], RecurrentLayer]]] = {
    "qwen3_next": ("linear_attention", partial(_delta_net, interleaved=True)),
    "qwen3_5_text": ("linear_attention", partial(_delta_net, interleaved=False)),
    "qwen3_5_moe_text": ("linear_attention", partial(_delta_net, interleaved=False)),
    "lfm2": ("conv", _short_convolution),
    "lfm2_moe": ("conv", _short_convolution),
}


def recurrent_layer_type(model_type: str) -> str | None:
    """The name of the recurrent layers in `layer_types` of such a model; None if it has none."""
    return _FAMILIES[model_type][0] if model_type in _FAMILIES else None


def recurrent_layers(config: Any, decoder: Any, name: str) -> dict[int, RecurrentLayer]:
    """The recurrent layers of a model by their 0-based ids; empty where there are none.

    Raises:
        UnsupportedModelError: there is nothing else.
    """
    if config.model_type not in _FAMILIES:
        return {}
    kind, seen_as = _FAMILIES[config.model_type]
    types = config.layer_types
    if set(types) <= {kind}:
        raise UnsupportedModelError(
            "target",
            expected="a layer of attention among the recurrent ones",
            got=f"{len(types)} layers of {kind} ({name})",
            remedy="The attention layers' cache is what counts positions; use another target.",
        )
    return {i: seen_as(decoder.layers[i]) for i, each in enumerate(types) if each == kind}


def most_rows(layers: Mapping[int, RecurrentLayer], memory_bytes: int) -> int:
    """N, the most rows of a round whose pending state and work space fit into this memory.

    N x the sum of bytes_per_row + N^2 x the largest bytes_per_pair <= memory_bytes; at least 1.
    """
    linear = sum(layer.bytes_per_row for layer in layers.values())
    square = max(layer.bytes_per_pair for layer in layers.values())
    rows = memory_bytes // linear
    while rows > 1 and rows * linear + rows * rows * square > memory_bytes:
        rows -= 1
    return max(rows, 1)


@contextmanager
def rows_of_a_tree(
    layers: Mapping[int, RecurrentLayer],
    stores: Mapping[int, RecurrentStore],
    ancestors: Bool[Tensor, "N N"],
) -> Iterator[None]:
    """During the block, these layers take their input [1, N, D] as the rows of a tree."""
    widths = {layer.width for layer in layers.values()}
    paths = {width: TreePaths(ancestors, width) for width in widths}
    # An instance's attribute hides the class's method; a wrapper may have put one there before.
    before = {i: layer.module.__dict__.get("forward") for i, layer in layers.items()}
    try:
        for i, layer in layers.items():
            ours = partial(_run, layer, stores[i], paths[layer.width])
            layer.module.__dict__["forward"] = ours
        yield
    finally:
        for i, layer in layers.items():
            layer.module.__dict__.pop("forward", None)
            if before[i] is not None:
                layer.module.__dict__["forward"] = before[i]


def _run(
    layer: RecurrentLayer,
    store: RecurrentStore,
    paths: TreePaths,
    hidden_states: Float[Tensor, "1 N D"],
    *args: object,
    **options: object,
) -> Float[Tensor, "1 N D"]:
    """A recurrent module's forward; cache and mask among the options are not needed here."""
    ran = layer.run(hidden_states[0], store.state, paths)
    store.offer(ran.rows)
    return ran.output[None]
