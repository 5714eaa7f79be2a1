"""The compiled core against its readable twins, bit for bit; and what happens without it."""

import math
import sys
from contextlib import nullcontext
from importlib import import_module

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import ddtree.sampling
import ddtree.tree
from ddtree.decode import BUILDERS
from ddtree.errors import BackendError, MarginalsError
from ddtree.host_marginals import HostMarginals
from ddtree.sampling import calibration, worth
from ddtree.tree import geometry, host, native, reference
from ddtree.types import DraftTree, Marginals
from tests.unit.tree.test_geometry import random_trees
from tests.unit.tree.test_reference import (
    ALL_SURE,
    ALL_TIES,
    INF,
    LONG_CHAIN,
    ROOT,
    ROUNDS_TO_TIES,
    all_marginals,
    assert_same,
    budgets,
    marginals_of,
)

LOWEST = torch.finfo(torch.float32).min


def assert_twins_agree(marginals: Marginals, budget: int, root_id: int = ROOT) -> None:
    actual = native.build_tree(marginals, root_id, budget)
    assert_same(actual, reference.build_tree(marginals, root_id, budget))


def test_the_core_was_built() -> None:
    """`make setup` builds it; if this fails, install a C compiler and run `make setup` again."""
    assert native.AVAILABLE
    assert host.build_tree is native.build_tree
    assert host.describe() == "compiled"
    assert calibration._worth is native.worth


def test_decoding_uses_the_builder_of_this_host() -> None:
    assert BUILDERS["ddtree"] is host.build_tree


@given(all_marginals(), budgets)
@settings(max_examples=100)
@example(ALL_TIES, 20)
@example(ALL_SURE, 29)
@example(ROUNDS_TO_TIES, 13)
@example(LONG_CHAIN, 4)
def test_small_trees_equal_the_reference_node_for_node(marginals: Marginals, budget: int) -> None:
    assert_twins_agree(marginals, budget)


@st.composite
def wide_marginals(draw: st.DrawFn) -> Marginals:
    """Up to L = 15 and K = 80, rounded to steps so coarse that most scores tie, or not at all."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    num_depths, vocab_size = draw(st.integers(1, 15)), draw(st.integers(1, 80))
    logits = draw(st.sampled_from([0.1, 1.0, 4.0])) * torch.randn(
        num_depths, vocab_size, generator=generator
    )
    step = draw(st.sampled_from([0.0, 2.0**-4, 0.5, 4.0]))
    log_probs = logits.log_softmax(-1)
    if step:
        log_probs = -step * (log_probs / -step).round()
    num_banned = draw(st.integers(0, vocab_size)) if draw(st.booleans()) else 0
    log_probs[
        torch.rand(num_depths, vocab_size, generator=generator).argsort(-1) < num_banned
    ] = -INF
    num_ranks = draw(st.integers(1, vocab_size))
    return Marginals(*log_probs.topk(num_ranks))


@given(wide_marginals(), st.integers(0, 300), st.integers(-(2**63), 2**63 - 1))
@settings(max_examples=100)
def test_large_trees_equal_the_reference_node_for_node(
    marginals: Marginals, budget: int, root_id: int
) -> None:
    assert_twins_agree(marginals, budget, root_id)


@pytest.mark.parametrize("budget", [0, 1, 2, 7, 1000])
@pytest.mark.parametrize(
    "rows",
    [
        [[LOWEST, LOWEST], [LOWEST, LOWEST], [-1.0, -2.0]],  # overflows to -inf at depth 2
        [[-1.0], [LOWEST], [LOWEST]],
        [[0.0, -INF, -INF]] * 6,
        [[-0.0, -0.0, -0.0], [0.0, -0.0, 0.0]],
        [[-INF, -INF]],
        [[-1.0, -1.0], [-INF, -INF], [0.0, 0.0]],
        [[-(2.0**-149), -(2.0**-126)]] * 4,  # denormal
        [[-0.5] * 40],
    ],
)
def test_the_edges_of_float32_equal_the_reference(rows: list[list[float]], budget: int) -> None:
    assert_twins_agree(marginals_of(rows), budget)


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0)])
def test_no_depth_or_no_rank_is_the_root_alone(shape: tuple[int, int]) -> None:
    empty = Marginals(torch.zeros(shape), torch.zeros(shape, dtype=torch.int64))
    assert_same(native.build_tree(empty, ROOT, 8), DraftTree.root_only(ROOT))


def test_a_budget_beyond_all_prefixes_takes_no_room_for_the_rest() -> None:
    marginals = marginals_of([[-0.1, -INF, -INF], [-0.2, -0.3, -INF]])
    for budget in (2**31, 2**63, 10**30):
        assert_twins_agree(marginals, budget)


@pytest.mark.parametrize("budget", [-1, -(10**30)])
def test_a_budget_below_0_is_the_root_alone_as_in_the_reference(budget: int) -> None:
    assert_twins_agree(LONG_CHAIN, budget)


def test_strided_marginals_are_read_in_their_own_order() -> None:
    log_probs, token_ids = torch.randn(5, 30).log_softmax(-1).topk(20)
    parts = Marginals(log_probs[1:, :7], token_ids[1:, :7])
    turned = Marginals(log_probs.T.contiguous().T, token_ids.T.contiguous().T)
    for marginals in (parts, turned, Marginals(log_probs[:, ::2], token_ids[:, ::2])):
        assert_twins_agree(marginals, 50)


@pytest.mark.usefixtures("unchecked")
def test_other_dtypes_are_converted_as_by_the_reference() -> None:
    log_probs, token_ids = torch.randn(4, 30).log_softmax(-1).topk(20)
    for dtype in (torch.bfloat16, torch.float64):
        assert_twins_agree(Marginals(log_probs.to(dtype), token_ids.to(torch.int32)), 50)


def test_inference_tensors_are_read_and_the_arrays_are_writable() -> None:
    with torch.inference_mode():
        log_probs, token_ids = torch.randn(4, 30).log_softmax(-1).topk(20)
    tree = native.build_tree(Marginals(log_probs, token_ids), ROOT, 10)
    for array, dtype in (
        (tree.token_ids, np.int64),
        (tree.parents, np.int32),
        (tree.depths, np.int32),
        (tree.ranks, np.int32),
        (tree.log_probs, np.float32),
    ):
        assert array.dtype == dtype
        assert array.flags.writeable  # torch.from_numpy warns of the other kind
        assert array.flags.aligned
        assert array.flags.c_contiguous


def message(build, marginals: Marginals, budget: int) -> str:
    with pytest.raises(MarginalsError) as caught:
        build(marginals, ROOT, budget)
    return str(caught.value)


@pytest.mark.parametrize("budget", [0, 4])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    ("row", "part"),
    [
        ([math.nan, -1.0, -2.0], "NaN at depth"),
        ([-0.5, -1.0, math.nan], "NaN at depth"),
        ([-INF, -INF, math.nan], "NaN at depth"),
        ([1e-6, -1.0, -2.0], "got 9.99"),
        ([INF, -1.0, -2.0], "got inf"),
        ([-1.0, -0.5, -2.0], "an increasing pair"),
        ([-0.5, -INF, -2.0], "an increasing pair"),
        ([-0.5, -1.0, 0.25], "got 0.25"),
    ],
)
def test_illegal_marginals_are_the_same_error_as_by_the_reference(
    row: list[float], part: str, depth: int, budget: int
) -> None:
    rows = [[-0.5, -1.0, -2.0]] * 4
    rows[depth - 1] = row
    said = message(native.build_tree, marginals_of(rows), budget)
    assert said == message(reference.build_tree, marginals_of(rows), budget)
    assert part in said
    assert f"depth {depth}" in said


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("shape", [(1, 3), (2, 2), (2,), (1, 2, 1)])
def test_mismatched_shapes_are_the_same_error_as_by_the_reference(shape: tuple[int, ...]) -> None:
    marginals = Marginals(torch.tensor([[-0.5, -1.0]]), torch.zeros(shape, dtype=torch.int64))
    said = message(native.build_tree, marginals, 4)
    assert said == message(reference.build_tree, marginals, 4)
    assert f"(1, 2) and {shape}" in said


@given(st.lists(st.floats(-2, 0.125, width=32) | st.just(math.nan), min_size=1, max_size=4))
@settings(max_examples=100)
def test_the_core_refuses_what_the_readable_checks_refuse_and_nothing_else(
    row: list[float],
) -> None:
    array = np.array([row], np.float32)
    legal = bool(array[0, 0] <= 0 and (array[:, 1:] <= array[:, :-1]).all())
    with nullcontext() if legal else pytest.raises(MarginalsError):
        HostMarginals.of(marginals_of([row]))
    core = native._native.build_tree(array, np.zeros(array.shape, np.int64), ROOT, 2)
    assert (core is not None) == legal


@pytest.mark.parametrize("build", [native.build_tree, reference.build_tree])
def test_a_root_beyond_64_bits_is_an_error(build) -> None:
    with pytest.raises(OverflowError):
        build(LONG_CHAIN, 2**63, 4)


def test_the_binding_refuses_arrays_that_it_cannot_read() -> None:
    log_probs, token_ids = np.zeros((2, 3), np.float32), np.zeros((2, 3), np.int64)
    build, mask = native._native.build_tree, native._native.ancestor_mask
    with pytest.raises(TypeError, match="log_probs: expected items"):
        build(log_probs.astype(np.float64), token_ids, ROOT, 4)
    with pytest.raises(TypeError, match="token_ids: expected items"):
        build(log_probs, token_ids.astype(np.uint64), ROOT, 4)
    with pytest.raises(ValueError, match="not C-contiguous"):
        build(log_probs.T, token_ids.T, ROOT, 4)
    with pytest.raises(ValueError, match=r"expected \[L, K\]"):
        build(log_probs[0], token_ids[0], ROOT, 4)
    with pytest.raises(TypeError, match="4 or 6 arguments, got 3"):
        build(log_probs, token_ids, ROOT)
    behind, ranks = np.zeros((1, 3, 3), np.float32), np.zeros((1, 3, 3), np.int64)
    assert build(log_probs, token_ids, ROOT, 4, behind, ranks) is not None
    with pytest.raises(TypeError, match="arguments, got 5"):
        build(log_probs, token_ids, ROOT, 4, behind)
    with pytest.raises(TypeError, match="transitions: expected items"):
        build(log_probs, token_ids, ROOT, 4, behind.astype(np.float64), ranks)
    with pytest.raises(TypeError, match="followers: expected items"):
        build(log_probs, token_ids, ROOT, 4, behind, ranks.astype(np.int32))
    with pytest.raises(ValueError, match="not C-contiguous"):
        build(log_probs, token_ids, ROOT, 4, behind, ranks.transpose(0, 2, 1))
    for misshapen in (behind[0], behind[:, :2], np.zeros((2, 3, 3), np.float32)):
        assert build(log_probs, token_ids, ROOT, 4, misshapen, ranks) is None
        alike = np.zeros(misshapen.shape, np.int64)
        assert build(log_probs, token_ids, ROOT, 4, misshapen.copy(), alike) is None
    with pytest.raises(TypeError, match="2 arguments, got 1"):
        mask(np.zeros(2, np.int32))
    with pytest.raises(ValueError, match=r"mask: expected \[N, N\]"):
        mask(np.zeros(2, np.int32), np.zeros((2, 3), np.bool_))
    with pytest.raises(TypeError, match="parents: expected items"):
        mask(np.zeros(2, np.int64), np.zeros((2, 2), np.bool_))


@given(random_trees())
def test_the_mask_equals_the_readable_one(tree: DraftTree) -> None:
    expected = geometry.ancestor_mask_by_rows(tree)
    for mask in (native.ancestor_mask(tree), geometry.ancestor_mask(tree)):
        assert mask.dtype == np.bool_
        assert mask.tobytes() == expected.tobytes()


def test_the_mask_of_a_smaller_budget_equals_the_readable_one() -> None:
    marginals = Marginals(*torch.randn(8, 40).log_softmax(-1).topk(40))
    tree = native.build_tree(marginals, ROOT, 60).first(33)
    assert (native.ancestor_mask(tree) == geometry.ancestor_mask_by_rows(tree)).all()


@pytest.mark.parametrize("parents", [[-1, -1], [-1, 1], [-1, 0, 3, 0]])
def test_a_parent_that_does_not_come_first_is_an_error(parents: list[int]) -> None:
    rows = np.array(parents, np.int32)
    tree = DraftTree(rows.astype(np.int64), rows, rows, rows, rows.astype(np.float32))
    with pytest.raises(ValueError, match="precedes its parent"):
        native.ancestor_mask(tree)


@st.composite
def calibrations(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, list[tuple[np.ndarray, ...]]]:
    """Counts of no rounds, bins, and rounds: log-probs with -inf, 0 and ties, ids, choices."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    num_depths, num_bins = draw(st.integers(1, 7)), draw(st.integers(1, 13))
    odds = np.sort(rng.choice(np.linspace(-7, 5, 49), num_bins, replace=False))
    bins = -np.log1p(np.exp(-np.stack([odds, odds + 0.125])))
    rounds = []
    for _ in range(draw(st.integers(0, 12))):
        shape = (draw(st.integers(1, num_depths)), draw(st.integers(1, 20)))
        log_probs = -rng.exponential(draw(st.sampled_from([0.1, 2.0])), shape)
        log_probs[rng.random(shape) < 0.1] = draw(st.sampled_from([-INF, 0.0, -3.0]))
        ids = rng.integers(0, draw(st.sampled_from([3, 50])), shape)
        chosen = tuple(rng.integers(0, 3, draw(st.integers(0, num_depths + 1))).tolist())
        rounds.append((-np.sort(-log_probs).astype(np.float32), ids, chosen))
    return np.zeros((num_depths, 2 * num_bins + 2)), bins, rounds


@given(calibrations(), st.sampled_from([0.5, 3.0]), st.sampled_from([0.1, 1.5]))
@settings(max_examples=30)
def test_what_is_counted_and_what_it_is_worth_equal_the_readable_twin(
    learnt: tuple[np.ndarray, np.ndarray, list[tuple[np.ndarray, ...]]],
    prior_weight: float,
    prior_tokens: float,
) -> None:
    counts, bins, rounds = learnt
    expected = counts.copy()
    for said, ids, chosen in rounds:
        native.count(counts, bins, said, ids, chosen, 0.9)
        worth.count(expected, bins, said, ids, chosen, 0.9)
        np.testing.assert_allclose(counts, expected, rtol=1e-9, atol=1e-12)
        fast, readable = (
            twin.worth(counts, bins, said, prior_weight, prior_tokens) for twin in (native, worth)
        )
        np.testing.assert_allclose(fast, readable, rtol=1e-5, atol=1e-6)
        several = np.stack([said, np.minimum(said, -1.0), said], axis=1)
        fast_rows = native.worth(counts, bins, several, prior_weight, prior_tokens)
        rows = worth.worth(counts, bins, several, prior_weight, prior_tokens)
        np.testing.assert_allclose(fast_rows, rows, rtol=1e-5, atol=1e-6)
        assert (fast_rows[:, 0] == fast).all()
        assert (fast_rows[:, 2] == fast).all()
        HostMarginals.of(Marginals(torch.from_numpy(fast), torch.from_numpy(ids)))


def test_what_a_nan_is_worth_is_for_the_builder_to_refuse() -> None:
    said = np.array([[-0.5, np.nan, -2.0]], np.float32)
    bins = np.log([[0.1, 0.9], [0.5, 1.0]])
    assert np.isnan(native.worth(np.zeros((1, 6)), bins, said, 3.0, 1.5)[0, 1])


@pytest.mark.usefixtures("unchecked")
def test_the_binding_refuses_counts_that_it_cannot_use() -> None:
    counts, bins = np.zeros((2, 6)), np.zeros((2, 2))
    said, ids = np.zeros((2, 3), np.float32), np.zeros((2, 3), np.int64)
    with pytest.raises(ValueError, match=r"log_probs \[D <= L, K\]"):
        native.worth(counts[:1], bins, said, 3.0, 1.5)
    with pytest.raises(ValueError, match=r"log_probs \[D <= L, K\]"):
        native.count(counts, bins, said[:, None], ids, (1,), 0.9)
    with pytest.raises(ValueError, match=r"\[D <= L, M, K\]"):
        native.worth(counts, bins, said[:, None, None], 3.0, 1.5)
    with pytest.raises(ValueError, match=r"bins \[2, J\]"):
        native.worth(np.zeros((2, 7)), bins, said, 3.0, 1.5)
    with pytest.raises(ValueError, match=r"bins \[2, J\]"):
        native.worth(np.zeros((2, 132)), np.zeros((2, 65)), said, 3.0, 1.5)
    with pytest.raises(ValueError, match="token_ids"):
        native.count(counts, bins, said, ids[:1], (1,), 0.9)
    with pytest.raises(ValueError, match="out"):
        native._native.worth(counts, bins, said, said[:1].copy(), 3.0, 1.5)
    with pytest.raises(TypeError, match="bins: expected items"):
        native.worth(counts, bins.astype(np.float32), said, 3.0, 1.5)
    with pytest.raises(TypeError, match="chosen: expected a tuple"):
        native.count(counts, bins, said, ids, [1], 0.9)
    with pytest.raises(OverflowError):
        native.count(counts, bins, said, ids, (2**63,), 0.9)
    frozen = counts.copy()
    frozen.setflags(write=False)
    with pytest.raises((ValueError, BufferError), match=r"read-only|not writable"):
        native.count(frozen, bins, said, ids, (1,), 0.9)
    assert not counts.any()


def test_a_missing_core_is_an_error_where_it_was_asked_for_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = reference.build_tree(ROUNDS_TO_TIES, ROOT, 13)
    expected = native.ancestor_mask(tree)
    monkeypatch.setattr(native, "AVAILABLE", False)
    with pytest.raises(BackendError, match="Install a C compiler and reinstall"):
        native.build_tree(ROUNDS_TO_TIES, ROOT, 13)
    with pytest.raises(BackendError, match="Install a C compiler and reinstall"):
        native.ancestor_mask(tree)
    said, bins = np.zeros((1, 2), np.float32), np.log([[0.1, 0.9], [0.5, 1.0]])
    with pytest.raises(BackendError, match="Install a C compiler and reinstall"):
        native.worth(np.zeros((1, 6)), bins, said, 3.0, 1.5)
    with pytest.raises(BackendError, match="Install a C compiler and reinstall"):
        native.count(np.zeros((1, 6)), bins, said, np.zeros((1, 2), np.int64), (1,), 0.9)
    assert (geometry.ancestor_mask(tree) == expected).all()


def test_without_the_core_the_reference_builds_and_doctor_has_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The modules are imported afresh, with an import of the core that fails."""
    monkeypatch.setitem(sys.modules, "ddtree.tree._native", None)
    for name in ("native", "host", "geometry"):
        monkeypatch.delitem(sys.modules, f"ddtree.tree.{name}")
        monkeypatch.delattr(ddtree.tree, name)
    monkeypatch.delattr(ddtree.tree, "_native")
    fresh = {name: import_module(f"ddtree.tree.{name}") for name in ("native", "host", "geometry")}
    assert fresh["native"] is not native
    assert not fresh["native"].AVAILABLE
    assert fresh["host"].build_tree is reference.build_tree
    assert fresh["host"].describe() == (
        "pure Python: no compiled core; install a C compiler and reinstall"
    )
    tree = fresh["host"].build_tree(ROUNDS_TO_TIES, ROOT, 13)
    assert (fresh["geometry"].ancestor_mask(tree) == native.ancestor_mask(tree)).all()
    monkeypatch.delitem(sys.modules, "ddtree.sampling.calibration")
    monkeypatch.delattr(ddtree.sampling, "calibration")
    assert import_module("ddtree.sampling.calibration")._worth is worth.worth
