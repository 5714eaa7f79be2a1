"""A batch's trees: those that each request would have had alone, under one budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from numpy import ndarray
from torch import Tensor

from ddtree.config import DecodeConfig
from ddtree.decode import Stages
from ddtree.models.drafter import DFlashDrafter
from ddtree.models.target import Target
from ddtree.models.transitions import TransitionHead
from ddtree.pair import Pair
from ddtree.sampling.coupling import Coupling, CouplingWeights
from ddtree.sampling.lookup import Guessing, new_weights
from ddtree.sampling.noise import Noise
from ddtree.serving.draft_head import DraftHead
from ddtree.serving.drafting import BatchDrafting, _down_to
from ddtree.serving.requests import CouplingBook, RequestState
from ddtree.serving.shared_budget import AutoShare, FixedShare
from ddtree.serving.step_costs import StepCosts
from ddtree.train.network import new_network
from ddtree.tree.chain import build_chain
from ddtree.tree.host import build_tree
from ddtree.types import DraftTree, Marginals, Method, Transitions, Walk
from tests.support.models import VOCAB_SIZE, dflash_drafter, tiny_target

THIRD = tuple(range(0, VOCAB_SIZE, 3))
BUDGET, SEED = 12, 3
L, K = 5, 8


def assert_same(found: DraftTree, expected: DraftTree) -> None:
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)
    np.testing.assert_array_equal(found.parents, expected.parents)
    np.testing.assert_array_equal(found.depths, expected.depths)
    np.testing.assert_array_equal(found.ranks, expected.ranks)
    np.testing.assert_array_equal(found.log_probs, expected.log_probs)


def state(
    name: str,
    token_ids: Sequence[int] = (1, 2, 3),
    *,
    method: Method = "ddtree",
    budget: int = BUDGET,
    coupling: Coupling | None = None,
    guessing: Guessing | None = None,
) -> RequestState:
    return RequestState(
        request_id=name,
        token_ids=list(token_ids),
        method=method,
        budget=budget,
        noise=Noise(SEED),
        coupling=coupling,
        guessing=guessing,
    )


def random_marginals(seed: int, spread: float = 2.0) -> Marginals:
    logits = spread * torch.randn(L, 40, generator=torch.Generator().manual_seed(seed))
    best = logits.log_softmax(dim=1).topk(K)
    return Marginals(best.values, best.indices)


@dataclass
class RecordedShare:
    """Gives every request so many nodes, in turn, and remembers what it was told.

    Args:
        counts: of the requests, those included that drafted nothing.
        factor: on log-probs, when they are calibrated.
    """

    counts: Sequence[int]
    factor: float = 1.0
    max_nodes: int = BUDGET
    gains: list[ndarray] = field(default_factory=list)
    other_rows: list[int] = field(default_factory=list)
    calibrated: list[Marginals] = field(default_factory=list)

    def wants_drafts(self, num_requests: int, other_rows: int) -> bool:
        return True

    def calibrate(self, marginals: Marginals) -> Marginals:
        self.calibrated.append(marginals)
        return replace(marginals, log_probs=marginals.log_probs * self.factor)

    def share(self, gains: Sequence[ndarray], num_other_rows: int) -> list[int]:
        self.gains = list(gains)
        self.other_rows.append(num_other_rows)
        return list(self.counts)

    def observe_walks(
        self, walks: Sequence[tuple[Marginals, Walk]], *, num_requests: int, num_tokens: int
    ) -> None: ...

    def observe_seconds(self, seconds: float, *, num_rows: int, num_drafted: int) -> None: ...


def drafting_by(share: RecordedShare | FixedShare | AutoShare) -> BatchDrafting:
    return BatchDrafting(share, vocab_size=VOCAB_SIZE, max_nodes=BUDGET)


# One request, as the loop drafts it ---------------------------------------------------------------

KINDS = {
    "plain": (None, None),
    "reduced": (THIRD, None),
    "transitions": (None, 5),
    "reduced with transitions": (THIRD, 5),
}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama")


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS.keys())
def drafter(request: pytest.FixtureRequest, target: Target) -> DFlashDrafter:
    ids, rank = request.param
    config = replace(
        dflash_drafter(target).config,
        selector_rank=rank,
        selector_top_k=6,
        draft_vocab_size=None if ids is None else len(ids),
    )
    network = new_network(config, seed=3)
    generator = torch.Generator().manual_seed(1)
    for parameter in network.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0.0, 0.3, generator=generator)
    known = None if ids is None else torch.tensor(ids)
    return DFlashDrafter(network.eval(), target, name="random", draft_token_ids=known)


@dataclass(frozen=True)
class HeardRound:
    """A round of the loop: what the drafter's network said, the tree, and where the walk went.

    Those of the prefill are None.
    """

    hidden: Tensor | None
    tree: DraftTree | None
    walk: Walk


@contextmanager
def passes(drafter: DFlashDrafter) -> Iterator[list[Tensor]]:
    """The hidden states [L, D] of every pass."""
    found: list[Tensor] = []
    first = drafter.config.first_slot
    handle = drafter.network.register_forward_hook(lambda *of: found.append(of[2][first:]))
    yield found
    handle.remove()


def rounds_of(pair: Pair, prompt: list[int], config: DecodeConfig) -> list[HeardRound]:
    """All rounds whose drafts are of full depth: the loop asks for less where a text ends."""
    built: list[DraftTree] = []
    walks: list[Walk] = []

    def listening(stages: Stages) -> Stages:
        def build(marginals: Marginals, root_id: int, budget: int) -> DraftTree:
            built.append(stages.build(marginals, root_id, budget))
            return built[-1]

        def walk(*arguments: object) -> Walk:
            walks.append(stages.walk(*arguments))  # type: ignore[arg-type]
            return walks[-1]

        return replace(stages, build=build, walk=walk)

    drafter = pair.drafter
    assert isinstance(drafter, DFlashDrafter)
    with passes(drafter) as hidden:
        for _ in pair.run(prompt, config, observe=listening):
            pass
    drafted = zip(hidden, built, walks[1:], strict=False)
    rounds = [HeardRound(None, None, walks[0]), *(HeardRound(*each) for each in drafted)]
    delivered, kept = 0, []
    for one in rounds:
        # Room is left for the deepest node and a token behind it.
        if config.max_new_tokens - delivered <= drafter.num_depths:
            break
        kept.append(one)
        delivered += len(one.walk.token_ids)
    return kept


def head_of(drafter: DFlashDrafter) -> DraftHead:
    return DraftHead(
        drafter.logits,
        draft_token_ids=drafter.draft_token_ids,
        transitions=drafter.network.candidate_selector,
        num_candidates=drafter.config.selector_top_k,
    )


@pytest.mark.parametrize(
    ("method", "temperature"), [("ddtree", 0.0), ("ddtree", 0.8), ("dflash", 0.8)]
)
def test_one_request_gets_in_every_step_the_tree_that_the_loop_would_build(
    method: Method, temperature: float, drafter: DFlashDrafter, target: Target
) -> None:
    """Over a text that repeats itself, so that guesses join; what is learnt must be the same."""
    pair, prompt = Pair(target, drafter), [5, 6, 7, 8, 9, 5, 6, 7, 8]
    config = DecodeConfig(
        method=method, budget=BUDGET, temperature=temperature, seed=SEED, max_new_tokens=40
    )
    rounds = rounds_of(pair, prompt, config)
    book, guesses = CouplingBook(drafter.num_depths), new_weights()
    request = state(
        "a",
        prompt,
        method=method,
        coupling=book.coupling(temperature, Noise(SEED)),
        guessing=Guessing(guesses),
    )
    drafting, head = drafting_by(FixedShare(BUDGET)), head_of(drafter)
    num_nodes = 0
    for one in rounds:
        if one.hidden is not None:
            said = drafting.ask(head, one.hidden[None], [request])
            (tree,) = drafting.trees(said, [request], 0, 0)
            assert one.tree is not None
            assert_same(tree, one.tree)
            num_nodes = max(num_nodes, tree.num_nodes)
        request.take(one.walk)
    assert len(rounds) > 8
    assert num_nodes == (BUDGET if method == "ddtree" else drafter.num_depths)
    assert (guesses.counts == new_weights().counts) == (method == "dflash")
    assert any(one.walk.path for one in rounds)


# The drafter is asked -----------------------------------------------------------------------------


def small_head(has_transitions: bool) -> DraftHead:
    """A head over few numbers; with transitions, drafts depend on the root."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(VOCAB_SIZE, 8, generator=generator)
    transitions = None
    if has_transitions:
        transitions = TransitionHead(VOCAB_SIZE, 5, 8).requires_grad_(False)
        for parameter in transitions.parameters():
            parameter.normal_(generator=generator)
    return DraftHead(lambda rows: rows @ weight.T, transitions=transitions, num_candidates=6)


@pytest.mark.parametrize("has_transitions", [False, True])
def test_the_head_is_asked_of_each_request_by_its_root_and_the_noise_of_what_is_drafted(
    has_transitions: bool,
) -> None:
    couplings = [
        Coupling(temperature=0.8, noise=Noise(SEED), weights=CouplingWeights(L)) for _ in range(4)
    ]
    requests = [
        state("a", [*range(9), 7], coupling=couplings[0], budget=2),
        state("b", [4, 8]),
        state("c", [*range(4), 7], coupling=couplings[1]),
    ]
    hidden = torch.randn(3, L, 8, generator=torch.Generator().manual_seed(1))
    head = small_head(has_transitions)
    found = drafting_by(FixedShare(BUDGET)).ask(head, hidden, requests)
    # The root is the last of the text; behind it comes the token at depth 1.
    perturbs = [couplings[2].perturb(10, VOCAB_SIZE), None, couplings[3].perturb(5, VOCAB_SIZE)]
    expected = head.marginals(hidden, [7, 8, 7], BUDGET, perturbs)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.token_ids, other.token_ids)
        assert torch.equal(one.log_probs, other.log_probs)
        assert one.num_ranks == (6 if has_transitions else BUDGET)
        if other.transitions is not None:
            assert one.transitions is not None
            assert torch.equal(one.transitions.ranks, other.transitions.ranks)
            assert torch.equal(one.transitions.log_probs, other.transitions.log_probs)


def test_couplings_learn_of_the_pass_that_was_asked_for() -> None:
    weights, expected = CouplingWeights(L), CouplingWeights(L)
    coupling, twin = (
        Coupling(temperature=0.8, noise=Noise(SEED), weights=each) for each in (weights, expected)
    )
    request, head = state("a", [4, 8, 7], coupling=coupling), small_head(True)
    hidden = torch.randn(1, L, 8, generator=torch.Generator().manual_seed(1))
    (said,) = drafting_by(FixedShare(BUDGET)).ask(head, hidden, [request])
    head.marginals(hidden, [7], BUDGET, [twin.perturb(3, VOCAB_SIZE)])
    walk = Walk(path=(1,), token_ids=(int(said.token_ids[0, 0]), 9), finish_reason=None)
    request.take(walk)
    twin.observe(walk)
    assert (weights.values == expected.values).all()
    assert (weights.values[:2] != CouplingWeights(L).values[:2]).any(axis=1).all()


# Several requests ---------------------------------------------------------------------------------


def test_each_request_of_a_batch_gets_the_tree_that_it_would_get_alone() -> None:
    texts = ([1, 2, 3, 4, 1, 2], [5, 6, 7], [9, 8, 7, 9, 8], [3])
    methods: tuple[Method, ...] = ("ddtree", "dflash", "ddtree", "ddtree")
    said = [random_marginals(seed) for seed in range(4)]

    def requests() -> list[RequestState]:
        each = zip("abcd", texts, methods, strict=True)
        return [
            state(name, text, method=method, guessing=Guessing(new_weights()))
            for name, text, method in each
        ]

    drafting, batch = drafting_by(FixedShare(BUDGET)), requests()
    found = drafting.trees(said, batch, 0, 0)
    for i, alone in enumerate(requests()):
        (expected,) = drafting.trees([said[i]], [alone], 0, 0)
        assert_same(found[i], expected)
        assert found[i].token_ids[0] == texts[i][-1]
        assert batch[i].tree is found[i]
    # In another order of the requests, the trees are in that order.
    backwards = drafting.trees(said[::-1], requests()[::-1], 0, 0)
    for one, other in zip(backwards, found[::-1], strict=True):
        assert_same(one, other)


def test_a_method_has_its_builder_and_chains_are_never_mixed_with_guesses() -> None:
    text, said = [1, 2, 3, 4, 1, 2], random_marginals(0)
    drafting = drafting_by(FixedShare(BUDGET))

    def drafted(method: Method, guessing: Guessing | None) -> RequestState:
        request = state("a", text, method=method, guessing=guessing)
        drafting.trees([said], [request], 0, 0)
        return request

    weights = new_weights()
    chain = drafted("dflash", Guessing(weights))
    assert chain.tree is not None
    assert_same(chain.tree, build_chain(said, 2, BUDGET))
    assert chain.drafted is said
    chain.take(Walk(path=(), token_ids=(3,), finish_reason=None))
    assert weights.counts == new_weights().counts

    plain = drafted("ddtree", None)
    assert plain.tree is not None
    assert_same(plain.tree, build_tree(said, 2, BUDGET))
    assert plain.drafted is said

    mixed = Guessing(new_weights()).into(said, text)
    assert mixed.transitions is not None
    guessed = drafted("ddtree", Guessing(new_weights()))
    assert guessed.tree is not None
    assert guessed.drafted is not None
    assert_same(guessed.tree, build_tree(mixed, 2, BUDGET))
    assert torch.equal(guessed.drafted.token_ids, mixed.token_ids)
    assert torch.equal(guessed.drafted.log_probs, mixed.log_probs)


@pytest.mark.parametrize("method", ["dflash", "ddtree"])
def test_trees_are_of_calibrated_drafts_and_the_drafts_are_kept_as_they_were(
    method: Method,
) -> None:
    said, share = random_marginals(0), RecordedShare([BUDGET], factor=0.25)
    request = state("a", method=method)
    (tree,) = drafting_by(share).trees([said], [request], 0, 0)
    builder: Callable[..., DraftTree] = build_tree if method == "ddtree" else build_chain
    calibrated = replace(said, log_probs=0.25 * said.log_probs)
    assert_same(tree, builder(calibrated, 3, BUDGET))
    assert share.calibrated == [said]
    assert request.drafted is said
    # Nodes are shared out by what they are thought to be worth.
    np.testing.assert_array_equal(share.gains[0], np.exp(tree.log_probs[1:]))


# Budgets ------------------------------------------------------------------------------------------


def test_no_tree_has_more_nodes_than_its_request_may_have() -> None:
    budgets = (1, 3, BUDGET, 7)
    said = [random_marginals(seed) for seed in range(4)]
    requests = [state(str(b), budget=b) for b in budgets]
    trees = drafting_by(FixedShare(BUDGET)).trees(said, requests, 0, 0)
    assert [tree.num_nodes for tree in trees] == list(budgets)
    # Nor is a node that it may not have held against those of others.
    share = RecordedShare([BUDGET] * 4)
    drafting_by(share).trees(said, requests, 0, 0)
    assert [len(gains) for gains in share.gains] == list(budgets)
    for tree, marginals, budget in zip(trees, said, budgets, strict=True):
        assert_same(tree, build_tree(marginals, 3, budget))


@pytest.mark.parametrize("counts", [(0, 0, 0), (1, 0, 5), (2, 12, 3), (99, 4, 0)])
def test_each_request_keeps_the_first_nodes_that_it_is_given(counts: tuple[int, ...]) -> None:
    said = [random_marginals(seed) for seed in range(3)]
    requests = [state(name) for name in "abc"]
    trees = drafting_by(RecordedShare(counts)).trees(said, requests, 0, 0)
    for tree, request, marginals, count in zip(trees, requests, said, counts, strict=True):
        assert_same(tree, build_tree(marginals, 3, BUDGET).first(count))
        assert request.tree is tree
        # Also where no node was given: what the target says is held against the draft.
        assert request.drafted is marginals


@pytest.mark.parametrize("num_others", [0, 1, 4])
@pytest.mark.parametrize("prompt_rows", [0, 31])
def test_requests_without_drafts_and_prompt_rows_count_in_the_share(
    num_others: int, prompt_rows: int
) -> None:
    said = [random_marginals(seed) for seed in range(2)]
    share = RecordedShare([4, 2, *[0] * num_others])
    requests = [state("a"), state("b", method="dflash")]
    trees = drafting_by(share).trees(said, requests, num_others, prompt_rows)
    assert [tree.num_nodes for tree in trees] == [4, 2]
    assert [len(gains) for gains in share.gains] == [BUDGET, L, *[0] * num_others]
    assert share.other_rows == [prompt_rows]
    for gains, marginals, build in zip(share.gains, said, (build_tree, build_chain), strict=False):
        tree = build(marginals, 3, BUDGET)
        np.testing.assert_array_equal(gains, np.exp(tree.log_probs[1:]))
    assert all(gains.dtype == np.float32 for gains in share.gains)


def test_without_drafts_there_are_no_trees() -> None:
    share = RecordedShare([0, 0])
    assert drafting_by(share).trees([], [], 2, 5) == []
    assert [len(gains) for gains in share.gains] == [0, 0]


@pytest.mark.parametrize("room", [0, 1, 5, 11, 100])
def test_where_a_step_has_too_little_room_the_likeliest_nodes_of_all_have_it(room: int) -> None:
    said = [random_marginals(seed, spread) for seed, spread in enumerate((0.5, 2.0, 8.0))]
    requests, num_others, prompt_rows = [state(name) for name in "abc"], 2, 4
    rows = len(requests) + num_others + prompt_rows + room
    share = FixedShare(BUDGET, max_batch_rows=rows)
    trees = drafting_by(share).trees(said, requests, num_others, prompt_rows)
    everything = [build_tree(marginals, 3, BUDGET) for marginals in said]
    ranked = np.sort(np.concatenate([tree.log_probs[1:] for tree in everything]))[::-1]
    kept = np.sort(np.concatenate([tree.log_probs[1:] for tree in trees]))[::-1]
    np.testing.assert_array_equal(kept, ranked[:room])
    for tree, whole in zip(trees, everything, strict=True):
        assert_same(tree, whole.first(tree.num_nodes))


def test_a_drafter_whose_every_token_is_banned_leaves_the_root() -> None:
    banned = Marginals(torch.full((L, K), -torch.inf), torch.arange(K).expand(L, K))
    requests = [state("a"), state("b", method="dflash"), state("c")]
    said = [banned, banned, random_marginals(0)]
    trees = drafting_by(FixedShare(BUDGET)).trees(said, requests, 0, 0)
    assert [tree.num_nodes for tree in trees] == [0, 0, BUDGET]
    assert trees[0].token_ids.tolist() == [3]


def test_the_automatic_share_learns_from_what_is_kept_in_the_requests() -> None:
    """A drafter that is sure and always wrong soon gets no nodes."""
    costs = StepCosts.measured(
        (1, 2, 4, 8, 16, 32, 64),
        (0.010, 0.011, 0.012, 0.014, 0.018, 0.026, 0.042),
        draft_requests=(1, 2),
        draft_seconds=(0.001, 0.001),
    )
    share = AutoShare(costs, num_depths=L, max_nodes=BUDGET)
    drafting = drafting_by(share)
    sure = torch.tensor([[0.9] + [0.1 / (K - 1)] * (K - 1)] * L).log()
    said = Marginals(sure, torch.arange(K).expand(L, K))
    sizes = []
    for _ in range(30):
        request = state("a", range(50), guessing=Guessing(new_weights()))
        if not share.wants_drafts(1, 0):
            sizes.append(0)
            share.observe_walks([], num_requests=1, num_tokens=1)
            continue
        (tree,) = drafting.trees([said], [request], 0, 0)
        sizes.append(tree.num_nodes)
        assert request.drafted is not None
        walk = Walk(path=(), token_ids=(VOCAB_SIZE,), finish_reason=None)
        share.observe_walks([(request.drafted, walk)], num_requests=1, num_tokens=1)
    assert sizes[0] > 0
    assert sizes[-1] == 0


@pytest.mark.parametrize("room", [2, 3, 5])
def test_no_node_is_deeper_than_what_can_be_delivered(room: int) -> None:
    ranks = torch.arange(3).expand(4, 3, 3).contiguous()
    even = torch.full((5, 3), -2.0)
    behind = Transitions(even[1:, None].repeat(1, 3, 1), ranks)
    said = Marginals(even, torch.arange(15).view(5, 3), behind)
    cut = _down_to(room, said)
    assert cut.num_depths == room
    assert cut.transitions is not None
    assert len(cut.transitions.ranks) == room - 1
    assert build_tree(cut, 0, 400).depths.max() == room
    assert _down_to(None, said) is said
