"""Coupled drafting: the noise that picks the target's token ranks the drafter's."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddtree.sampling.coupling import Coupling, CouplingWeights
from ddtree.sampling.noise import Noise, gumbel_noise
from ddtree.types import Walk

V, L, POSITION = 40, 3, 12


def walk_of(*token_ids: int) -> Walk:
    return Walk(path=tuple(range(1, len(token_ids))), token_ids=token_ids, finish_reason=None)


def coupling_at(
    temperature: float = 1.0, seed: int = 5, weights: CouplingWeights | None = None
) -> Coupling:
    weights = CouplingWeights(L) if weights is None else weights
    return Coupling(temperature=temperature, noise=Noise(seed), weights=weights)


def random_logits(seed: int, num_columns: int = V, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(L, num_columns, generator=generator)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_scores_are_weighted_logits_and_noise_of_each_depths_position(temperature: float) -> None:
    weights = CouplingWeights(L)
    weights.values[:] = [[0.5, 0.25], [1.0, 2.0], [0.125, 3.0]]
    logits = random_logits(0)
    scores = coupling_at(temperature, weights=weights).perturb(POSITION, V)(logits, None)
    for depth, (a, b) in enumerate(weights.values.tolist()):
        noise = gumbel_noise(5, POSITION + depth, V)
        expected = a * (logits[depth] - logits[depth].max()) + b * temperature * noise
        torch.testing.assert_close(scores[depth], expected)


def test_a_reduced_draft_vocabulary_reads_the_noise_of_its_own_tokens() -> None:
    ids = torch.tensor([1, 7, 8, 30])
    logits = random_logits(0)
    everything = coupling_at().perturb(POSITION, V)(logits, None)
    some = coupling_at().perturb(POSITION, V)(logits[:, ids], ids)
    # Each row is shifted by its own highest logit, which changes no difference.
    torch.testing.assert_close(some - some[:, :1], everything[:, ids] - everything[:, 1:2])


def test_perturbing_leaves_the_drafters_logits_alone() -> None:
    logits = random_logits(0)
    before = logits.clone()
    coupling_at().perturb(POSITION, V)(logits, None)
    assert torch.equal(logits, before)


@given(st.sampled_from([0.3, 1.0, 2.0]), st.integers(0, 2**40), st.integers(0, 1000))
def test_who_knows_the_targets_logits_and_weighs_them_alike_knows_its_choice(
    temperature: float, position: int, seed: int
) -> None:
    weights = CouplingWeights(L)
    weights.values[:] = 1.0
    logits = random_logits(seed)
    scores = coupling_at(temperature, seed, weights).perturb(position, V)(logits, None)
    for depth in range(L):
        chosen = (logits[depth] / temperature + gumbel_noise(seed, position + depth, V)).argmax()
        assert scores[depth].argmax() == chosen


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e-3, 1e3, 1e30, 1.7e308])
@pytest.mark.parametrize("spread", [0.0, 1e-3, 1e4])
def test_scores_are_finite_at_any_temperature(temperature: float, spread: float) -> None:
    weights = CouplingWeights(L)
    coupling = coupling_at(temperature, weights=weights)
    for seed in range(5):
        scores = coupling.perturb(POSITION, V)(random_logits(seed, spread=spread), None)
        assert torch.isfinite(scores).all()
        coupling.observe(walk_of(3, 4, 5))
    assert np.isfinite(weights.values).all()


# Learning.


def simulate(
    weights: CouplingWeights, *, error: float, rounds: int, temperature: float = 1.0
) -> tuple[float, float]:
    """Rounds of a target whose logits are the drafter's and an error.

    Returns:
        The mean probability given to the token ranked first, and how often it was chosen, at the
        first depth over the second half of the rounds.
    """
    promised, kept = [], []
    for index in range(rounds):
        coupling = coupling_at(temperature, index, weights)
        drafted = random_logits(2 * index)
        scores = coupling.perturb(POSITION, V)(drafted, None)
        target = drafted + random_logits(2 * index + 1, spread=error)
        chosen = [
            int((target[i] / temperature + gumbel_noise(index, POSITION + i, V)).argmax())
            for i in range(L)
        ]
        promised.append(float(scores[0].softmax(-1).max()))
        kept.append(int(scores[0].argmax()) == chosen[0])
        coupling.observe(walk_of(*chosen))
    half = rounds // 2
    return float(np.mean(promised[half:])), float(np.mean(kept[half:]))


@pytest.mark.parametrize(("error", "temperature"), [(0.5, 1.0), (1.5, 0.6), (4.0, 1.0)])
def test_the_probability_promised_becomes_the_share_that_is_kept(
    error: float, temperature: float
) -> None:
    promised, kept = simulate(CouplingWeights(L), error=error, rounds=400, temperature=temperature)
    # Three standard errors of 200 rounds.
    assert promised == pytest.approx(kept, abs=3 * math.sqrt(kept * (1 - kept) / 200))


def test_weights_of_a_drafter_that_knows_the_target_grow_together() -> None:
    weights = CouplingWeights(L)
    promised, kept = simulate(weights, error=0.0, rounds=300)
    assert kept > 0.95
    assert promised > 0.7
    assert weights.values[:, 0] == pytest.approx(weights.values[:, 1], rel=0.2)


def test_weights_of_a_drafter_that_is_noise_fall() -> None:
    weights = CouplingWeights(L)
    promised, kept = simulate(weights, error=300.0, rounds=300)
    assert promised < 0.15
    assert kept < 0.15


def test_weights_stay_in_range_whatever_is_chosen() -> None:
    weights = CouplingWeights(L)
    for index in range(200):
        coupling = coupling_at(1.0, index, weights)
        scores = coupling.perturb(POSITION, V)(random_logits(index, spread=50.0), None)
        coupling.observe(walk_of(*scores.argmin(-1).tolist()))
        assert ((weights.values >= 0.02) & (weights.values <= 4.0)).all()


def test_only_depths_where_the_walk_stood_are_learnt() -> None:
    weights = CouplingWeights(L)
    before = weights.values.copy()
    coupling = coupling_at(weights=weights)
    coupling.perturb(POSITION, V)(random_logits(0), None)
    coupling.observe(walk_of(3))
    assert (weights.values[0] != before[0]).all()
    assert (weights.values[1:] == before[1:]).all()


def test_tokens_beyond_the_drafted_depths_are_not_asked_about() -> None:
    coupling = coupling_at()
    coupling.perturb(POSITION, V)(random_logits(0)[:1], None)
    coupling.observe(walk_of(3, 4))


def test_a_choice_that_cannot_be_drafted_teaches_nothing() -> None:
    weights = CouplingWeights(L)
    before = weights.values.copy()
    coupling = coupling_at(weights=weights)
    ids = torch.tensor([1, 7, 8, 30])
    coupling.perturb(POSITION, V)(random_logits(0, 4), ids)
    coupling.observe(walk_of(2))
    assert (weights.values == before).all()
    coupling.perturb(POSITION, V)(random_logits(0, 4), ids)
    coupling.observe(walk_of(7))
    assert (weights.values[0] != before[0]).all()


def test_a_round_is_learnt_from_once_and_only_if_it_drafted() -> None:
    weights = CouplingWeights(L)
    coupling = coupling_at(weights=weights)
    coupling.observe(walk_of(3))
    assert (weights.values == CouplingWeights(L).values).all()
    coupling.perturb(POSITION, V)(random_logits(0), None)
    coupling.observe(walk_of(3))
    once = weights.values.copy()
    coupling.observe(walk_of(3))
    assert (weights.values == once).all()


@pytest.mark.parametrize("chosen", [0, 1], ids=["allowed", "banned"])
def test_a_banned_token_stays_banned_and_harms_no_weight(chosen: int) -> None:
    weights = CouplingWeights(L)
    coupling = coupling_at(weights=weights)
    logits = random_logits(0)
    logits[:, 1] = -torch.inf
    scores = coupling.perturb(POSITION, V)(logits, None)
    assert (scores[:, 1] == -torch.inf).all()
    assert torch.isfinite(scores[:, [0, *range(2, V)]]).all()
    coupling.observe(walk_of(chosen))
    assert np.isfinite(weights.values).all()


# Logits that depend on the token before.


@pytest.mark.parametrize("shape", [(L, 4), (L, 2, 5), (2, 3, 3)])
def test_changes_are_weighed_as_the_logits_that_they_change(shape: tuple[int, ...]) -> None:
    weights = CouplingWeights(L)
    weights.values[:] = [[0.5, 0.25], [1.0, 2.0], [0.125, 3.0]]
    perturb = coupling_at(weights=weights).perturb(POSITION, V)
    changes = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weighed = perturb.weigh(changes)
    for depth in range(shape[0]):
        torch.testing.assert_close(weighed[depth], float(weights.values[depth, 0]) * changes[depth])


def test_weighed_changes_of_logits_are_the_changes_of_their_scores() -> None:
    logits, changes = random_logits(0), random_logits(1)
    before = coupling_at().perturb(POSITION, V)
    scores, weighed = before(logits, None), before.weigh(changes)
    after = coupling_at().perturb(POSITION, V)(logits + changes, None)
    apart = after - (scores + weighed)
    # But for the shift of each row, which changes no rank.
    torch.testing.assert_close(apart, apart[:, :1].expand_as(apart), atol=1e-4, rtol=0)


def test_what_is_learnt_is_of_the_logits_behind_the_tokens_that_the_walk_took() -> None:
    logits, tables = random_logits(0), random_logits(1, V * V).reshape(L, V, V)
    root, chosen, ids = 17, (3, 5, 8), torch.arange(V).flip(0)

    def changes_behind(token_ids: Sequence[int]) -> torch.Tensor:
        previous = (root, *token_ids)
        return torch.stack([tables[depth, token] for depth, token in enumerate(previous)])

    for num_chosen in range(1, L + 1):
        told, hand_made = CouplingWeights(L), CouplingWeights(L)
        coupling = coupling_at(weights=told)
        perturb = coupling.perturb(POSITION, V)
        perturb(logits, ids)
        perturb.keep(changes_behind)
        coupling.observe(walk_of(*chosen[:num_chosen]))
        coupling = coupling_at(weights=hand_made)
        full = logits + torch.stack([tables[d, (root, *chosen)[d]] for d in range(L)])
        coupling.perturb(POSITION, V)(full, ids)
        coupling.observe(walk_of(*chosen[:num_chosen]))
        np.testing.assert_allclose(told.values, hand_made.values, rtol=1e-4)
        assert (
            (told.values[:num_chosen] != CouplingWeights(L).values[:num_chosen]).any(axis=1).all()
        )


def test_a_pass_that_was_not_asked_for_scores_teaches_nothing() -> None:
    weights = CouplingWeights(L)
    coupling = coupling_at(weights=weights)
    coupling.perturb(POSITION, V)
    coupling.observe(walk_of(3))
    assert (weights.values == CouplingWeights(L).values).all()


def test_gradients_are_not_wanted_of_what_a_drafter_tells() -> None:
    table = torch.nn.Parameter(random_logits(1))
    coupling = coupling_at()
    perturb = coupling.perturb(POSITION, V)
    with torch.inference_mode():
        perturb(random_logits(0), None)
    perturb.keep(lambda token_ids: table[: len(token_ids) + 1].bfloat16())
    coupling.observe(walk_of(3, 4))
