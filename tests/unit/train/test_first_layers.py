"""A drafter that begins as its target's last layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ddtree.errors import OptionError, UnsupportedModelError
from ddtree.models.drafter_network import DFlashNetwork
from ddtree.models.target import Target
from ddtree.train.first_layers import begin_as_target, why_not
from ddtree.train.network import NetworkConfig, drafter_config_for, new_network
from tests.support.architectures import loaded
from tests.support.models import ARCHITECTURES, tiny_target

TEXT = [3, 1, 4, 1, 5, 9, 2, 6]


def network_for(target: Target, **options: object) -> DFlashNetwork:
    shape = NetworkConfig(block_size=4, num_layers=2, target_layer_ids=(1, 0), mask_token_id=60)
    return new_network(drafter_config_for(target, replace(shape, **options)), seed=0)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral"])
def test_layers_and_norms_are_the_targets(architecture: str) -> None:
    target = tiny_target(architecture)
    network, decoder = network_for(target), target.model.get_decoder()
    last = target.num_layers - 1
    assert begin_as_target(network, target, TEXT) == [last - 1, last]
    for layer, theirs in zip(network.layers, decoder.layers[-2:], strict=True):
        own = layer.state_dict()
        assert all(own[name].equal(tensor) for name, tensor in theirs.state_dict().items())
    assert network.norm.weight.equal(decoder.norm.weight)


def test_the_context_is_what_the_layer_behind_the_last_tap_reads() -> None:
    target = tiny_target("llama")
    network = network_for(target)
    begin_as_target(network, target, TEXT)
    features = torch.randn(5, 2 * target.hidden_size)
    behind = target.model.get_decoder().layers[2].input_layernorm
    # The last tapped layer is the first of the two here.
    want = behind(features[:, : target.hidden_size])
    assert network.hidden_norm(network.fc(features)).equal(want)


def test_where_the_target_does_not_normalise_heads_the_norms_keep_their_size() -> None:
    target = tiny_target("llama")
    network = network_for(target)
    begin_as_target(network, target, TEXT)
    seen: list[torch.Tensor] = []
    projection = target.model.get_decoder().layers[-1].self_attn.q_proj
    with projection.register_forward_hook(lambda _m, _i, output: seen.append(output)):
        target.prefill(torch.tensor(TEXT), target.new_cache(len(TEXT)))
    heads = seen[0].unflatten(-1, (-1, network.config.head_dim))
    size = heads.square().mean(-1).sqrt().mean()
    torch.testing.assert_close(
        network.layers[-1].self_attn.q_norm.weight, size.expand(network.config.head_dim)
    )


@pytest.mark.parametrize(
    ("architecture", "options", "reason"),
    [
        ("gemma2", {}, "norms of another kind in layer"),
        ("qwen2", {}, "other tensors or shapes in layer 2: self_attn.k_proj.bias"),
        ("llama", {"intermediate_size": 40}, "other tensors or shapes in layer"),
        ("llama", {"num_layers": 99}, "99 layers of"),
    ],
)
def test_a_target_of_another_kind_is_named(
    architecture: str, options: dict[str, object], reason: str
) -> None:
    known = architecture in ARCHITECTURES
    target = tiny_target(architecture) if known else loaded(architecture)
    network = network_for(target, **options)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    found = why_not(network, target)
    assert found is not None
    assert reason in found
    with pytest.raises(UnsupportedModelError, match="random"):
        begin_as_target(network, target, TEXT)
    assert all(before[name].equal(tensor) for name, tensor in network.state_dict().items())


def test_other_words_for_first_weights_are_named() -> None:
    with pytest.raises(OptionError, match="one of auto, target, random"):
        NetworkConfig(first_weights="zeros")
