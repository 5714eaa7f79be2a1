"""One budget for a batch: optimal by brute force, and what it makes in a world of known costs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddtree.budget import AutoBudget, Experience
from ddtree.costs import CostProfile
from ddtree.errors import OptionError
from ddtree.serving.shared_budget import AutoShare, FixedShare, SharedBudget
from ddtree.serving.step_costs import StepCosts
from ddtree.tree.geometry import child_lookup
from ddtree.tree.host import build_tree
from ddtree.types import DraftTree, Marginals, Walk

L, K, B = 5, 16, 32
NEVER = 999
# One request on a CPU, as the tests of `AutoBudget` have it.
CPU_ROWS, CPU_SECONDS = (1, 2, 4, 8, 17, 33), (0.047, 0.052, 0.056, 0.062, 0.076, 0.105)
# A device that is bound by memory up to some 32 rows, and by arithmetic beyond 64.
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
SECONDS = (0.0100, 0.0101, 0.0103, 0.0110, 0.0140, 0.0230, 0.0420, 0.0800, 0.1560, 0.3080)


def device(slope: float = 1.0) -> StepCosts:
    """Costs of the second kind, with rows beyond the first so much dearer."""
    dearer = [SECONDS[0] + slope * (s - SECONDS[0]) for s in SECONDS]
    return StepCosts.measured(
        ROWS, dearer, draft_requests=(1, 64, 512), draft_seconds=(0.0020, 0.0035, 0.0150)
    )


def cpu() -> StepCosts:
    return StepCosts.measured(CPU_ROWS, CPU_SECONDS, draft_requests=(1,), draft_seconds=(0.010,))


def auto(costs: StepCosts, max_batch_rows: int | None = None) -> AutoShare:
    return AutoShare(costs, num_depths=L, max_nodes=B, max_batch_rows=max_batch_rows)


def shared(
    budget: SharedBudget, gains: Sequence[Sequence[float]], other_rows: int = 0
) -> list[int]:
    assert budget.wants_drafts(len(gains), other_rows)
    return budget.share([np.array(of_one, np.float32) for of_one in gains], other_rows)


def geometric(ratio: float, count: int = B) -> list[float]:
    return [ratio ** (i + 1) for i in range(count)]


# A share of one step ---------------------------------------------------------------------------

GAINS = st.lists(
    st.lists(st.sampled_from((1.0, 0.75, 0.5, 0.25, 0.125, 0.0)), max_size=4).map(
        lambda found: sorted(found, reverse=True)
    ),
    min_size=1,
    max_size=3,
)


@given(
    gains=GAINS,
    steps=st.lists(st.sampled_from((0.0, 0.05, 0.2, 0.4, 1.0)), min_size=20, max_size=20),
    other_rows=st.integers(0, 3),
    max_batch_rows=st.none() | st.integers(1, 12),
)
def test_no_other_share_of_nodes_has_a_higher_surplus(
    gains: list[list[float]],
    steps: list[float],
    other_rows: int,
    max_batch_rows: int | None,
) -> None:
    table = 1.0 + np.cumsum([0.0, *steps])
    costs = StepCosts.measured(
        range(1, 22), table.tolist(), draft_requests=(1,), draft_seconds=(0.1,)
    )
    num_requests = len(gains)
    room = 99 if max_batch_rows is None else max_batch_rows - num_requests - other_rows
    budget = auto(costs, max_batch_rows)
    if room <= 0:
        assert not budget.wants_drafts(num_requests, other_rows)
        return

    def surplus(counts: Sequence[int]) -> float:
        tokens = num_requests + sum(sum(g[:n]) for g, n in zip(gains, counts, strict=True))
        rows = num_requests + other_rows + sum(counts)
        return tokens - num_requests / costs.verify_s(num_requests) * costs.verify_s(rows)

    every = product(*(range(len(of_one) + 1) for of_one in gains))
    best = max(surplus(counts) for counts in every if sum(counts) <= room)
    found = shared(budget, gains, other_rows)
    assert sum(found) <= room
    assert all(n <= len(of_one) for n, of_one in zip(found, gains, strict=True))
    assert surplus(found) == pytest.approx(best, abs=1e-9)


@given(gains=GAINS, room=st.integers(0, 12))
def test_a_cap_is_filled_with_the_likeliest_first_nodes(
    gains: list[list[float]], room: int
) -> None:
    budget = FixedShare(4, max_batch_rows=len(gains) + 2 + room)
    found = budget.share([np.array(of_one, np.float32) for of_one in gains], 2)
    assert sum(found) == min(room, sum(map(len, gains)))
    taken = [p for g, n in zip(gains, found, strict=True) for p in g[:n]]
    left = [p for g, n in zip(gains, found, strict=True) for p in g[n:]]
    assert min(taken, default=1.0) >= max(left, default=0.0)


def test_a_fixed_budget_gives_everyone_the_same_as_far_as_their_trees_go() -> None:
    gains = [geometric(0.9), [], geometric(0.2), [0.9, 0.8]]
    assert shared(FixedShare(7), gains) == [7, 0, 7, 2]
    assert shared(FixedShare(7, max_batch_rows=20), gains) == [7, 0, 7, 2]
    assert sum(shared(FixedShare(7, max_batch_rows=19), gains)) == 15
    assert FixedShare(7).share([], 3) == []


def test_equal_nodes_go_to_those_higher_up_and_then_to_the_first_request() -> None:
    gains = [[0.5, 0.5, 0.5], [0.5, 0.5], [0.9, 0.5]]
    found = [shared(FixedShare(3, max_batch_rows=3 + n), gains) for n in range(1, 7)]
    assert found == [[0, 0, 1], [1, 0, 1], [1, 1, 1], [2, 1, 1], [2, 2, 1], [2, 2, 2]]


def test_sure_requests_get_the_nodes_of_unsure_ones() -> None:
    gains = [geometric(0.9), geometric(0.3), [0.9, 0.8, 0.7], []] * 8
    sure, unsure, chain, none = shared(auto(device()), gains)[:4]
    assert sure > 2 * unsure
    assert chain == 3
    assert none == 0


def test_no_request_gets_more_than_the_most_nodes() -> None:
    free = StepCosts.measured((1, 9), (1.0, 1.0), draft_requests=(1,), draft_seconds=(0.1,))
    budget = AutoShare(free, num_depths=L, max_nodes=3)
    assert shared(budget, [geometric(0.9), [0.5]]) == [3, 1]


@pytest.mark.parametrize("room", [1, 5, 40, 10_000])
def test_a_step_never_has_more_rows_than_its_cap(room: int) -> None:
    free = StepCosts.measured((1, 9), (1.0, 1.0), draft_requests=(1,), draft_seconds=(0.1,))
    gains = [geometric(0.9), geometric(0.5), geometric(0.7)]
    for budget in (auto(free, 3 + 7 + room), FixedShare(B, max_batch_rows=3 + 7 + room)):
        assert sum(shared(budget, gains, 7)) == min(room, 3 * B)


def test_where_there_is_no_room_or_nobody_to_draft_for_the_drafter_is_not_asked() -> None:
    for budget in (auto(device(), 10), FixedShare(4, max_batch_rows=10)):
        assert not budget.wants_drafts(10, 0)
        assert not budget.wants_drafts(2, 9)
        assert not budget.wants_drafts(0, 1)
        assert budget.wants_drafts(2, 7)
    assert not FixedShare(0).wants_drafts(3, 0)
    assert not AutoShare(device(), num_depths=L, max_nodes=0).wants_drafts(3, 0)


def test_a_dearer_row_never_gives_more_nodes() -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        gains = [geometric(r) for r in rng.uniform(0.2, 0.95, int(rng.integers(1, 40)))]
        slopes = np.sort(rng.uniform(0.1, 4.0, 5))
        # The rows of plain decoding cost the same: what a second is worth does.
        plain = SECONDS[: 1 + int(np.searchsorted(ROWS, len(gains)))]
        found = []
        for slope in slopes:
            more = [plain[-1] + slope * (s - plain[-1]) for s in SECONDS[len(plain) :]]
            costs = StepCosts.measured(
                ROWS, [*plain, *more], draft_requests=(1,), draft_seconds=(0.002,)
            )
            found.append(shared(auto(costs), gains))
        assert np.all(np.diff(np.array(found), axis=0) <= 0)


def test_a_larger_batch_gives_each_request_fewer_nodes_and_at_last_none() -> None:
    sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    found = [sum(shared(auto(device()), [geometric(0.7)] * n)) / n for n in sizes]
    assert found == sorted(found, reverse=True)
    assert found[0] >= 8
    assert 0 < found[5] <= 4
    assert found[-1] == 0


def test_rows_of_prompts_leave_less_to_the_trees() -> None:
    found = [sum(shared(auto(device()), [geometric(0.7)] * 4, rows)) for rows in (0, 64, 512)]
    assert found[0] > found[1] > 0
    assert found == sorted(found, reverse=True)


def test_nodes_that_were_not_asked_for_are_a_bug() -> None:
    budget = auto(device())
    with pytest.raises(AssertionError, match="not wanted"):
        budget.share([np.ones(1, np.float32)], 0)


def test_a_probability_that_is_no_number_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="no number"):
        shared(auto(device()), [[0.5, float("nan")]])


@pytest.mark.parametrize("rows", [0, -1])
def test_impossible_options_are_refused(rows: int) -> None:
    for make in (
        FixedShare,
        lambda nodes, cap: AutoShare(device(), num_depths=L, max_nodes=nodes, max_batch_rows=cap),
    ):
        with pytest.raises(OptionError, match="max_batch_rows"):
            make(4, rows)
        with pytest.raises(OptionError, match="nodes"):
            make(-1, 4)


# A world ---------------------------------------------------------------------------------------


@dataclass
class World:
    """Requests whose drafter is as often right as it says, and steps that cost what they should.

    Args:
        costs: what steps really take.
        confidence: how sure the drafter is, of one request after another, and again from the first.
        right: whether the target draws from what the drafter says, or says something else.
        slowness: seconds per second of `costs`, by rows and drafted requests.
        seed: of marginals and choices.
    """

    costs: StepCosts = field(default_factory=device)
    confidence: tuple[float, ...] = (1.0,)
    right: bool = True
    slowness: Callable[[int, int], float] = lambda rows, drafted: 1.0
    seed: int = 0
    now: float = 0.0
    num_tokens: int = 0
    counts: list[list[int] | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    @cached_property
    def drafts(self) -> list[list[Marginals]]:
        """Some for each confidence, all of which come as often."""
        return [[self.draft(c) for _ in range(64)] for c in self.confidence]

    def draft(self, confidence: float) -> Marginals:
        p = np.empty((L, K))
        for depth in range(L):
            top = self.rng.beta(3 * confidence / (1 + 0.6 * depth), 2)
            rest = self.rng.exponential(1, K - 1) ** 3
            p[depth] = np.sort([top, *(0.95 * (1 - top) * rest / rest.sum())])[::-1]
        ids = torch.arange(1, K + 1).repeat(L, 1)
        return Marginals(torch.tensor(p, dtype=torch.float32).clamp_min(1e-9).log(), ids)

    def run(
        self, budget: SharedBudget, num_steps: int, num_requests: int, other_rows: int = 0
    ) -> float:
        """Tokens per second of these steps."""
        began, before = self.now, self.num_tokens
        for _ in range(num_steps):
            self.step(budget, num_requests, other_rows)
        return (self.num_tokens - before) / (self.now - began)

    def step(self, budget: SharedBudget, num_requests: int, other_rows: int) -> None:
        trees, said, counts = [DraftTree.root_only(0)] * num_requests, [], None
        if budget.wants_drafts(num_requests, other_rows):
            kinds = len(self.drafts)
            said = [self.drafts[i % kinds][self.rng.integers(64)] for i in range(num_requests)]
            whole = [build_tree(budget.calibrate(m), 0, budget.max_nodes) for m in said]
            counts = budget.share([np.exp(t.log_probs[1:]) for t in whole], other_rows)
            trees = [tree.first(n) for tree, n in zip(whole, counts, strict=True)]
        rows = other_rows + sum(tree.num_rows for tree in trees)
        seconds = self.costs.verify_s(rows) + self.costs.draft_s(len(said))
        seconds *= self.slowness(rows, len(said))
        walks = [self.walk(tree, m) for tree, m in zip(trees, said, strict=False)]
        tokens = sum(len(w.token_ids) for w in walks) if walks else num_requests
        self.now += seconds
        self.num_tokens += tokens
        self.counts.append(counts)
        budget.observe_walks(
            list(zip(said, walks, strict=True)), num_requests=num_requests, num_tokens=tokens
        )
        budget.observe_seconds(seconds, num_rows=rows, num_drafted=len(said))

    def walk(self, tree: DraftTree, said: Marginals) -> Walk:
        children, node, path, tokens = child_lookup(tree), 0, [], []
        for depth in range(L + 1):
            tokens.append(self.choice(said, depth))
            child = children.get((node, tokens[-1]))
            if child is None:
                break
            path.append(child)
            node = child
        return Walk(path=tuple(path), token_ids=tuple(tokens), finish_reason=None)

    def choice(self, said: Marginals, depth: int) -> int:
        if depth >= L or not self.right:
            return NEVER
        reached = np.cumsum(said.log_probs[depth].exp().numpy())
        rank = int(np.searchsorted(reached, self.rng.random()))
        return rank + 1 if rank < K else NEVER

    def plain_rate(self, num_requests: int) -> float:
        return num_requests / self.costs.verify_s(num_requests)

    def fixed_rates(self, num_requests: int) -> dict[int, float]:
        """Expected tokens per second with the same number of nodes for every request."""
        gains = np.array(
            [np.exp(build_tree(m, 0, B).log_probs) for of_one in self.drafts for m in of_one]
        )
        tokens = num_requests * gains.mean(0, dtype=np.float64).cumsum()
        seconds = [
            self.costs.verify_s(num_requests * (1 + n)) + self.costs.draft_s(num_requests)
            for n in range(B + 1)
        ]
        rates = dict(enumerate((tokens / seconds).tolist()))
        rates[0] = self.plain_rate(num_requests)
        return rates

    def nodes(self, last: int) -> float:
        """Mean nodes of the last steps; a step without drafts has none."""
        return float(np.mean([sum(counts or ()) for counts in self.counts[-last:]]))

    def drafted(self) -> list[int]:
        """Which steps asked the drafter."""
        return [i for i, counts in enumerate(self.counts) if counts is not None]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("slowness", [0.99, 3.0])
@pytest.mark.parametrize(("confidence", "right"), [(0.3, True), (1.0, True), (3.0, False)])
def test_alone_a_request_gets_what_auto_budget_gives(
    confidence: float, right: bool, slowness: float
) -> None:
    world = World(cpu(), (confidence,), right, lambda rows, drafted: slowness)
    world.run(auto(cpu()), 200, 1)

    profile = CostProfile(contexts=(64,), rows=CPU_ROWS, verify=(CPU_SECONDS,), draft=0.010)
    other = World(cpu(), (confidence,), right)
    budget = AutoBudget(Experience(profile, L), clock=lambda: other.now)
    for _ in range(200):
        tree, said, seconds = DraftTree.root_only(0), None, 0.0
        walked = Walk(path=(), token_ids=(NEVER,), finish_reason=None)
        if budget.wants_draft(100):
            said, seconds = other.drafts[0][other.rng.integers(64)], 0.010
            tree = budget.build(said, 0, build_tree)
            walked = other.walk(tree, said)
        other.now += slowness * (seconds + other.costs.verify_s(tree.num_rows))
        other.counts.append(None if said is None else [tree.num_nodes])
        budget.observe(walked)
    assert world.counts == other.counts


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("confidence", [0.5, 1.5])
@pytest.mark.parametrize(("num_requests", "num_steps"), [(1, 600), (4, 200), (8, 120), (32, 60)])
def test_it_keeps_up_with_the_best_fixed_budget_chosen_afterwards(
    num_requests: int, num_steps: int, confidence: float
) -> None:
    world = World(confidence=(confidence,))
    rate = world.run(auto(device()), num_steps, num_requests)
    assert rate >= 0.96 * max(world.fixed_rates(num_requests).values())


@pytest.mark.usefixtures("unchecked")
def test_requests_of_unlike_drafts_make_more_than_with_any_equal_share() -> None:
    world = World(confidence=(4.0, 0.2))
    rate = world.run(auto(device()), 100, 16)
    assert rate >= 1.04 * max(world.fixed_rates(16).values())


@pytest.mark.usefixtures("unchecked")
def test_a_drafter_that_is_never_right_is_switched_off_and_tried_after_growing_pauses() -> None:
    world = World(confidence=(3.0,), right=False)
    budget = auto(device())
    assert world.run(budget, 100, 8) >= 0.93 * world.plain_rate(8)
    assert world.run(budget, 300, 8) >= 0.98 * world.plain_rate(8)
    pauses = np.diff(world.drafted()) - 1
    assert len(pauses) < 20
    assert pauses.tolist() == sorted(pauses)
    assert pauses[-1] == 64


@pytest.mark.usefixtures("unchecked")
def test_it_is_asked_again_and_used_when_it_has_become_good() -> None:
    world = World(confidence=(3.0,), right=False)
    budget = auto(device())
    world.run(budget, 200, 8)
    world.right = True
    world.run(budget, 350, 8)
    assert world.run(budget, 100, 8) >= 0.95 * max(world.fixed_rates(8).values())


@pytest.mark.usefixtures("unchecked")
def test_a_batch_too_large_for_drafts_goes_without_and_a_small_one_has_them_at_once() -> None:
    world = World()
    budget = auto(device())
    world.run(budget, 30, 4)
    assert world.nodes(20) > 4
    rate = world.run(budget, 60, 400)
    assert rate >= 0.96 * world.plain_rate(400)
    assert len([i for i in world.drafted() if i >= 30]) <= 6
    assert world.nodes(60) < 4
    world.run(budget, 10, 4)
    assert world.nodes(10) > 4


@pytest.mark.usefixtures("unchecked")
def test_among_rows_of_prompts_drafts_stop_and_between_them_they_go_on() -> None:
    cliff = StepCosts.measured(
        (1, 128, 256), (0.010, 0.010, 0.080), draft_requests=(1,), draft_seconds=(0.002,)
    )
    world = World(cliff, confidence=(0.3,))
    budget = auto(cliff)
    for _ in range(20):
        world.run(budget, 4, 8)
        world.run(budget, 4, 8, other_rows=120)
    mixed = [c for i, c in enumerate(world.counts) if i % 8 >= 4 and i >= 80]
    alone = [c for i, c in enumerate(world.counts) if i % 8 < 4 and i >= 80]
    assert sum(c is not None for c in mixed) < 8
    assert None not in alone


@pytest.mark.usefixtures("unchecked")
def test_rows_that_turn_out_dearer_than_measured_get_fewer_nodes() -> None:
    usual = World()
    dear = World(slowness=lambda rows, drafted: 1.0 + 0.02 * max(0, rows - 8))
    for world in (usual, dear):
        world.run(auto(device()), 200, 8)
    assert dear.nodes(100) < 0.8 * usual.nodes(100)


@pytest.mark.usefixtures("unchecked")
def test_drafts_that_cost_too_much_by_now_are_found_out() -> None:
    """Nothing but a step without one tells that from a machine which is slow."""
    world = World(slowness=lambda rows, drafted: 3.0 if drafted else 1.0)
    budget = auto(device())
    world.run(budget, 150, 8)
    assert world.run(budget, 150, 8) > 0.9 * world.plain_rate(8)


@pytest.mark.usefixtures("unchecked")
def test_a_machine_that_is_slower_as_a_whole_changes_nothing() -> None:
    usual, slow = World(), World(slowness=lambda rows, drafted: 5.0)
    usual.run(auto(device()), 60, 8)
    slow.run(auto(device()), 63, 8)  # some of these go without drafts, to tell that all are slow
    found = [[c for c in world.counts if c is not None][:58] for world in (usual, slow)]
    assert found[0] == found[1]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("when", [0, 50])
def test_one_step_that_took_a_second_is_forgiven(when: int) -> None:
    steps = iter(range(1000))
    usual = World()
    odd = World(slowness=lambda rows, drafted: 50.0 if next(steps) == when else 1.0)
    for world in (usual, odd):
        world.run(auto(device()), 100, 8)
    assert odd.nodes(40) == pytest.approx(usual.nodes(40), rel=0.2)


@pytest.mark.usefixtures("unchecked")
def test_noise_in_the_times_costs_little() -> None:
    rng = np.random.default_rng(1)
    world = World(slowness=lambda rows, drafted: float(np.exp(0.15 * rng.standard_normal())))
    world.run(auto(device()), 250, 8)
    assert world.num_tokens / world.now >= 0.93 * max(world.fixed_rates(8).values())


@pytest.mark.usefixtures("unchecked")
def test_ranks_that_hear_the_same_decide_the_same() -> None:
    """Batches that change, prompts in between, noisy seconds: all from the first rank."""
    found = []
    for _ in range(2):
        noise = np.random.default_rng(5)
        world = World(confidence=(0.3,), slowness=lambda *_, rng=noise: float(np.exp(rng.normal())))
        budget, sizes = auto(device(), 200), np.random.default_rng(7)
        for _ in range(120):
            world.step(budget, int(sizes.integers(1, 50)), int(sizes.choice((0, 0, 100))))
        found.append(world.counts)
    assert found[0] == found[1]
    assert 20 < len(World(counts=found[0]).drafted()) < 120


def test_no_clock_is_needed_to_decide() -> None:
    """A step whose seconds nobody knows teaches what its walks say."""
    world = World()
    budget = auto(device())
    world.costs.observe = None  # type: ignore[method-assign, assignment]
    for _ in range(10):
        assert budget.wants_drafts(2, 0)
        said = world.drafts[0][:2]
        trees = [build_tree(budget.calibrate(m), 0, B) for m in said]
        counts = budget.share([np.exp(t.log_probs[1:]) for t in trees], 0)
        walks = [world.walk(t.first(n), m) for t, n, m in zip(trees, counts, said, strict=True)]
        tokens = sum(len(walk.token_ids) for walk in walks)
        budget.observe_walks(list(zip(said, walks, strict=True)), num_requests=2, num_tokens=tokens)
    first, then = world.drafts[0][0], budget.calibrate(world.drafts[0][0])
    assert not torch.equal(first.log_probs, then.log_probs)


def test_requests_that_ended_before_the_step_are_not_held_against_the_drafts() -> None:
    budget = auto(device())
    for _ in range(30):
        counts = shared(budget, [geometric(0.8)] * 8)
        assert sum(counts) > 16
        # Each of the six that are left makes what was promised of it.
        budget.observe_walks([], num_requests=6, num_tokens=6 * 3)


def test_a_fixed_share_takes_the_drafters_word() -> None:
    world = World()
    budget, said = FixedShare(4), world.drafts[0][0]
    world.run(budget, 3, 2)
    assert budget.calibrate(said) is said
    assert world.counts == [[4, 4]] * 3
