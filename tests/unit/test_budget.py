"""The budget: what pays by definition, in a simulated world whose costs and drafter are known."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from ddtree.budget import AutoBudget, Budget, Experience, FixedBudget
from ddtree.costs import CostProfile
from ddtree.tree.geometry import child_lookup
from ddtree.tree.host import build_tree
from ddtree.types import DraftTree, Marginals, Walk

L, K, CONTEXT = 5, 16, 100
NEVER = 999
# Seconds of a verify forward by rows, of the shape that a CPU shows, and of a drafter pass.
PROFILE = CostProfile(
    contexts=(64,),
    rows=(1, 2, 4, 8, 17, 33),
    verify=((0.047, 0.052, 0.056, 0.062, 0.076, 0.105),),
    draft=0.010,
)


@dataclass
class World:
    """A drafter and a target that agree as often as they say, and a clock that costs move.

    Args:
        confidence: how sure the drafter is.
        right: whether the target draws from what the drafter says, or says something else.
        slowness: real seconds per second of the profile, by rows.
        profile: of the costs.
    """

    confidence: float = 1.0
    right: bool = True
    slowness: Callable[[int], float] = lambda rows: 1.0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    profile: CostProfile = PROFILE
    now: float = 0.0
    num_tokens: int = 0
    trees: list[DraftTree | None] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def marginals(self) -> Marginals:
        p = np.empty((L, K))
        for depth in range(L):
            top = self.rng.beta(3 * self.confidence / (1 + 0.6 * depth), 2)
            rest = self.rng.exponential(1, K - 1) ** 3
            p[depth] = np.sort([top, *(0.95 * (1 - top) * rest / rest.sum())])[::-1]
        ids = torch.arange(1, K + 1).repeat(L, 1)
        return Marginals(torch.tensor(p, dtype=torch.float32).clamp_min(1e-9).log(), ids)

    def run(self, budget: Budget, num_rounds: int) -> float:
        """Tokens per second of these rounds."""
        began, before = self.now, self.num_tokens
        for _ in range(num_rounds):
            self.round(budget)
        return (self.num_tokens - before) / (self.now - began)

    def round(self, budget: Budget) -> None:
        said, tree, seconds = None, DraftTree.root_only(0), 0.0
        if budget.wants_draft(CONTEXT):
            said = self.marginals()
            tree = budget.build(said, 0, build_tree)
            seconds = self.profile.draft
        seconds += self.profile.verify_s(tree.num_rows, CONTEXT)
        self.now += seconds * self.slowness(tree.num_rows)
        walked = self.walk(tree, said)
        self.num_tokens += len(walked.token_ids)
        self.trees.append(None if said is None else tree)
        budget.observe(walked)

    def walk(self, tree: DraftTree, said: Marginals | None) -> Walk:
        children, node, path, tokens = child_lookup(tree), 0, [], []
        for depth in range(L + 1):
            tokens.append(self.choice(said, depth))
            child = children.get((node, tokens[-1]))
            if child is None:
                break
            path.append(child)
            node = child
        return Walk(path=tuple(path), token_ids=tuple(tokens), finish_reason=None)

    def choice(self, said: Marginals | None, depth: int) -> int:
        if said is None or depth >= L or not self.right:
            return NEVER
        reached = np.cumsum(said.log_probs[depth].exp().numpy())
        rank = int(np.searchsorted(reached, self.rng.random()))
        return rank + 1 if rank < K else NEVER


def auto(world: World) -> AutoBudget:
    return AutoBudget(Experience(world.profile, L), clock=world.clock)


def plain_rate() -> float:
    return 1.0 / PROFILE.verify_s(1, CONTEXT)


def nodes(world: World, last: int) -> float:
    """Mean nodes of the last rounds; a round without a draft has none."""
    return float(np.mean([0 if t is None else t.num_nodes for t in world.trees[-last:]]))


def test_a_fixed_budget_drafts_every_round_and_takes_the_drafters_word() -> None:
    world = World()
    said, budget = world.marginals(), FixedBudget(7)
    assert budget.wants_draft(CONTEXT)
    expected, got = build_tree(said, 3, 7), budget.build(said, 3, build_tree)
    assert np.array_equal(got.token_ids, expected.token_ids)
    assert np.array_equal(got.log_probs, expected.log_probs)
    assert not FixedBudget(0).wants_draft(CONTEXT)


def test_the_first_tree_is_the_one_with_the_best_earnings_by_brute_force() -> None:
    world = World()
    budget, said = auto(world), world.marginals()
    assert budget.wants_draft(CONTEXT)
    tree = budget.build(said, 0, build_tree)
    whole = build_tree(said, 0, 32)
    surplus = [
        np.exp(whole.log_probs[: n + 1].astype(np.float64)).sum()
        - (PROFILE.draft + PROFILE.verify_s(n + 1, CONTEXT)) * plain_rate()
        for n in range(33)
    ]
    assert tree.num_nodes == int(np.argmax(surplus))
    assert 0 < tree.num_nodes < 32


@pytest.mark.usefixtures("unchecked")  # a third of the time
@pytest.mark.parametrize("confidence", [0.3, 1.0, 3.0])
def test_it_keeps_up_with_the_best_fixed_budget_chosen_afterwards(confidence: float) -> None:
    rates = {n: World(confidence).run(FixedBudget(n), 300) for n in (2, 4, 6, 8, 12, 16)}
    world = World(confidence)
    rate = world.run(auto(world), 300)
    assert rate >= 0.95 * max(*rates.values(), plain_rate())


def test_a_drafter_that_is_never_right_is_switched_off_and_costs_next_to_nothing() -> None:
    world = World(confidence=3.0, right=False)
    budget = auto(world)
    assert world.run(budget, 128) >= 0.95 * plain_rate()
    assert world.run(budget, 300) >= 0.98 * plain_rate()
    assert sum(tree is not None for tree in world.trees) < 24


@pytest.mark.usefixtures("unchecked")
def test_it_is_asked_again_and_used_when_it_has_become_good() -> None:
    world = World(confidence=3.0, right=False)
    budget = auto(world)
    world.run(budget, 300)
    world.right = True
    world.run(budget, 200)
    best = World(confidence=3.0).run(FixedBudget(8), 200)
    assert world.run(budget, 200) >= 0.95 * best


def test_where_more_rows_cost_as_much_as_more_rounds_nothing_is_drafted() -> None:
    linear = CostProfile(
        contexts=(64,), rows=(1, 33), verify=((0.05, 33 * 0.05),), draft=PROFILE.draft
    )
    world = World(profile=linear)
    world.run(auto(world), 50)
    assert nodes(world, 40) == 0


def test_where_rows_are_free_the_largest_tree_is_taken() -> None:
    free = CostProfile(contexts=(64,), rows=(1, 33), verify=((0.05, 0.05),), draft=0.001)
    world = World(profile=free)
    budget = auto(world)
    world.run(budget, 20)
    assert budget.max_nodes == 32
    assert {tree.num_nodes for tree in world.trees if tree is not None} == {32}


def test_no_round_goes_without_a_draft_while_rounds_take_what_was_measured() -> None:
    world = World()
    world.run(auto(world), 100)
    assert None not in world.trees


def test_rounds_that_take_longer_leave_it_in_doubt_and_one_without_a_draft_tells() -> None:
    world = World(slowness=lambda rows: 3.0)
    world.run(auto(world), 100)
    plain = [i for i, tree in enumerate(world.trees) if tree is None]
    assert plain == [8, 25, 58]  # after 8, 16, 32 rounds with a draft


@pytest.mark.usefixtures("unchecked")
def test_drafts_that_cost_too_much_by_now_are_found_out() -> None:
    """Nothing but a round without one tells that from a machine which is slow."""
    world = World(slowness=lambda rows: 2.5 if rows > 1 else 1.0)
    budget = auto(world)
    world.run(budget, 100)
    fixed = World(slowness=world.slowness).run(FixedBudget(8), 100)
    assert fixed < 0.75 * plain_rate()
    assert world.run(budget, 100) > 1.05 * fixed
    assert sum(tree is None for tree in world.trees[100:]) > 10


def test_a_machine_that_is_slower_as_a_whole_changes_nothing() -> None:
    usual, slow = World(), World(slowness=lambda rows: 5.0)
    usual.run(auto(usual), 60)
    slow.run(auto(slow), 63)  # some of these go without a draft, to tell that all are slow
    sizes = [[t.num_nodes for t in world.trees if t is not None] for world in (usual, slow)]
    assert sizes[0][:58] == sizes[1][:58]


@pytest.mark.usefixtures("unchecked")
def test_rows_that_turn_out_dearer_than_measured_get_fewer() -> None:
    usual, dear = World(), World(slowness=lambda rows: 1.0 + 0.08 * max(0, rows - 4))
    usual.run(auto(usual), 400)
    dear.run(auto(dear), 400)
    assert nodes(dear, 200) < 0.8 * nodes(usual, 200)


def test_one_round_that_took_a_second_is_forgiven() -> None:
    world = World()
    budget = auto(world)
    world.run(budget, 100)
    before = nodes(world, 50)
    world.slowness = lambda rows: 20.0
    world.run(budget, 1)
    world.slowness = lambda rows: 1.0
    world.run(budget, 50)
    assert nodes(world, 50) == pytest.approx(before, rel=0.4)


def test_what_was_learnt_outlives_a_generation() -> None:
    world = World(confidence=3.0, right=False)
    experience = Experience(PROFILE, L)
    world.run(AutoBudget(experience, clock=world.clock), 100)
    drafted = sum(tree is not None for tree in world.trees)
    world.run(AutoBudget(experience, clock=world.clock), 100)
    assert sum(tree is not None for tree in world.trees) - drafted <= 4
