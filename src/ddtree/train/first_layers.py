"""First weights of a drafter: its layers begin as the last ones of its target.

It reads the context, from the last tapped layer, as the target's own layer behind that one does,
and ends in the target's last norm: docs/decisions/0018 has what that is worth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddtree.errors import UnsupportedModelError
from ddtree.models.drafter_network import DFlashNetwork
from ddtree.models.fused import is_llamas_mlp, is_llamas_norm
from ddtree.models.target import Target

_NORMS_OF_HEADS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")


def begin_as_target(network: DFlashNetwork, target: Target, token_ids: Sequence[int]) -> list[int]:
    """Give a network the weights of the target's last layers, in place.

    Args:
        network: with first weights; what the target has no counterpart of keeps them.
        target: not packed.
        token_ids: some text. A target that does not normalise queries and keys is run on it to see
            how large they are; the drafter's norms get that size.

    Returns:
        The 0-based ids of the target's layers.

    Raises:
        UnsupportedModelError: see `why_not`.
    """
    reason = why_not(network, target)
    if reason is not None:
        raise UnsupportedModelError(
            "first_weights",
            expected=f"a target whose last layers are like the drafter's, for {target.name!r}",
            got=reason,
            remedy='Take first_weights = "random", or leave it out.',
        )
    decoder = _decoder(target)
    layer_ids = _last_layers(network, target)
    sizes: Mapping[str, float] = {}
    if not _normalises_heads(decoder.layers[layer_ids[0]]):
        sizes = _head_sizes(target, layer_ids, token_ids)
    for layer, layer_id in zip(network.layers, layer_ids, strict=True):
        own = decoder.layers[layer_id].state_dict()
        for name in _NORMS_OF_HEADS:
            if name not in own:
                own[name] = torch.full_like(layer.state_dict()[name], sizes[f"{layer_id} {name}"])
        layer.load_state_dict(own, strict=False)
    _read_the_last_tap(network, decoder)
    network.norm.load_state_dict(decoder.norm.state_dict())
    return layer_ids


def why_not(network: DFlashNetwork, target: Target) -> str | None:
    """What keeps a network from beginning as its target; None: nothing.

    Layers must be of Llama's kind, with tensors of the same names and shapes: a norm that counts
    from one, or experts in place of one feed-forward layer, would be another function.
    """
    decoder = _decoder(target)
    if network.config.num_layers > target.num_layers:
        return f"{network.config.num_layers} layers of {target.num_layers}"
    for layer, layer_id in zip(network.layers, _last_layers(network, target), strict=True):
        theirs = decoder.layers[layer_id]
        if not is_llamas_norm(getattr(theirs, "input_layernorm", None)):
            return f"norms of another kind in layer {layer_id}"
        if not is_llamas_mlp(getattr(theirs, "mlp", None)):
            return f"a feed-forward layer of another kind in layer {layer_id}"
        ours = {n: t.shape for n, t in layer.state_dict().items() if "_conv" not in n}
        found = {n: t.shape for n, t in theirs.state_dict().items()}
        for name in _NORMS_OF_HEADS:
            found.setdefault(name, ours[name])
        if ours != found:
            odd = sorted(n for n in {*ours, *found} if ours.get(n) != found.get(n))
            return f"other tensors or shapes in layer {layer_id}: {odd[0]}"
    return None


def _decoder(target: Target) -> Any:
    return target.model.get_decoder()


def _last_layers(network: DFlashNetwork, target: Target) -> list[int]:
    return list(range(target.num_layers - network.config.num_layers, target.num_layers))


def _normalises_heads(layer: nn.Module) -> bool:
    return all(name in layer.state_dict() for name in _NORMS_OF_HEADS)


def _read_the_last_tap(network: DFlashNetwork, decoder: Any) -> None:
    """Context as the target's layer behind the last tapped one gets it, after that layer's norm."""
    taps, hidden = network.config.target_layer_ids, network.config.hidden_size
    last = max(taps)
    place = taps.index(last) * hidden
    weight = torch.zeros_like(network.fc.weight)
    weight[:, place : place + hidden] = torch.eye(hidden)
    network.fc.weight.data.copy_(weight)
    behind = decoder.layers[min(last + 1, len(decoder.layers) - 1)]
    network.hidden_norm.load_state_dict(behind.input_layernorm.state_dict())


@torch.no_grad()
def _head_sizes(
    target: Target, layer_ids: Sequence[int], token_ids: Sequence[int]
) -> dict[str, float]:
    """Mean root mean square of the heads of queries and keys, by layer and norm."""
    found: dict[str, float] = {}
    decoder = _decoder(target)
    hooks = []
    for layer_id in layer_ids:
        attention = decoder.layers[layer_id].self_attn
        for norm in _NORMS_OF_HEADS:
            projection = getattr(attention, norm.split(".")[1].replace("norm", "proj"))
            note = partial(_note_size, found, f"{layer_id} {norm}", int(attention.head_dim))
            hooks.append(projection.register_forward_hook(note))
    try:
        ids = torch.tensor(token_ids, device=target.device)
        target.prefill(ids, target.new_cache(len(token_ids)))
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _note_size(
    found: dict[str, float],
    key: str,
    width: int,
    _module: nn.Module,
    _inputs: object,
    output: Tensor,
) -> None:
    heads = output.float().view(*output.shape[:-1], -1, width)
    found[key] = float(heads.square().mean(-1).sqrt().mean())
