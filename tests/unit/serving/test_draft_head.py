"""The head for a batch of requests says what the drafter's own session says of each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from ddtree.models.drafter import DFlashDrafter
from ddtree.models.target import Target
from ddtree.models.transitions import TransitionHead
from ddtree.sampling.coupling import ChangesBehind, Coupling, CouplingWeights, Perturb
from ddtree.sampling.noise import Noise
from ddtree.serving.draft_head import DraftHead
from ddtree.train.network import new_network
from ddtree.types import Marginals, Walk
from tests.support.drafters import feed
from tests.support.models import VOCAB_SIZE, dflash_drafter, tiny_target

THIRD = tuple(range(0, VOCAB_SIZE, 3))
NUM_RANKS, TOP_K = 12, 6
# Two of the roots have no row in the reduced vocabulary; contexts differ in length.
ROOTS, CONTEXTS = (3, 4, 60, 59), (5, 1, 9, 3)
NUM_REQUESTS = len(ROOTS)

KINDS = {
    "plain": (None, False),
    "reduced": (THIRD, False),
    "transitions": (None, True),
    "reduced with transitions": (THIRD, True),
}


def drafter_of(
    target: Target, ids: tuple[int, ...] | None, has_transitions: bool, top_k: int = TOP_K
) -> DFlashDrafter:
    """A random drafter whose transitions weigh as much as its logits."""
    config = replace(
        dflash_drafter(target).config,
        selector_rank=5 if has_transitions else None,
        selector_top_k=top_k,
        draft_vocab_size=None if ids is None else len(ids),
        output_multiplier=0.5,
        final_logit_softcapping=20.0,
    )
    network = new_network(config, seed=3)
    generator = torch.Generator().manual_seed(1)
    for parameter in network.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0.0, 0.3, generator=generator)
    known = None if ids is None else torch.tensor(ids)
    return DFlashDrafter(network.eval(), target, name="random", draft_token_ids=known)


def head_of(drafter: DFlashDrafter) -> DraftHead:
    """As an engine puts it together from the parts of a checkpoint."""
    return DraftHead(
        drafter.logits,
        draft_token_ids=drafter.draft_token_ids,
        transitions=drafter.network.candidate_selector,
        num_candidates=drafter.config.selector_top_k,
    )


@contextmanager
def heard(drafter: DFlashDrafter) -> Iterator[list[Tensor]]:
    """The hidden states of every pass, [L, D] each."""
    found: list[Tensor] = []
    first = drafter.config.first_slot
    handle = drafter.network.register_forward_hook(lambda *of: found.append(of[2][first:]))
    yield found
    handle.remove()


@dataclass
class Recorded:
    """A `Perturb`, and what it was told."""

    inner: Perturb
    changes_behind: ChangesBehind | None = None

    def __call__(self, logits: Tensor, token_ids: Tensor | None) -> Tensor:
        return self.inner(logits, token_ids)

    def weigh(self, changes: Tensor) -> Tensor:
        return self.inner.weigh(changes)

    def keep(self, changes_behind: ChangesBehind) -> None:
        self.changes_behind = changes_behind
        self.inner.keep(changes_behind)


@dataclass
class Coupled:
    """The noise of some of the requests, and what it is worth to each at every depth."""

    who: Sequence[bool]
    num_depths: int

    def __post_init__(self) -> None:
        self.weights = [CouplingWeights(self.num_depths) for _ in self.who]
        for i, weights in enumerate(self.weights):
            weights.values[:, 0] += 0.1 * i
            weights.values[-1, 1] = 1.5
        each = enumerate(self.weights)
        self.couplings = [Coupling(temperature=0.7, noise=Noise(i), weights=w) for i, w in each]
        self.perturbs: list[Recorded | None] = [
            Recorded(coupling.perturb(length, VOCAB_SIZE)) if coupled else None
            for coupling, length, coupled in zip(self.couplings, CONTEXTS, self.who, strict=True)
        ]


def proposed(
    drafter: DFlashDrafter, coupled: Coupled, num_ranks: int = NUM_RANKS
) -> tuple[list[Marginals], Tensor]:
    """What a session of each request says, and the hidden states [R, L, D] that it says it by."""
    said = []
    generator = torch.Generator().manual_seed(7)
    with torch.inference_mode(), heard(drafter) as hidden:
        for length, root_id, perturb in zip(CONTEXTS, ROOTS, coupled.perturbs, strict=True):
            session, width = drafter.start(16), drafter.config.hidden_size
            taps = len(drafter.layer_ids)
            feed(session, torch.randn(length, taps * width, generator=generator))
            num_depths = drafter.num_depths
            found = session.propose(
                root_id, num_depths=num_depths, num_ranks=num_ranks, perturb=perturb
            )
            said.append(found)
    return said, torch.stack(hidden)


def assert_same(found: Marginals, expected: Marginals) -> None:
    """Products of more rows may be added up in another order; tokens must not care."""
    assert torch.equal(found.token_ids, expected.token_ids)
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=1e-6, atol=2e-6)
    assert found.log_probs.dtype == torch.float32
    assert (found.transitions is None) == (expected.transitions is None)
    if found.transitions is not None and expected.transitions is not None:
        assert torch.equal(found.transitions.ranks, expected.transitions.ranks)
        torch.testing.assert_close(
            found.transitions.log_probs, expected.transitions.log_probs, rtol=1e-6, atol=2e-6
        )


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama")


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS.keys())
def drafter(request: pytest.FixtureRequest, target: Target) -> DFlashDrafter:
    return drafter_of(target, *request.param)


WHO = pytest.mark.parametrize(
    "who",
    [(False,) * NUM_REQUESTS, (True,) * NUM_REQUESTS, (False, True, True, False)],
    ids=["greedy", "coupled", "mixed"],
)


@WHO
def test_a_batch_is_told_what_each_requests_own_session_says(
    who: tuple[bool, ...], drafter: DFlashDrafter
) -> None:
    expected, hidden = proposed(drafter, Coupled(who, drafter.num_depths))
    perturbs = Coupled(who, drafter.num_depths).perturbs
    found = head_of(drafter).marginals(hidden, ROOTS, NUM_RANKS, perturbs)
    assert len(found) == NUM_REQUESTS
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
    # They differ, or the test would say little.
    assert not torch.equal(found[0].token_ids, found[1].token_ids)


@WHO
def test_one_request_alone_is_told_the_same_to_the_bit(
    who: tuple[bool, ...], drafter: DFlashDrafter
) -> None:
    expected, hidden = proposed(drafter, Coupled(who, drafter.num_depths))
    perturbs = Coupled(who, drafter.num_depths).perturbs
    for i, said in enumerate(expected):
        (found,) = head_of(drafter).marginals(
            hidden[i : i + 1], ROOTS[i : i + 1], NUM_RANKS, perturbs[i : i + 1]
        )
        assert torch.equal(found.token_ids, said.token_ids)
        assert torch.equal(found.log_probs, said.log_probs)
        if said.transitions is not None:
            assert found.transitions is not None
            assert torch.equal(found.transitions.ranks, said.transitions.ranks)
            assert torch.equal(found.transitions.log_probs, said.transitions.log_probs)


def test_noise_changes_the_drafts_of_those_alone_who_have_it(drafter: DFlashDrafter) -> None:
    who = (False, True, False, True)
    _, hidden = proposed(drafter, Coupled(who, drafter.num_depths))
    head, nobody = head_of(drafter), [None] * NUM_REQUESTS
    greedy = head.marginals(hidden, ROOTS, NUM_RANKS, nobody)
    perturbs = Coupled(who, drafter.num_depths).perturbs
    for one, other, coupled in zip(
        head.marginals(hidden, ROOTS, NUM_RANKS, perturbs), greedy, who, strict=True
    ):
        assert torch.equal(one.log_probs, other.log_probs) != coupled


@pytest.mark.parametrize("num_ranks", [1, 5, len(THIRD), VOCAB_SIZE, 10 * VOCAB_SIZE])
def test_no_more_ranks_are_kept_than_asked_for_or_than_there_are_tokens(
    num_ranks: int, drafter: DFlashDrafter
) -> None:
    nobody = Coupled((False,) * NUM_REQUESTS, drafter.num_depths)
    expected, hidden = proposed(drafter, nobody, num_ranks)
    for one, other in zip(
        head_of(drafter).marginals(hidden, ROOTS, num_ranks, nobody.perturbs), expected, strict=True
    ):
        assert_same(one, other)
        if drafter.network.candidate_selector is not None:
            assert one.num_ranks == TOP_K


@pytest.mark.parametrize("ids", [None, THIRD], ids=["whole", "reduced"])
@pytest.mark.parametrize("top_k", [1, len(THIRD), 1000])
def test_any_number_of_candidates_is_scored_as_the_session_does(
    top_k: int, ids: tuple[int, ...] | None, target: Target
) -> None:
    drafter = drafter_of(target, ids, has_transitions=True, top_k=top_k)
    coupled = (True, False, True, False)
    expected, hidden = proposed(drafter, Coupled(coupled, drafter.num_depths))
    perturbs = Coupled(coupled, drafter.num_depths).perturbs
    found = head_of(drafter).marginals(hidden, ROOTS, NUM_RANKS, perturbs)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


# What the coupling learns by ----------------------------------------------------------------------


@pytest.mark.parametrize("ids", [None, THIRD], ids=["whole", "reduced"])
def test_a_coupled_request_is_told_how_its_logits_depend_on_the_tokens_before(
    ids: tuple[int, ...] | None, target: Target
) -> None:
    drafter = drafter_of(target, ids, has_transitions=True)
    everybody = (True,) * NUM_REQUESTS
    by_session, by_head = (Coupled(everybody, drafter.num_depths) for _ in range(2))
    said, hidden = proposed(drafter, by_session)
    head_of(drafter).marginals(hidden, ROOTS, NUM_RANKS, by_head.perturbs)
    for i in range(NUM_REQUESTS):
        expected, found = by_session.perturbs[i], by_head.perturbs[i]
        assert expected is not None
        assert found is not None
        assert expected.changes_behind is not None
        assert found.changes_behind is not None
        path = said[i].token_ids[:, 1].tolist()
        # A path may have tokens that cannot be drafted: 59, 1 and 2 are none of THIRD.
        for token_ids in ([], path[:1], path[:-1], [VOCAB_SIZE - 2, *path[:2]], (1, 2, 3)):
            with torch.inference_mode():
                got, wanted = found.changes_behind(token_ids), expected.changes_behind(token_ids)
            assert got.shape == (len(token_ids) + 1, len(ids or range(VOCAB_SIZE)))
            assert torch.equal(got, wanted)


def test_a_drafter_without_transitions_tells_the_noise_nothing(target: Target) -> None:
    drafter = drafter_of(target, THIRD, has_transitions=False)
    coupled = Coupled((True,) * NUM_REQUESTS, drafter.num_depths)
    _, hidden = proposed(drafter, Coupled((False,) * NUM_REQUESTS, drafter.num_depths))
    head_of(drafter).marginals(hidden, ROOTS, NUM_RANKS, coupled.perturbs)
    assert all(each is not None and each.changes_behind is None for each in coupled.perturbs)


@pytest.mark.parametrize("num_accepted", [0, 1, 3, 7])
def test_couplings_learn_the_same_from_the_walk(num_accepted: int, drafter: DFlashDrafter) -> None:
    everybody = (True,) * NUM_REQUESTS
    by_session, by_head = (Coupled(everybody, drafter.num_depths) for _ in range(2))
    said, hidden = proposed(drafter, by_session)
    head_of(drafter).marginals(hidden, ROOTS, NUM_RANKS, by_head.perturbs)
    for i in range(NUM_REQUESTS):
        path = said[i].token_ids[:num_accepted, 2].tolist()
        last = int(said[i].token_ids[min(num_accepted, drafter.num_depths - 1), 0])
        walked = Walk(
            path=tuple(range(1, num_accepted + 1)), token_ids=(*path, last), finish_reason=None
        )
        before = by_head.weights[i].values.copy()
        by_session.couplings[i].observe(walked)
        by_head.couplings[i].observe(walked)
        learnt, expected = by_head.weights[i].values, by_session.weights[i].values
        torch.testing.assert_close(torch.tensor(learnt), torch.tensor(expected), rtol=1e-4, atol=0)
        num_learnt = min(num_accepted + 1, drafter.num_depths)
        assert (learnt[:num_learnt] != before[:num_learnt]).any(axis=1).all()
        assert (learnt[num_learnt:] == before[num_learnt:]).all()


# What an engine hands over ------------------------------------------------------------------------


def test_a_narrow_dtype_is_ranked_and_normalised_in_float32() -> None:
    """As it is on GPUs, where hidden states and weights are bfloat16."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(VOCAB_SIZE, 8, generator=generator).bfloat16()
    hidden = torch.randn(2, 3, 8, generator=generator).bfloat16()
    transitions = TransitionHead(VOCAB_SIZE, 5, 8)
    for parameter in transitions.parameters():
        parameter.data.normal_(generator=generator)
    transitions.bfloat16().requires_grad_(False)
    expected = (hidden.flatten(0, 1) @ weight.T).float().log_softmax(dim=-1).unflatten(0, (2, 3))
    for head in (
        DraftHead(lambda rows: rows @ weight.T),
        DraftHead(lambda rows: rows @ weight.T, transitions=transitions, num_candidates=4),
    ):
        for i, found in enumerate(head.marginals(hidden, [3, 4], 4, [None, None])):
            assert found.log_probs.dtype == torch.float32
            if found.transitions is None:
                best = expected[i].gather(1, found.token_ids)
                torch.testing.assert_close(found.log_probs, best)
            else:
                # The candidates share out what their depth alone gives them.
                mass = expected[i].topk(4).values.exp().sum(dim=1)
                torch.testing.assert_close(found.log_probs[0].exp().sum(), mass[0])
                of_rows = found.transitions.log_probs.exp().sum(dim=-1)
                torch.testing.assert_close(of_rows, mass[1:, None].expand(2, 4))
                assert found.transitions.log_probs.dtype == torch.float32


def test_the_head_is_asked_once_for_all_requests() -> None:
    shapes = []

    def logits(rows: Tensor) -> Tensor:
        shapes.append(tuple(rows.shape))
        return torch.zeros(len(rows), 9)

    DraftHead(logits).marginals(torch.zeros(3, 4, 8), [1, 2, 3], 5, [None] * 3)
    assert shapes == [(12, 8)]


def test_a_request_too_few_is_a_bug_that_is_not_passed_over() -> None:
    head = DraftHead(lambda rows: torch.zeros(len(rows), 9))
    with pytest.raises(ValueError, match="shorter"):
        head.marginals(torch.zeros(3, 4, 8), [1, 2, 3], 5, [None] * 2)
