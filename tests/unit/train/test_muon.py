"""Muon moves matrices along orthogonal ones, as torch's own does, and shares the work."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from ddtree.train.fit_config import FitConfig
from ddtree.train.muon import Muon, orthogonal
from ddtree.train.network import NetworkConfig, drafter_config_for, new_network
from ddtree.train.optimizers import optimizers_for
from ddtree.train.peers import Peers
from tests.support.models import tiny_target

SHAPES = [(24, 60), (60, 24), (32, 32), (8, 32)]


def matrices(seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def with_gradients(owned: Sequence[torch.nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for matrix in owned:
        matrix.grad = torch.randn(matrix.shape, generator=generator)


def muon(owned: Sequence[torch.nn.Parameter], peers: Peers, products: torch.dtype) -> Muon:
    return Muon(owned, learning_rate=0.02, weight_decay=0.1, products=products, peers=peers)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("products", [torch.float32, torch.bfloat16], ids=str)
def test_singular_values_come_near_one_and_vectors_stay(
    shape: tuple[int, int], products: torch.dtype
) -> None:
    torch.manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    strengths = torch.logspace(0, -1.5, min(shape))
    made = orthogonal(u * strengths @ v, products)
    assert made.dtype == torch.float32
    inner = u.T @ made @ v.T
    assert inner.diagonal().min() > 0.6
    assert inner.diagonal().max() < 1.3
    off = inner - torch.diag(inner.diagonal())
    assert off.abs().max() < (0.15 if products is torch.bfloat16 else 1e-3)


def test_a_step_is_that_of_torchs_own() -> None:
    ours, theirs = matrices(), matrices()
    mine = muon(ours, Peers(), torch.bfloat16)
    reference = torch.optim.Muon(
        theirs, lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(4):
        for owned in (ours, theirs):
            with_gradients(owned, seed=step)
        mine.step()
        reference.step()
    for a, b, begin in zip(ours, theirs, matrices(), strict=True):
        moved = (b - begin).norm()
        assert (a - b).norm() < 0.02 * moved, "but for rounding of the iteration"


class Others(Peers):
    """The other processes of a training, which bring what they should."""

    def __init__(self, rank: int, size: int, whole: Tensor) -> None:
        super().__init__(rank, size)
        self._whole = whole
        self.brought = 0

    def sum_of(self, values: Tensor) -> Tensor:
        """See `Peers`; what this process has made must be right, the rest nothing."""
        made = values != 0
        assert torch.equal(values[made], self._whole[made])
        self.brought = int(made.sum())
        return self._whole.clone()


def test_processes_share_the_work_and_end_with_the_same_weights() -> None:
    alone = matrices()
    with_gradients(alone, seed=5)
    reference = muon(alone, Peers(), torch.float32)
    made = reference._shared([reference._momentum(matrix) for matrix in alone])
    whole = torch.cat([direction.flatten() for direction in made])
    reference.state.clear()
    reference.step()
    brought = []
    for rank in range(2):
        owned, peers = matrices(), Others(rank, 2, whole)
        with_gradients(owned, seed=5)
        muon(owned, peers, torch.float32).step()
        assert all(torch.equal(a, b) for a, b in zip(owned, alone, strict=True))
        brought.append(peers.brought)
    assert sum(brought) == whole.numel()
    assert min(brought) > 0.3 * whole.numel()


def test_matrices_of_layers_follow_muon_and_all_else_adamw() -> None:
    shape = NetworkConfig(
        block_size=4, num_layers=2, target_layer_ids=(0, 2), mask_token_id=60, transition_rank=6
    )
    network = new_network(drafter_config_for(tiny_target("llama"), shape), seed=0)
    config = FitConfig(optimizer="muon")
    both = optimizers_for(network, config, torch.float32, Peers())
    hidden, rest = both._parts
    moved = {id(p) for group in hidden.param_groups for p in group["params"]}
    named = {name for name, p in network.named_parameters() if id(p) in moved}
    assert {name.split(".")[0] for name in named} == {"layers", "fc"}
    assert all(p.ndim == 2 for group in hidden.param_groups for p in group["params"])
    others = sum(len(group["params"]) for group in rest.param_groups)
    assert len(moved) + others == len(list(network.parameters()))
    assert isinstance(hidden, Muon)
    (only,) = optimizers_for(copy.deepcopy(network), FitConfig(), torch.float32, Peers())._parts
    assert isinstance(only, torch.optim.AdamW)
