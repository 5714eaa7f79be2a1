"""The reference builder and the chain against brute-force enumeration of all prefixes."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddtree.errors import MarginalsError
from ddtree.tree.chain import build_chain
from ddtree.tree.reference import build_tree
from ddtree.types import DraftTree, Marginals

ROOT = 99
INF = math.inf
Prefix = tuple[int, ...]
Rows = list[list[float]]


def marginals_of(rows: Rows, token_ids: list[list[int]] | None = None) -> Marginals:
    if token_ids is None:
        token_ids = [
            [10 * depth + rank for rank in range(len(row))] for depth, row in enumerate(rows)
        ]
    return Marginals(torch.tensor(rows, dtype=torch.float32), torch.tensor(token_ids))


def scores_of_all_prefixes(marginals: Marginals) -> dict[Prefix, float]:
    rows = marginals.log_probs.tolist()
    scores: dict[Prefix, float] = {(): 0.0}
    for depth, row in enumerate(rows, start=1):
        for prefix in product(range(len(row)), repeat=depth):
            # A float64 sum of two float32 rounded once is their float32 sum.
            scores[prefix] = float(np.float32(scores[prefix[:-1]] + row[prefix[-1]]))
    return scores


def brute_force(marginals: Marginals, budget: int) -> DraftTree:
    scores = scores_of_all_prefixes(marginals)

    def key(prefix: Prefix) -> tuple[object, ...]:
        if not prefix:
            return (-INF,)
        return (-scores[prefix], len(prefix), key(prefix[:-1]), prefix[-1])

    ordered = sorted((p for p, score in scores.items() if score > -INF), key=key)[: budget + 1]
    place = {prefix: i for i, prefix in enumerate(ordered)}
    token_ids = marginals.token_ids.tolist()
    return DraftTree(
        np.array([token_ids[len(p) - 1][p[-1]] if p else ROOT for p in ordered], np.int64),
        np.array([place[p[:-1]] if p else -1 for p in ordered], np.int32),
        np.array([len(p) for p in ordered], np.int32),
        np.array([p[-1] if p else -1 for p in ordered], np.int32),
        np.array([scores[p] for p in ordered], np.float32),
    )


def assert_same(actual: DraftTree, expected: DraftTree) -> None:
    assert actual.token_ids.tolist() == expected.token_ids.tolist()
    assert actual.parents.tolist() == expected.parents.tolist()
    assert actual.depths.tolist() == expected.depths.tolist()
    assert actual.ranks.tolist() == expected.ranks.tolist()
    assert actual.log_probs.tobytes() == expected.log_probs.tobytes()


def prefixes_of(tree: DraftTree) -> list[Prefix]:
    prefixes: list[Prefix] = [()]
    for parent, rank in zip(tree.parents.tolist()[1:], tree.ranks.tolist()[1:], strict=True):
        prefixes.append((*prefixes[parent], rank))
    return prefixes


@st.composite
def row_of(draw: st.DrawFn, num_ranks: int) -> list[float]:
    kind = draw(st.sampled_from(["grid", "any", "rounding", "bf16", "random", "sure", "banned"]))
    if kind == "sure":
        return [0.0] + [-INF] * (num_ranks - 1)
    if kind == "banned":
        return [-INF] * num_ranks
    if kind in ("bf16", "random"):
        # Log-probs with all bits in use; those of bf16 logits tie often.
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
        logits = 3 * torch.randn(num_ranks, generator=generator)
        logits = logits.bfloat16().float() if kind == "bf16" else logits
        return sorted(logits.log_softmax(-1).clamp(max=0).tolist(), reverse=True)
    value = {
        "grid": st.sampled_from([0.0, -0.0, -0.25, -0.5, -0.5, -1.0, -INF]),
        "any": st.floats(-30, 0, width=32),
        # Children of unequal parents come to the same sum in float32.
        "rounding": st.sampled_from(
            [0.0, -(2.0**-30), -(2.0**-24), -1.0, -(1 + 2.0**-23), -65536.0]
        ),
    }[kind]
    row = draw(st.lists(value, min_size=num_ranks, max_size=num_ranks))
    num_banned = draw(st.integers(0, num_ranks)) if draw(st.booleans()) else 0
    return sorted(row, reverse=True)[: num_ranks - num_banned] + [-INF] * num_banned


@st.composite
def all_marginals(draw: st.DrawFn) -> Marginals:
    # At most 155 prefixes, so that enumeration stays cheap.
    num_depths, num_ranks = draw(
        st.sampled_from(
            [(1, 1), (1, 5), (2, 1), (2, 3), (2, 7), (3, 1), (3, 2), (3, 5), (4, 3), (6, 2), (9, 1)]
        )
    )
    rows = [draw(row_of(num_ranks)) for _ in range(num_depths)]
    token_ids = [draw(st.permutations(range(num_ranks))) for _ in range(num_depths)]
    return marginals_of(rows, [list(ids) for ids in token_ids])


budgets = st.integers(0, 200)

ALL_TIES = marginals_of([[-1.0, -1.0, -1.0]] * 3)
ALL_SURE = marginals_of([[0.0, 0.0]] * 4)
# 1 + 2^-24 rounds to 1: both parents' children tie, and the parent's place must decide.
ROUNDS_TO_TIES = marginals_of([[-(2.0**-24), -(2.0**-23)], [-4.0, -4.0], [-64.0, -64.0]])
LONG_CHAIN = marginals_of([[-0.5]] * 9)


@given(all_marginals(), budgets)
@settings(max_examples=200)
@example(ALL_TIES, 20)
@example(ALL_SURE, 29)
@example(ROUNDS_TO_TIES, 13)
@example(LONG_CHAIN, 4)
def test_tree_equals_brute_force_node_for_node(marginals: Marginals, budget: int) -> None:
    assert_same(build_tree(marginals, ROOT, budget), brute_force(marginals, budget))


def test_rounding_example_really_ties_children_of_unequal_parents() -> None:
    scores = scores_of_all_prefixes(ROUNDS_TO_TIES)
    assert scores[(0,)] != scores[(1,)]
    assert scores[(0, 1)] == scores[(1, 0)]
    order = prefixes_of(build_tree(ROUNDS_TO_TIES, ROOT, 6))
    assert order == [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]


@given(all_marginals(), budgets)
@settings(max_examples=60)
def test_tree_is_prefix_closed_ordered_and_parents_come_first(
    marginals: Marginals, budget: int
) -> None:
    tree = build_tree(marginals, ROOT, budget)
    prefixes = prefixes_of(tree)
    assert len(set(prefixes)) == len(prefixes) <= budget + 1
    assert {p[:-1] for p in prefixes} <= set(prefixes)
    assert (tree.parents < np.arange(tree.num_rows)).all()
    assert (tree.depths[1:] == tree.depths[tree.parents[1:]] + 1).all()
    assert (np.diff(tree.log_probs) <= 0).all()
    assert np.isfinite(tree.log_probs).all()


@given(all_marginals(), budgets)
@settings(max_examples=60)
def test_tree_has_the_whole_budget_unless_prefixes_run_out(
    marginals: Marginals, budget: int
) -> None:
    legal = sum(score > -INF for score in scores_of_all_prefixes(marginals).values()) - 1
    assert build_tree(marginals, ROOT, budget).num_nodes == min(budget, legal)


@given(all_marginals(), st.integers(0, 40), st.data())
@settings(max_examples=60)
def test_no_other_prefix_closed_tree_of_this_size_is_expected_to_accept_more(
    marginals: Marginals, budget: int, data: st.DataObject
) -> None:
    tree = build_tree(marginals, ROOT, budget)
    scores = scores_of_all_prefixes(marginals)
    other: list[Prefix] = [()]
    frontier = [(rank,) for rank in range(marginals.num_ranks)]
    for _ in range(tree.num_nodes):
        prefix = frontier.pop(data.draw(st.integers(0, len(frontier) - 1)))
        other.append(prefix)
        if len(prefix) < marginals.num_depths:
            frontier += [(*prefix, rank) for rank in range(marginals.num_ranks)]
    ours = math.fsum(math.exp(score) for score in tree.log_probs.tolist())
    assert ours >= math.fsum(math.exp(scores[prefix]) for prefix in other)
    assert tree.expected_acceptance_length == pytest.approx(ours, rel=1e-12)


@given(all_marginals(), st.integers(0, 24))
@settings(max_examples=30)
def test_smaller_budgets_are_beginnings_of_the_tree(marginals: Marginals, budget: int) -> None:
    tree = build_tree(marginals, ROOT, budget)
    for smaller in range(budget + 1):
        assert_same(tree.first(smaller), build_tree(marginals, ROOT, smaller))


@given(all_marginals(), st.integers(1, 8))
@settings(max_examples=60)
def test_as_many_ranks_as_the_budget_are_enough(marginals: Marginals, budget: int) -> None:
    kept = Marginals(marginals.log_probs[:, :budget], marginals.token_ids[:, :budget])
    assert_same(build_tree(kept, ROOT, budget), build_tree(marginals, ROOT, budget))


@given(all_marginals())
@settings(max_examples=60)
def test_budget_0_is_the_root_alone(marginals: Marginals) -> None:
    assert_same(build_tree(marginals, ROOT, 0), DraftTree.root_only(ROOT))
    assert_same(build_chain(marginals, ROOT, 0), DraftTree.root_only(ROOT))


def test_banned_tokens_shrink_the_tree_to_what_is_left() -> None:
    tree = build_tree(marginals_of([[-0.1, -INF, -INF], [-0.2, -0.3, -INF]]), ROOT, 16)
    assert prefixes_of(tree) == [(), (0,), (0, 0), (0, 1)]


def test_a_banned_depth_ends_the_tree_above_it() -> None:
    rows = [[-0.1, -0.9], [-INF, -INF], [-0.1, -0.9]]
    assert prefixes_of(build_tree(marginals_of(rows), ROOT, 16)) == [(), (0,), (1,)]
    assert build_chain(marginals_of(rows), ROOT, 16).num_nodes == 1


@pytest.mark.parametrize("build", [build_tree, build_chain])
def test_a_banned_first_depth_leaves_the_root_alone(build) -> None:
    rows = [[-INF, -INF], [-0.1, -0.9]]
    assert_same(build(marginals_of(rows), ROOT, 16), DraftTree.root_only(ROOT))


@pytest.mark.parametrize("build", [build_tree, build_chain])
def test_a_score_that_overflows_is_banned_without_a_warning(build) -> None:
    lowest = torch.finfo(torch.float32).min
    tree = build(marginals_of([[lowest], [lowest]]), ROOT, 16)
    assert tree.depths.tolist() == [0, 1]


@given(all_marginals(), budgets)
@settings(max_examples=100)
def test_chain_is_the_path_of_rank_0(marginals: Marginals, budget: int) -> None:
    chain = build_chain(marginals, ROOT, budget)
    scores = scores_of_all_prefixes(marginals)
    num_nodes = 0
    while num_nodes < min(budget, marginals.num_depths) and scores[(0,) * (num_nodes + 1)] > -INF:
        num_nodes += 1
    assert prefixes_of(chain) == [(0,) * depth for depth in range(num_nodes + 1)]
    assert chain.parents.tolist() == list(range(-1, num_nodes))
    assert chain.depths.tolist() == list(range(num_nodes + 1))
    assert chain.token_ids.tolist() == [ROOT, *marginals.token_ids[:num_nodes, 0].tolist()]
    expected = np.array([scores[(0,) * depth] for depth in range(num_nodes + 1)], np.float32)
    assert chain.log_probs.tobytes() == expected.tobytes()


@given(all_marginals(), budgets)
@settings(max_examples=100)
def test_chain_is_the_tree_when_one_rank_is_given(marginals: Marginals, budget: int) -> None:
    one = Marginals(marginals.log_probs[:, :1], marginals.token_ids[:, :1])
    assert_same(build_chain(marginals, ROOT, budget), build_tree(one, ROOT, budget))


@pytest.mark.parametrize("build", [build_tree, build_chain])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("rank", [0, 1])
def test_nan_is_an_error_that_names_the_depth(build, depth: int, rank: int) -> None:
    rows = [[-0.5, -1.0], [-0.5, -1.0], [-0.5, -1.0]]
    rows[depth - 1][rank] = math.nan
    with pytest.raises(MarginalsError, match=f"NaN at depth {depth}"):
        build(marginals_of(rows), ROOT, 4)


@pytest.mark.parametrize("build", [build_tree, build_chain])
@pytest.mark.parametrize("value", [1e-6, INF])
def test_a_positive_log_prob_is_an_error_that_names_the_depth(build, value: float) -> None:
    with pytest.raises(MarginalsError, match=r"log-probs <= 0, got .* at depth 2"):
        build(marginals_of([[-0.5, -1.0], [value, -1.0]]), ROOT, 4)


@pytest.mark.parametrize("build", [build_tree, build_chain])
@pytest.mark.parametrize("row", [[-1.0, -0.5, -2.0], [-0.5, -INF, -2.0]])
def test_an_unsorted_row_is_an_error_that_names_the_depth(build, row: list[float]) -> None:
    with pytest.raises(MarginalsError, match=r"sorted from high to low, got .* at depth 2"):
        build(marginals_of([[-0.5, -1.0, -2.0], row]), ROOT, 4)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("build", [build_tree, build_chain])
def test_mismatched_shapes_are_an_error_that_tells_both(build) -> None:
    with pytest.raises(MarginalsError, match=r"\(1, 2\) and \(1, 3\)"):
        build(Marginals(torch.tensor([[-0.5, -1.0]]), torch.tensor([[1, 2, 3]])), ROOT, 4)
