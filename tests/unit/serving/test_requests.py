"""What is remembered of a request: when a draft is of use, what a walk teaches, what is shared."""

from __future__ import annotations

import pytest
import torch

from ddtree.sampling.coupling import Coupling, CouplingWeights
from ddtree.sampling.lookup import Guessing, new_weights
from ddtree.sampling.noise import Noise, gumbel_noise
from ddtree.serving.requests import CouplingBook, RequestState
from ddtree.serving.step import chain_of
from ddtree.types import Marginals, Method, Walk

V, L, SEED = 40, 3, 5
TEXT = [1, 2, 3, 4, 1, 2]


def state(**changes: object) -> RequestState:
    fields: dict[str, object] = {
        "request_id": "a",
        "token_ids": list(TEXT),
        "method": "ddtree",
        "budget": 8,
        "noise": Noise(SEED),
    }
    return RequestState(**{**fields, **changes})


def walk_of(*token_ids: int) -> Walk:
    return Walk(path=tuple(range(1, len(token_ids))), token_ids=token_ids, finish_reason=None)


def random_logits(seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(L, V, generator=torch.Generator().manual_seed(seed))


def draft() -> Marginals:
    return Marginals(torch.tensor([[0.6, 0.4]] * L).log(), torch.tensor([[5, 6]] * L))


# Whether to draft ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "expected"), [(None, True), (0, False), (1, False), (2, True), (3, True)]
)
@pytest.mark.parametrize("method", ["dflash", "ddtree"])
def test_a_text_that_ends_with_the_next_token_is_not_drafted(
    method: Method, left: int | None, expected: bool
) -> None:
    max_length = None if left is None else len(TEXT) + left
    assert state(method=method, max_length=max_length).can_draft == expected


@pytest.mark.parametrize("max_length", [None, 1000])
def test_neither_plain_decoding_nor_a_budget_of_nothing_is_drafted(max_length: int | None) -> None:
    assert not state(method="ar", max_length=max_length).can_draft
    assert not state(budget=0, max_length=max_length).can_draft
    assert not state(method="ar", budget=0, max_length=max_length).can_draft
    assert state(budget=1, max_length=max_length).can_draft


def test_what_is_left_shrinks_as_the_text_grows() -> None:
    request = state(max_length=len(TEXT) + 4)
    assert request.can_draft
    request.take(walk_of(7, 8))
    assert request.can_draft  # two are left
    request.take(walk_of(9))
    assert not request.can_draft
    # A walk may go beyond the limit; the engine cuts the text.
    request.take(walk_of(7, 8))
    assert not request.can_draft


# The walk is over ---------------------------------------------------------------------------------


def test_the_text_grows_by_what_was_delivered_and_its_last_token_is_the_root() -> None:
    request = state()
    assert request.root_id == 2
    request.take(walk_of(7))
    assert (request.token_ids, request.root_id) == ([*TEXT, 7], 7)
    request.take(walk_of(8, 9, 6))
    assert (request.token_ids, request.root_id) == ([*TEXT, 7, 8, 9, 6], 6)


def test_drafts_are_forgotten_with_the_step_that_verified_them() -> None:
    request = state(tree=chain_of(2, (5, 5)), drafted=draft())
    request.take(walk_of(7))
    assert request.tree is None
    assert request.drafted is None


@pytest.mark.parametrize("token_ids", [(5,), (5, 7), (5, 7, 9, 3)])
def test_the_coupling_hears_of_the_walk(token_ids: tuple[int, ...]) -> None:
    learnt, expected = CouplingWeights(L), CouplingWeights(L)
    request, twin = (
        state(coupling=Coupling(temperature=0.8, noise=Noise(SEED), weights=weights))
        for weights in (learnt, expected)
    )
    for each in (request, twin):
        assert each.coupling is not None
        each.coupling.perturb(len(TEXT), V)(random_logits(), None)
    assert twin.coupling is not None
    twin.coupling.observe(walk_of(*token_ids))
    request.take(walk_of(*token_ids))
    assert (learnt.values == expected.values).all()
    assert (learnt.values != CouplingWeights(L).values).any()
    # Once: the next walk is of a step that drafted nothing.
    request.take(walk_of(3, 4))
    assert (learnt.values == expected.values).all()


@pytest.mark.parametrize("token_ids", [(3,), (3, 4), (3, 9), (6,), (3, 4, 1, 2)])
def test_guesses_hear_of_the_walk(token_ids: tuple[int, ...]) -> None:
    learnt, expected = new_weights(), new_weights()
    request, twin = state(guessing=Guessing(learnt)), Guessing(expected)
    assert request.guessing is not None
    # Behind 1, 2 came 3, 4, and is guessed again.
    request.guessing.into(draft(), request.token_ids)
    twin.into(draft(), TEXT)
    twin.learn(token_ids)
    request.take(walk_of(*token_ids))
    assert learnt.counts == expected.counts
    assert learnt.counts != new_weights().counts
    request.take(walk_of(3, 4))
    assert learnt.counts == expected.counts


def test_a_step_without_a_draft_teaches_nothing() -> None:
    couplings, guesses = CouplingWeights(L), new_weights()
    request = state(
        coupling=Coupling(temperature=0.8, noise=Noise(SEED), weights=couplings),
        guessing=Guessing(guesses),
    )
    request.take(walk_of(3, 4))
    assert (couplings.values == CouplingWeights(L).values).all()
    assert guesses.counts == new_weights().counts
    assert request.token_ids == [*TEXT, 3, 4]


def test_a_draft_that_had_to_wait_is_learnt_from_where_the_text_goes_on() -> None:
    """A preempted request loses its tree, but its next token is still the first one drafted."""
    learnt, expected = CouplingWeights(L), CouplingWeights(L)
    request = state(coupling=Coupling(temperature=0.8, noise=Noise(SEED), weights=learnt))
    twin = Coupling(temperature=0.8, noise=Noise(SEED), weights=expected)
    assert request.coupling is not None
    for coupling in (request.coupling, twin):
        coupling.perturb(len(TEXT), V)(random_logits(), None)
    request.tree = request.drafted = None
    request.take(walk_of(7))
    twin.observe(walk_of(7))
    assert (learnt.values == expected.values).all()


def test_a_request_does_not_print_its_marginals() -> None:
    assert "log_probs" not in repr(state(drafted=draft()))


# What all requests share --------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_greedy_requests_have_no_noise_to_lend(temperature: float) -> None:
    assert CouplingBook(L).coupling(temperature, Noise(SEED)) is None


def learn(coupling: Coupling | None) -> None:
    assert coupling is not None
    coupling.perturb(len(TEXT), V)(random_logits(), None)
    coupling.observe(walk_of(3, 4))


def scores(book: CouplingBook, temperature: float, seed: int = SEED) -> torch.Tensor:
    coupling = book.coupling(temperature, Noise(seed))
    assert coupling is not None
    return coupling.perturb(len(TEXT), V)(random_logits(), None)


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        (0.8, 0.8, True),
        (0.76, 0.84, True),
        (0.8, 0.84, True),
        (0.74, 0.76, False),
        (0.8, 0.9, False),
        (0.01, 0.04, True),  # all that is nearly greedy
        (0.04, 0.06, False),
        (1.96, 2.04, True),
    ],
)
def test_requests_of_about_one_temperature_learn_together(
    one: float, other: float, shared: bool
) -> None:
    book = CouplingBook(L)
    before = scores(book, other)
    learn(book.coupling(one, Noise(SEED)))
    assert torch.equal(scores(book, other), before) != shared


@pytest.mark.parametrize(("temperature", "seed"), [(0.76, 5), (0.84, 5), (0.8, 6)])
def test_each_request_keeps_its_own_temperature_and_noise(temperature: float, seed: int) -> None:
    book, shared = CouplingBook(L), CouplingWeights(L)
    learn(book.coupling(0.8, Noise(SEED)))
    learn(Coupling(temperature=0.8, noise=Noise(SEED), weights=shared))
    logits, found = random_logits(), scores(book, temperature, seed)
    for depth, (a, b) in enumerate(shared.values.tolist()):
        noise = temperature * gumbel_noise(seed, len(TEXT) + depth, V)
        expected = a * (logits[depth] - logits[depth].max()) + b * noise
        torch.testing.assert_close(found[depth], expected)


def test_a_book_has_weights_for_every_depth_of_a_pass() -> None:
    for num_depths in (1, 7):
        coupling = CouplingBook(num_depths).coupling(1.0, Noise(SEED))
        assert coupling is not None
        logits = torch.randn(num_depths, V, generator=torch.Generator().manual_seed(0))
        assert coupling.perturb(9, V)(logits, None).shape == (num_depths, V)
        coupling.observe(walk_of(*range(num_depths + 1)))
