"""Bans in a draft: the tree of banned marginals is the tree that never asks for what is banned."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ddtree.host_marginals import HostMarginals
from ddtree.legal import _banned, _certain, _forced
from ddtree.tree import reference
from ddtree.tree.chain import build_chain
from ddtree.types import Marginals, Transitions

L, K, V = 4, 5, 12


def drafted(seed: int, *, first_order: bool) -> Marginals:
    """Random, with a token more than once at a depth's side, and bans of its own."""
    numbers = np.random.default_rng(seed)

    def sorted_rows(*shape: int) -> torch.Tensor:
        rows = torch.from_numpy(-numbers.exponential(1.0, shape)).float()
        rows[..., -1] = -torch.inf
        return rows.sort(dim=-1, descending=True).values

    ids = torch.tensor(np.stack([numbers.permutation(V)[:K] for _ in range(L)]))
    behind = None
    if first_order:
        ranks = [numbers.permutation(K) for _ in range((L - 1) * K)]
        behind = Transitions(
            sorted_rows(L - 1, K, K), torch.tensor(np.stack(ranks)).reshape(L - 1, K, K)
        )
    return Marginals(sorted_rows(L, K), ids, behind)


@pytest.mark.parametrize("first_order", [False, True])
@pytest.mark.parametrize("build", [reference.build_tree, build_chain])
def test_bans_in_the_marginals_are_bans_of_every_prefix(build: object, first_order: bool) -> None:
    for seed in range(40):
        said = drafted(seed, first_order=first_order)
        banned = torch.from_numpy(np.random.default_rng([seed]).random((L, V)) < 0.4)

        def allowed(prefix: tuple[int, ...], banned: torch.Tensor = banned) -> bool:
            return not banned[len(prefix) - 1, prefix[-1]]

        expected = build(said, 1, 9, allowed=allowed)
        found = build(_banned(said, banned), 1, 9)
        for name in ("token_ids", "parents", "depths", "log_probs"):
            assert (getattr(found, name) == getattr(expected, name)).all(), (seed, name)
        assert all(
            not banned[d - 1, t] for d, t in zip(found.depths[1:], found.token_ids[1:], strict=True)
        )


@pytest.mark.parametrize("first_order", [False, True])
@pytest.mark.parametrize("forced", [(7,), (7, 3), (7, 3, 9)])
def test_forced_tokens_are_certain_and_the_drafter_goes_on_behind_them(
    forced: tuple[int, ...], first_order: bool
) -> None:
    for seed in range(20):
        said = drafted(seed, first_order=first_order)
        found = _forced(said, forced)
        HostMarginals.of(found)
        tree = reference.build_tree(found, 1, 6)
        end = len(forced)
        assert tree.token_ids[1 : end + 1].tolist() == list(forced)
        assert tree.log_probs[: end + 1].tolist() == [0.0] * (end + 1)
        # Where the last one is no candidate of the drafter, what follows depends on nothing.
        if not first_order or said.token_ids[end - 1, 0] != forced[-1]:
            assert tree.log_probs[end + 1] == said.log_probs[end, 0]
            assert tree.token_ids[end + 1] == said.token_ids[end, 0]


def test_a_stretch_that_is_forced_to_the_end_needs_no_drafter() -> None:
    tree = reference.build_tree(_certain([7, 3, 9]), 1, 16)
    assert tree.token_ids.tolist() == [1, 7, 3, 9]
    assert tree.expected_acceptance_length == 4


def test_the_chain_takes_at_each_depth_the_best_token_that_may_follow_its_own() -> None:
    said = Marginals(
        torch.tensor([[0.6, 0.4], [0.9, 0.1], [0.7, 0.3]]).log(),
        torch.tensor([[7, 8], [5, 6], [3, 4]]),
    )
    texts = [(8, 5, 4), (8, 5), (8,), (7, 6)]
    chain = build_chain(said, 1, 16, allowed=texts.__contains__)
    assert chain.token_ids.tolist() == [1, 8, 5, 4]
    assert chain.ranks.tolist() == [-1, 1, 0, 1]
    assert np.exp(chain.log_probs).tolist() == pytest.approx([1, 0.4, 0.36, 0.108])
    assert build_chain(said, 1, 16, allowed=lambda prefix: False).num_nodes == 0
