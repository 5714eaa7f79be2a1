"""Trees of first-order drafts, by every builder, against enumeration of all prefixes."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddtree.errors import MarginalsError
from ddtree.host_marginals import HostMarginals
from ddtree.tree import native, reference
from ddtree.tree.batched import build_trees, expand_ancestors
from ddtree.tree.chain import build_chain
from ddtree.types import DraftTree, Marginals, Transitions
from tests.unit.tree.test_reference import (
    INF,
    ROOT,
    Prefix,
    Rows,
    all_marginals,
    assert_same,
    marginals_of,
    prefixes_of,
    row_of,
)


def first_order_of(rows: Rows, behind: list[list[Rows]]) -> Marginals:
    """`behind[d][p]` is [log_probs, ranks] behind rank p of depth d + 1."""
    alone = marginals_of(rows)
    shape = (len(rows) - 1, len(rows[0]), len(rows[0]))
    log_probs = torch.tensor([[row[0] for row in depth] for depth in behind], dtype=torch.float32)
    ranks = torch.tensor([[row[1] for row in depth] for depth in behind], dtype=torch.int64)
    transitions = Transitions(log_probs.reshape(shape), ranks.reshape(shape))
    return Marginals(alone.log_probs, alone.token_ids, transitions)


def batched_tree(marginals: Marginals, root_id: int, budget: int) -> DraftTree:
    behind = marginals.transitions
    trees = build_trees(
        marginals.log_probs[None],
        marginals.token_ids[None],
        torch.tensor([root_id]),
        budget,
        None if behind is None else Transitions(behind.log_probs[None], behind.ranks[None]),
    )
    return trees.tree(0)


BUILDERS = [reference.build_tree, native.build_tree, batched_tree]
HOST_BUILDERS = [reference.build_tree, native.build_tree, build_chain]


def scores_and_tokens(marginals: Marginals) -> dict[Prefix, tuple[float, int]]:
    """Of each prefix, named by its places in the rows of its parents: score and last token."""
    log_probs, token_ids = marginals.log_probs.tolist(), marginals.token_ids.tolist()
    behind, ranks = marginals.transitions.log_probs.tolist(), marginals.transitions.ranks.tolist()
    columns: dict[Prefix, int] = {}
    found: dict[Prefix, tuple[float, int]] = {(): (0.0, ROOT)}
    for depth in range(len(log_probs)):
        for prefix in product(range(len(log_probs[0])), repeat=depth + 1):
            above, place = prefix[:-1], prefix[-1]
            if depth == 0:
                columns[prefix], step = place, log_probs[0][place]
            else:
                columns[prefix] = ranks[depth - 1][columns[above]][place]
                step = behind[depth - 1][columns[above]][place]
            # A float64 sum of two float32 rounded once is their float32 sum.
            score = float(np.float32(found[above][0] + step))
            found[prefix] = score, token_ids[depth][columns[prefix]]
    return found


def brute_force(marginals: Marginals, budget: int, banned: frozenset[int] = frozenset()):
    """The contract's order over all prefixes without a banned token."""
    found = scores_and_tokens(marginals)

    def tokens(prefix: Prefix) -> list[int]:
        return [found[prefix[:depth]][1] for depth in range(1, len(prefix) + 1)]

    def key(prefix: Prefix) -> tuple[object, ...]:
        if not prefix:
            return (-INF,)
        return (-found[prefix][0], len(prefix), key(prefix[:-1]), prefix[-1])

    legal = (p for p, (score, _) in found.items() if score > -INF and not banned & {*tokens(p)})
    ordered = sorted(legal, key=key)[: budget + 1]
    place = {prefix: i for i, prefix in enumerate(ordered)}
    return DraftTree(
        np.array([found[p][1] for p in ordered], np.int64),
        np.array([place[p[:-1]] if p else -1 for p in ordered], np.int32),
        np.array([len(p) for p in ordered], np.int32),
        np.array([p[-1] if p else -1 for p in ordered], np.int32),
        np.array([found[p][0] for p in ordered], np.float32),
    )


@st.composite
def first_order(draw: st.DrawFn) -> Marginals:
    num_depths, num_ranks = draw(
        st.sampled_from([(1, 1), (1, 4), (2, 1), (2, 2), (2, 5), (3, 2), (3, 4), (4, 2), (4, 3)])
    )
    rows = [draw(row_of(num_ranks)) for _ in range(num_depths)]
    orders = st.permutations(range(num_ranks))
    behind = [[[draw(row_of(num_ranks)), draw(orders)] for _ in range(num_ranks)] for _ in rows[1:]]
    return first_order_of(rows, behind)


def as_first_order(marginals: Marginals) -> Marginals:
    """The same draft, with transitions that do not depend on the token before."""
    num_depths, num_ranks = marginals.log_probs.shape
    shape = (max(num_depths - 1, 0), num_ranks, num_ranks)
    log_probs = marginals.log_probs[1:, None].expand(shape)
    ranks = torch.arange(num_ranks).expand(shape)
    return Marginals(marginals.log_probs, marginals.token_ids, Transitions(log_probs, ranks))


TIES = as_first_order(marginals_of([[-1.0] * 3] * 3))
SURE = as_first_order(marginals_of([[0.0, 0.0]] * 4))
# Depth 2 is certain behind either token, of another token each.
SWITCH = first_order_of(
    [[-0.5, -1.0], [-0.5, -1.0]], [[[[0.0, -INF], [1, 0]], [[0.0, -INF], [0, 1]]]]
)
# Behind rank 0 all is banned.
DEAD_END = first_order_of(
    [[-0.5, -1.0], [-0.5] * 2], [[[[-INF] * 2, [0, 1]], [[-0.5] * 2, [1, 0]]]]
)


@given(first_order(), st.integers(0, 12))
@settings(max_examples=100)
@example(TIES, 12)
@example(SURE, 12)
@example(SWITCH, 12)
@example(DEAD_END, 12)
def test_trees_equal_brute_force_node_for_node(marginals: Marginals, budget: int) -> None:
    expected = brute_force(marginals, budget)
    for build in BUILDERS:
        assert_same(build(marginals, ROOT, budget), expected)


def test_a_tree_by_hand() -> None:
    """Behind 5 comes 8, behind 6 comes 7: the row of a depth alone has neither for sure."""
    rows = np.log([[0.6, 0.4], [0.5, 0.5]]).tolist()
    behind = [[[np.log([0.9, 0.1]).tolist(), [1, 0]], [np.log([0.99, 0.01]).tolist(), [0, 1]]]]
    said = first_order_of(rows, behind)
    said = Marginals(said.log_probs, torch.tensor([[5, 6], [7, 8]]), said.transitions)
    for build in BUILDERS:
        tree = build(said, 1, 5)
        assert tree.token_ids.tolist() == [1, 5, 8, 6, 7, 7]
        assert tree.parents.tolist() == [-1, 0, 1, 0, 3, 1]
        assert tree.depths.tolist() == [0, 1, 2, 1, 2, 2]
        assert tree.ranks.tolist() == [-1, 0, 0, 1, 0, 1]
        assert np.exp(tree.log_probs) == pytest.approx([1.0, 0.6, 0.54, 0.4, 0.396, 0.06])
    assert build_chain(said, 1, 5).token_ids.tolist() == [1, 5, 8]


@given(all_marginals(), st.integers(0, 60))
@settings(max_examples=60)
def test_transitions_that_say_nothing_change_nothing(marginals: Marginals, budget: int) -> None:
    expected = reference.build_tree(marginals, ROOT, budget)
    for build in BUILDERS:
        assert_same(build(as_first_order(marginals), ROOT, budget), expected)
    assert_same(
        build_chain(as_first_order(marginals), ROOT, budget),
        build_chain(marginals, ROOT, budget),
    )


@given(first_order(), st.integers(0, 12))
@settings(max_examples=60)
def test_the_chain_is_the_path_of_rank_0(marginals: Marginals, budget: int) -> None:
    found = scores_and_tokens(marginals)
    path = [(0,) * depth for depth in range(min(budget, marginals.num_depths) + 1)]
    path = [prefix for prefix in path if found[prefix][0] > -INF]
    chain = build_chain(marginals, ROOT, budget)
    assert prefixes_of(chain) == path
    assert chain.token_ids.tolist() == [found[prefix][1] for prefix in path]
    assert chain.log_probs.tolist() == [found[prefix][0] for prefix in path]


def random_first_order(num_depths: int, num_ranks: int, step: float, seed: int) -> Marginals:
    """Of a real size; log-probs rounded to steps so coarse that many tie."""
    generator = torch.Generator().manual_seed(seed)

    def rows(*shape: int) -> torch.return_types.sort:
        logits = 3 * torch.randn(*shape, num_ranks, generator=generator)
        log_probs = logits.log_softmax(-1)
        if step:
            log_probs = -step * (log_probs / -step).round()
        return log_probs.sort(descending=True)

    behind = rows(num_depths - 1, num_ranks)
    token_ids = torch.randint(1000, (num_depths, num_ranks), generator=generator)
    transitions = Transitions(behind.values, behind.indices)
    return Marginals(rows(num_depths).values, token_ids, transitions)


@pytest.mark.parametrize("step", [0.0, 2.0**-4, 0.5, 4.0])
@pytest.mark.parametrize(
    ("num_depths", "num_ranks", "budget"), [(8, 16, 32), (15, 16, 64), (15, 4, 130), (2, 40, 300)]
)
def test_trees_of_real_sizes_equal_the_reference(
    num_depths: int, num_ranks: int, budget: int, step: float
) -> None:
    for seed in range(3):
        marginals = random_first_order(num_depths, num_ranks, step, seed)
        expected = reference.build_tree(marginals, ROOT, budget)
        for build in BUILDERS[1:]:
            assert_same(build(marginals, ROOT, budget), expected)


# What may not be drafted.


@given(first_order(), st.integers(0, 12), st.sets(st.sampled_from([0, 1, 2, 10, 11, 20, 21])))
@settings(max_examples=50)
def test_a_prefix_that_may_not_be_is_no_node_and_has_none_below(
    marginals: Marginals, budget: int, banned: set[int]
) -> None:
    asked: list[Prefix] = []

    def allowed(prefix: Prefix) -> bool:
        asked.append(prefix)
        return prefix[-1] not in banned

    for given_marginals in (
        marginals,
        as_first_order(Marginals(marginals.log_probs, marginals.token_ids)),
    ):
        asked.clear()
        tree = reference.build_tree(given_marginals, ROOT, budget, allowed=allowed)
        assert_same(tree, brute_force(given_marginals, budget, frozenset(banned)))
        assert len(set(asked)) == len(asked)
        assert all(not banned & {*prefix[:-1]} for prefix in asked)
        # Nobody asks for more than the tree has room for.
        assert sum(not banned & {*prefix} for prefix in asked) == tree.num_nodes


def test_who_asks_sees_whole_prefixes_best_first() -> None:
    asked: list[Prefix] = []

    def allowed(prefix: Prefix) -> bool:
        asked.append(prefix)
        return prefix != (0,)

    rows = np.log([[0.6, 0.4], [0.9, 0.1]]).tolist()
    tree = reference.build_tree(marginals_of(rows), ROOT, 8, allowed=allowed)
    assert asked == [(0,), (1,), (1, 10), (1, 11)]
    assert prefixes_of(tree) == [(), (1,), (1, 0), (1, 1)]


# What is refused.


def with_row(depth: int, parent: int, row: list[float]) -> Marginals:
    said = as_first_order(marginals_of([[-0.5, -1.0, -2.0]] * 3))
    log_probs = said.transitions.log_probs.clone()
    log_probs[depth - 2, parent] = torch.tensor(row)
    return Marginals(said.log_probs, said.token_ids, Transitions(log_probs, said.transitions.ranks))


@pytest.mark.parametrize("build", HOST_BUILDERS)
@pytest.mark.parametrize(("depth", "parent"), [(2, 0), (2, 2), (3, 1)])
@pytest.mark.parametrize(
    ("row", "what"),
    [
        ([-0.5, math.nan, -2.0], "NaN"),
        ([math.nan, -1.0, -2.0], "NaN"),
        ([1e-6, -1.0, -2.0], "log-probs <= 0, got .*"),
        ([-1.0, -0.5, -2.0], "sorted from high to low, got .*"),
    ],
)
def test_an_illegal_row_is_an_error_that_names_depth_and_parent(
    build, depth: int, parent: int, row: list[float], what: str
) -> None:
    with pytest.raises(MarginalsError, match=f"{what} at depth {depth} behind rank {parent}"):
        build(with_row(depth, parent, row), ROOT, 4)


@pytest.mark.parametrize("build", HOST_BUILDERS)
@pytest.mark.parametrize("rank", [-1, 3, 2**40])
def test_a_rank_that_there_is_none_of_is_an_error_that_names_the_depth(build, rank: int) -> None:
    said = as_first_order(marginals_of([[-0.5, -1.0, -2.0]] * 3))
    ranks = said.transitions.ranks.clone()
    ranks[1, 2, 1] = rank
    transitions = Transitions(said.transitions.log_probs, ranks)
    with pytest.raises(MarginalsError, match=f"from 0 to 2.* got {rank} at depth 3 behind rank 2"):
        build(Marginals(said.log_probs, said.token_ids, transitions), ROOT, 4)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("build", HOST_BUILDERS)
@pytest.mark.parametrize("shape", [(3, 3, 3), (1, 3, 3), (2, 3, 2), (2, 2, 3), (2, 3), (18,)])
def test_transitions_of_another_shape_are_an_error_that_tells_both(
    build, shape: tuple[int, ...]
) -> None:
    alone = marginals_of([[-0.5, -1.0, -2.0]] * 3)
    behind = Transitions(torch.full(shape, -1.0), torch.zeros(shape, dtype=torch.int64))
    with pytest.raises(MarginalsError, match=r"here \(2, 3, 3\)") as error:
        build(Marginals(alone.log_probs, alone.token_ids, behind), ROOT, 4)
    assert f"{shape} and {shape}" in str(error.value)


def test_one_depth_has_no_transitions_and_none_is_asked_for() -> None:
    said = as_first_order(marginals_of([[-0.5, -1.0]]))
    assert HostMarginals.of(said).transitions.log_probs.shape == (0, 2, 2)
    for build in (*BUILDERS, build_chain):
        assert build(said, ROOT, 1).token_ids.tolist() == [ROOT, 0]


def batch_of(requests: list[Marginals]) -> tuple[Tensor, Tensor, Tensor, Transitions]:
    return (
        torch.stack([request.log_probs for request in requests]),
        torch.stack([request.token_ids for request in requests]),
        torch.arange(len(requests)),
        Transitions(
            torch.stack([request.transitions.log_probs for request in requests]),
            torch.stack([request.transitions.ranks for request in requests]),
        ),
    )


def bad_rank() -> Marginals:
    said = with_row(2, 0, [-0.5, -1.0, -2.0])
    said.transitions.ranks[1, 1, 1] = 3
    return said


@pytest.mark.parametrize(
    "bad",
    [
        with_row(2, 1, [-0.5, math.nan, -2.0]),
        with_row(3, 2, [-math.nan, -1.0, -2.0]),
        with_row(2, 0, [1e-6, -1.0, -2.0]),
        with_row(3, 1, [-1.0, -0.5, -2.0]),
        bad_rank(),
    ],
)
def test_in_a_batch_an_illegal_draft_gives_the_root_alone_and_leaves_its_neighbours(
    bad: Marginals,
) -> None:
    good = random_first_order(3, 3, 0.0, seed=0)
    log_probs, token_ids, root_ids, behind = batch_of([good, bad, TIES])
    trees = build_trees(log_probs, token_ids, root_ids, 7, behind)
    assert trees.valid.tolist() == [True, False, True]
    assert trees.num_rows.tolist() == [8, 1, 8]
    assert torch.equal(expand_ancestors(trees.ancestor_words)[1], torch.eye(8, dtype=torch.bool))
    assert_same(trees.tree(0), reference.build_tree(good, 0, 7))
    assert_same(trees.tree(2), reference.build_tree(TIES, 2, 7))
    with pytest.raises(MarginalsError, match="request 1"):
        trees.tree(1)
