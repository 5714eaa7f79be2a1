"""The batched builder against the reference, request by request, and what it promises a device."""

import dataclasses
import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddtree.errors import MarginalsError
from ddtree.tree import batched
from ddtree.tree.batched import BatchedTrees, build_trees, expand_ancestors
from ddtree.tree.geometry import ancestor_mask
from ddtree.tree.reference import build_tree
from ddtree.types import DraftTree, Marginals, Transitions
from tests.unit.tree.test_reference import (
    ALL_SURE,
    ALL_TIES,
    LONG_CHAIN,
    ROUNDS_TO_TIES,
    assert_same,
    marginals_of,
    row_of,
)

INF = math.inf
LOWEST = torch.finfo(torch.float32).min
Inputs = tuple[Tensor, Tensor, Tensor]


def batch_of(requests: Sequence[Marginals]) -> Inputs:
    return (
        torch.stack([request.log_probs for request in requests]),
        torch.stack([request.token_ids for request in requests]),
        99 - torch.arange(len(requests)),
    )


def random_batch(num_requests: int, num_depths: int, num_ranks: int, dtype: torch.dtype) -> Inputs:
    generator = torch.Generator().manual_seed(num_ranks)
    logits = 3 * torch.randn(num_requests, num_depths, 2 * num_ranks, generator=generator)
    # Of bfloat16 logits many are equal.
    log_probs = logits.to(dtype).float().log_softmax(-1).clamp(max=0)
    best = torch.topk(log_probs, num_ranks)
    return best.values, best.indices, torch.arange(num_requests)


def random_first_order_batch(
    num_requests: int, num_depths: int, num_ranks: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Transitions]:
    generator = torch.Generator().manual_seed(num_ranks)
    shape = num_requests, num_depths - 1, num_ranks, num_ranks
    logits = 3 * torch.randn(shape, generator=generator)
    log_probs = logits.to(dtype).float().log_softmax(-1).clamp(max=0)
    behind = log_probs.sort(dim=-1, descending=True)
    transitions = Transitions(behind.values, behind.indices)
    return *random_batch(num_requests, num_depths, num_ranks, dtype), transitions


RANDOM_BATCHES = [random_batch, random_first_order_batch]


def references(inputs: Inputs, budget: int) -> list[DraftTree]:
    return [
        build_tree(Marginals(log_probs, token_ids), int(root_id), budget)
        for log_probs, token_ids, root_id in zip(*inputs, strict=True)
    ]


def assert_equal_to_reference(inputs: Inputs, budget: int) -> None:
    trees = build_trees(*inputs, budget)
    assert trees.valid.all()
    for request, expected in enumerate(references(inputs, budget)):
        assert_same(trees.tree(request), expected)


def assert_same_batch(actual: BatchedTrees, expected: BatchedTrees) -> None:
    for field in dataclasses.fields(BatchedTrees):
        a, b = getattr(actual, field.name), getattr(expected, field.name)
        assert a.dtype == b.dtype
        assert torch.equal(a, b), field.name


@st.composite
def batches(draw: st.DrawFn) -> Inputs:
    num_requests = draw(st.integers(1, 3))
    num_depths, num_ranks = draw(
        st.sampled_from([(1, 1), (1, 5), (2, 1), (2, 3), (3, 2), (3, 12), (4, 5), (5, 3), (9, 1)])
    )
    requests = []
    for _ in range(num_requests):
        rows = [draw(row_of(num_ranks)) for _ in range(num_depths)]
        token_ids = [draw(st.permutations(range(num_ranks))) for _ in range(num_depths)]
        requests.append(marginals_of(rows, [list(ids) for ids in token_ids]))
    return batch_of(requests)


# Everything is legal and nothing follows: the root alone.
ALL_BANNED = marginals_of([[-INF] * 3] * 3)
OVERFLOWS = marginals_of([[0.0, LOWEST, LOWEST], [-1.0, LOWEST, -INF], [LOWEST] * 3])
ZEROS_OF_BOTH_SIGNS = marginals_of([[-0.0, 0.0, -0.0], [0.0, -0.0, 0.0], [-0.0, -0.0, -1.0]])
SUBNORMAL = marginals_of([[-1e-44, -3e-44, -1e-40]] * 3)


@given(batches(), st.integers(0, 70))
@settings(max_examples=100)
@example(batch_of([ALL_TIES, ALL_BANNED, OVERFLOWS, ZEROS_OF_BOTH_SIGNS, SUBNORMAL]), 0)
@example(batch_of([ALL_TIES, ALL_BANNED, OVERFLOWS, ZEROS_OF_BOTH_SIGNS, SUBNORMAL]), 1)
@example(batch_of([ALL_TIES, ALL_BANNED, OVERFLOWS, ZEROS_OF_BOTH_SIGNS, SUBNORMAL]), 7)
@example(batch_of([ALL_TIES, ALL_BANNED, OVERFLOWS, ZEROS_OF_BOTH_SIGNS, SUBNORMAL]), 64)
@example(batch_of([ALL_SURE]), 29)
@example(batch_of([ROUNDS_TO_TIES, ROUNDS_TO_TIES]), 13)
@example(batch_of([LONG_CHAIN]), 4)
def test_every_request_equals_the_reference_node_for_node(inputs: Inputs, budget: int) -> None:
    assert_equal_to_reference(inputs, budget)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("num_depths", "num_ranks", "budget"),
    [(15, 16, 16), (15, 64, 64), (15, 8, 130), (7, 256, 256), (1, 40, 16), (3, 4, 200)],
)
def test_trees_of_real_sizes_equal_the_reference(
    num_depths: int, num_ranks: int, budget: int, dtype: torch.dtype
) -> None:
    assert_equal_to_reference(random_batch(2, num_depths, num_ranks, dtype), budget)


@given(batches(), st.integers(0, 70))
@settings(max_examples=30)
def test_padding_looks_like_the_root_and_is_its_own_parent(inputs: Inputs, budget: int) -> None:
    trees = build_trees(*inputs, budget)
    for request, num_rows in enumerate(trees.num_rows.tolist()):
        padding = torch.arange(num_rows, budget + 1)
        assert trees.parents[request, num_rows:].tolist() == padding.tolist()
        assert (trees.token_ids[request, num_rows:] == inputs[2][request]).all()
        assert (trees.depths[request, num_rows:] == 0).all()
        assert (trees.ranks[request, num_rows:] == -1).all()
        assert (trees.log_probs[request, num_rows:] == -INF).all()
        mask = expand_ancestors(trees.ancestor_words)[request]
        assert torch.equal(mask[num_rows:], torch.eye(budget + 1, dtype=torch.bool)[num_rows:])
    assert (trees.parents[:, 1:] >= 0).all()
    assert (trees.parents <= torch.arange(budget + 1)).all()


@given(batches(), st.integers(0, 70))
@settings(max_examples=30)
def test_expanded_words_are_the_ancestor_mask(inputs: Inputs, budget: int) -> None:
    trees = build_trees(*inputs, budget)
    mask = expand_ancestors(trees.ancestor_words)
    assert mask.shape == (len(inputs[0]), budget + 1, budget + 1)
    for request in range(len(inputs[0])):
        tree = trees.tree(request)
        rows = slice(0, tree.num_rows)
        assert np.array_equal(mask[request, rows, rows].numpy(), ancestor_mask(tree))
        assert not mask[request, rows, tree.num_rows :].any()


@pytest.mark.parametrize("budget", [62, 63, 64, 127, 128])
@pytest.mark.parametrize("num_ranks", [1, 9])
def test_words_are_full_up_to_their_sign_bit(num_ranks: int, budget: int) -> None:
    # With one rank, a chain as deep as the budget: every bit of every word is used.
    num_depths = 130 if num_ranks == 1 else 15
    trees = build_trees(*random_batch(1, num_depths, num_ranks, torch.float32), budget)
    assert trees.ancestor_words.shape == (1, budget + 1, budget // 64 + 1)
    mask = expand_ancestors(trees.ancestor_words)[0]
    assert np.array_equal(mask.numpy(), ancestor_mask(trees.tree(0)))


def test_attention_over_padding_is_finite_without_a_context() -> None:
    trees = build_trees(*batch_of([ALL_BANNED, ALL_TIES]), 9)
    mask = expand_ancestors(trees.ancestor_words)
    weights = torch.zeros(mask.shape).masked_fill(~mask, -INF).softmax(dim=-1)
    assert weights.isfinite().all()


ROWS = [[-0.5, -1.0, -2.0]] * 3


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize(
    "bad",
    [
        [math.nan, -1.0, -2.0],
        [-0.5, -1.0, math.nan],
        [1e-6, -1.0, -2.0],
        [INF, -1.0, -2.0],
        [-1.0, -0.5, -2.0],
        [-0.5, -INF, -2.0],
    ],
)
def test_illegal_marginals_give_the_root_alone_and_leave_their_neighbours(
    bad: list[float], depth: int
) -> None:
    rows = [list(row) for row in ROWS]
    rows[depth] = bad
    good = marginals_of(ROWS)
    inputs = batch_of([good, marginals_of(rows), good])
    trees = build_trees(*inputs, 6)
    assert trees.valid.tolist() == [True, False, True]
    assert trees.num_rows.tolist() == [7, 1, 7]
    assert_same(trees.tree(0), build_tree(good, 99, 6))
    assert_same(trees.tree(2), build_tree(good, 97, 6))
    assert torch.equal(expand_ancestors(trees.ancestor_words)[1], torch.eye(7, dtype=torch.bool))
    with pytest.raises(MarginalsError, match="request 1"):
        trees.tree(1)
    with pytest.raises(MarginalsError, match=f"depth {depth + 1}"):
        build_tree(marginals_of(rows), 98, 6)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("shape", [(2, 3, 4, 4), (2, 2, 4, 3), (1, 2, 4, 4), (2, 4, 4)])
def test_mismatched_transitions_are_an_error_that_tells_all(shape: tuple[int, ...]) -> None:
    inputs = random_batch(2, 3, 4, torch.float32)
    behind = Transitions(torch.zeros(shape), torch.zeros((2, 2, 4, 4), dtype=torch.int64))
    with pytest.raises(
        MarginalsError, match=r"\[R, L - 1, K, K\], got .*, \(2, 2, 4, 4\)"
    ) as error:
        build_trees(*inputs, 5, behind)
    assert str(shape) in str(error.value)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("ids_shape", "roots_shape"), [((2, 3, 5), (2,)), ((2, 3, 4), (1,)), ((2, 3, 4), (2, 1))]
)
def test_mismatched_shapes_are_an_error_that_tells_all(
    ids_shape: tuple[int, ...], roots_shape: tuple[int, ...]
) -> None:
    with pytest.raises(MarginalsError, match=r"root_ids \[R\], got \(2, 3, 4\)") as error:
        build_trees(
            torch.zeros(2, 3, 4),
            torch.zeros(ids_shape, dtype=torch.int64),
            torch.zeros(roots_shape, dtype=torch.int64),
            5,
        )
    assert str(ids_shape) in str(error.value)
    assert str(roots_shape) in str(error.value)


def test_a_copied_tree_does_not_share_memory_with_the_batch() -> None:
    trees = build_trees(*batch_of([ALL_TIES]), 3)
    trees.tree(0).token_ids[0] = 1
    assert trees.token_ids[0, 0] == 99


def build_and_expand(
    inputs: Sequence[Tensor | Transitions], budget: int, module: ModuleType = batched
) -> tuple[BatchedTrees, Tensor]:
    log_probs, token_ids, root_ids, *transitions = inputs
    trees = module.build_trees(log_probs, token_ids, root_ids, budget, *transitions)
    return trees, module.expand_ancestors(trees.ancestor_words)


def moved(
    inputs: Sequence[Tensor | Transitions], move: Callable[[Tensor], Tensor]
) -> list[Tensor | Transitions]:
    return [
        Transitions(move(part.log_probs), move(part.ranks))
        if isinstance(part, Transitions)
        else move(part)
        for part in inputs
    ]


@pytest.mark.parametrize("random", RANDOM_BATCHES)
def test_no_value_is_read_and_no_shape_depends_on_one(random) -> None:
    # A fake tensor has no values: reading one, or a shape that depends on one, raises.
    inputs = random(2, 4, 6, torch.float32)
    for budget in (0, 6, 70):
        real = build_and_expand(inputs, budget)
        with FakeTensorMode() as mode:
            fake = build_and_expand(moved(inputs, mode.from_tensor), budget)
        for field in dataclasses.fields(BatchedTrees):
            a, b = getattr(fake[0], field.name), getattr(real[0], field.name)
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert fake[1].shape == real[1].shape


def test_tracing_first_leaves_no_fake_constants_behind() -> None:
    inputs = random_batch(1, 3, 5, torch.float32)
    with FakeTensorMode() as mode:
        build_trees(*(mode.from_tensor(tensor) for tensor in inputs), 11)
    assert_equal_to_reference(inputs, 11)


class OnlyMeta(TorchDispatchMode):
    """Fails where an operation reads or makes a tensor on another device: a copy, or a wait."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, out)):
            assert not isinstance(tensor, Tensor) or tensor.is_meta, func
        return out


@pytest.mark.parametrize("random", RANDOM_BATCHES)
def test_all_work_is_on_the_device_of_the_input(random) -> None:
    inputs = moved(random(2, 4, 6, torch.float32), lambda tensor: tensor.to("meta"))
    build_and_expand(inputs, 70)  # the first call brings the index lists there
    with OnlyMeta():
        trees, mask = build_and_expand(inputs, 70)
    assert trees.token_ids.shape == (2, 71)
    assert mask.shape == (2, 71, 71)


@pytest.fixture
def as_users_import_it(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module without the checks of tests/conftest.py, which torch.compile cannot trace."""
    spec = importlib.util.spec_from_file_location("plain_batched", batched.__file__)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "plain_batched", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("random", RANDOM_BATCHES)
def test_the_whole_builder_compiles_into_one_graph(random, as_users_import_it: ModuleType) -> None:
    def build(*inputs: Tensor | Transitions, budget: int) -> tuple[object, Tensor]:
        return build_and_expand(inputs, budget, as_users_import_it)

    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(build, fullgraph=True, backend=backend)
    # Sizes and budgets that change are where torch.compile turns to symbols.
    for num_ranks, budget in ((3, 3), (5, 6)):
        graphs.clear()
        for dtype in (torch.bfloat16, torch.float32):
            inputs = random(2, 2, num_ranks, dtype)
            actual = compiled(*inputs, budget=budget)
            expected = build_and_expand(inputs, budget)
            assert_same_batch(actual[0], expected[0])
            assert torch.equal(actual[1], expected[1])
        assert len(graphs) == 1


def test_what_inference_mode_remembers_serves_inputs_with_gradients() -> None:
    log_probs, token_ids, root_ids = random_batch(1, 3, 4, torch.float32)
    with torch.inference_mode():
        build_trees(log_probs, token_ids, root_ids, 12)
    trees = build_trees(log_probs.requires_grad_(), token_ids, root_ids, 12)
    assert not trees.log_probs.requires_grad
