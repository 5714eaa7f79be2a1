"""The device's walk, moves and order against plain Python and against the host's own."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddtree.serving import device_steps
from ddtree.serving.device_steps import WalkedRows, move_rows, path_order, walk_rows
from ddtree.serving.step import Step, walk_tree
from ddtree.types import DraftTree

# Few tokens, so that the target's choices are often in the tree.
VOCABULARY = 5


@st.composite
def trees(draw: st.DrawFn, *, most_rows: int = 12) -> DraftTree:
    """Any tree whose parents come first and whose siblings differ."""
    num_rows = draw(st.integers(1, most_rows))
    token_ids, parents, depths = [0], [-1], [0]
    for row in range(1, num_rows):
        taken = set(zip(parents, token_ids, strict=True))
        free = [(p, t) for p in range(row) for t in range(VOCABULARY) if (p, t) not in taken]
        parent, token = draw(st.sampled_from(free))
        token_ids.append(token)
        parents.append(parent)
        depths.append(depths[parent] + 1)
    zeros = np.zeros(num_rows)
    return DraftTree(
        np.array(token_ids, np.int64),
        np.array(parents, np.int32),
        np.array(depths, np.int32),
        zeros.astype(np.int32),
        zeros.astype(np.float32),
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[DraftTree], list[list[int]]]:
    """Trees, and what the target says at each of their rows."""
    drawn = draw(st.lists(trees(), min_size=1, max_size=4))
    tokens = st.integers(0, VOCABULARY - 1)
    said = [draw(st.lists(tokens, min_size=t.num_rows, max_size=t.num_rows)) for t in drawn]
    return drawn, said


def padded(rows: Sequence[Sequence[int]], width: int, filler: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor([[*row, *[filler] * (width - len(row))] for row in rows], dtype=dtype)


def inputs_of(
    drawn: Sequence[DraftTree], said: Sequence[Sequence[int]], padding: int = 3
) -> tuple[Tensor, ...]:
    """What `walk_rows` takes, with padding that would be walked if it were looked at."""
    width = max(tree.num_rows for tree in drawn) + padding
    return (
        padded(said, width, 1, torch.int64),
        padded([tree.token_ids.tolist() for tree in drawn], width, 1, torch.int64),
        padded([tree.parents.tolist() for tree in drawn], width, 0, torch.int32),
        torch.tensor([tree.num_rows for tree in drawn], dtype=torch.int32),
    )


def walked_in_python(tree: DraftTree, said: Sequence[int]) -> tuple[list[int], list[int]]:
    row, path, tokens = 0, [0], [said[0]]
    while True:
        below = [
            child
            for child in range(1, tree.num_rows)
            if tree.parents[child] == row and tree.token_ids[child] == tokens[-1]
        ]
        if not below:
            return path, tokens
        (row,) = below
        path.append(row)
        tokens.append(said[row])


@given(batches())
def test_the_walk_goes_where_the_target_says(batch) -> None:
    drawn, said = batch
    inputs = inputs_of(drawn, said)
    width = inputs[0].shape[1]
    deepest = max(int(tree.depths.max()) for tree in drawn)
    for max_depth in (deepest, width - 1, width + 7):
        walked = walk_rows(*inputs, max_depth=max_depth)
        for i, tree in enumerate(drawn):
            path, tokens = walked_in_python(tree, said[i])
            assert walked.path[i].tolist() == path + [0] * (width - len(path))
            assert walked.num_accepted[i] == len(path) - 1
            assert walked.token_ids[i].tolist() == tokens + [-1] * (width - len(tokens))


@given(batches())
def test_it_is_the_walk_of_the_host(batch) -> None:
    drawn, said = batch
    walked = walk_rows(*inputs_of(drawn, said), max_depth=99)
    for i, tree in enumerate(drawn):
        walk = walk_tree(tree, said[i])
        count = len(walk.path) + 1
        assert walked.path[i, :count].tolist() == [0, *walk.path]
        assert walked.token_ids[i, :count].tolist() == list(walk.token_ids)
        assert walked.num_accepted[i] + 1 == count


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 64, 65])
def test_a_chain_is_walked_as_far_as_it_is_right(num_rows: int) -> None:
    rows = torch.arange(num_rows)
    parents = (rows - 1).to(torch.int32)[None]
    for right in range(num_rows):
        chosen = rows + 1
        chosen[right] = 999
        walked = walk_rows(
            chosen[None],
            rows[None],
            parents,
            torch.tensor([num_rows], dtype=torch.int32),
            max_depth=num_rows - 1,
        )
        assert walked.num_accepted.tolist() == [right]
        assert walked.token_ids[0, right] == 999
        assert walked.path[0, : right + 1].tolist() == list(range(right + 1))


def test_a_request_without_rows_says_nothing() -> None:
    walked = walk_rows(
        torch.tensor([[1, 1], [1, 1]]),
        torch.tensor([[0, 1], [0, 1]]),
        torch.tensor([[-1, 0], [-1, 0]], dtype=torch.int32),
        torch.tensor([0, 2], dtype=torch.int32),
        max_depth=1,
    )
    assert walked.token_ids.tolist() == [[-1, -1], [1, 1]]
    assert walked.num_accepted.tolist() == [0, 1]
    assert walked.path.tolist() == [[0, 0], [0, 1]]


@given(batches(), st.randoms(use_true_random=False))
def test_the_order_is_a_permutation_with_the_path_in_front(batch, random) -> None:
    drawn, said = batch
    walked = walk_rows(*inputs_of(drawn, said), max_depth=99)
    starts, total = [], 0
    for tree in drawn:
        total += random.randrange(3)  # rows of requests without trees
        starts.append(total)
        total += tree.num_rows
    total += random.randrange(3)
    order = order_of(walked, starts, drawn, total)
    assert sorted(order) == list(range(total))
    elsewhere = set(range(total))
    for start, tree, path, accepted in zip(
        starts, drawn, walked.path.tolist(), walked.num_accepted.tolist(), strict=True
    ):
        rows = order[start : start + tree.num_rows]
        elsewhere -= set(range(start, start + tree.num_rows))
        front = [start + row for row in path[: accepted + 1]]
        assert rows[: accepted + 1] == front
        assert rows[accepted + 1 :] == sorted(set(rows) - set(front))
    assert all(order[row] == row for row in elsewhere)


def order_of(
    walked: WalkedRows, starts: Sequence[int], drawn: Sequence[DraftTree], total: int
) -> list[int]:
    counts = torch.tensor([tree.num_rows for tree in drawn], dtype=torch.int32)
    begins = torch.tensor(starts, dtype=torch.int32)
    return path_order(walked.path, walked.num_accepted, begins, counts, total).tolist()


@given(batches())
def test_it_is_the_order_of_the_host(batch) -> None:
    drawn, said = batch
    counts = [tree.num_rows for tree in drawn]
    starts = np.cumsum([2, *counts[:-1]], dtype=np.int64)
    total = int(starts[-1]) + counts[-1]
    step = Step(tuple(drawn), starts, starts, num_rows=total, decoding=())
    walks = [walk_tree(tree, tokens) for tree, tokens in zip(drawn, said, strict=True)]
    walked = walk_rows(*inputs_of(drawn, said), max_depth=99)
    assert order_of(walked, starts.tolist(), drawn, total) == step.order(walks).tolist()


def test_requests_of_no_rows_leave_the_order_alone() -> None:
    zeros = torch.zeros(2, dtype=torch.int32)
    order = path_order(torch.zeros((2, 3), dtype=torch.int32), zeros, zeros, zeros, 4)
    assert order.tolist() == [0, 1, 2, 3]


def caches(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Of 4 blocks of 3 positions, 2 heads and 5 numbers, in the layouts that engines have."""
    numbers = torch.arange(4 * 3 * 2 * 5, dtype=dtype)
    both = torch.arange(4 * 2 * 3 * 10, dtype=dtype).view(4, 2, 3, 10)
    return {
        "token-major": numbers.view(4, 3, 2, 5),
        "head-major": numbers.view(4, 2, 3, 5).transpose(1, 2),
        "values beside keys": both.transpose(1, 2)[..., 5:],
        "both at once": both.transpose(1, 2),
    }


@given(
    st.sampled_from(list(caches())),
    st.lists(st.tuples(st.integers(0, 11), st.booleans()), max_size=12),
    st.permutations(range(12)),
)
def test_rows_are_read_before_any_is_written(layout: str, moves, targets) -> None:
    cache = caches()[layout]
    expected = cache.clone()
    for (source, valid), target in zip(moves, targets, strict=False):
        if valid:
            expected[target // 3, target % 3] = cache[source // 3, source % 3]
    move_rows(
        cache,
        torch.tensor([source for source, _ in moves], dtype=torch.int64),
        torch.tensor(targets[: len(moves)], dtype=torch.int64),
        torch.tensor([valid for _, valid in moves], dtype=torch.bool),
    )
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("where", [-1, 10**6, 7])
def test_slots_of_rows_that_do_not_move_may_be_anything(where: int) -> None:
    cache = caches()["head-major"]
    expected = cache.clone()
    expected[2, 1] = cache[0, 2]
    valid = torch.tensor([False, True, False])
    targets = torch.tensor([7, 7, where])
    move_rows(cache, torch.tensor([where, 2, 1]), targets, valid)
    assert torch.equal(cache, expected)
    move_rows(cache, torch.tensor([where] * 3), torch.tensor([where, 7, 7]), valid & False)
    assert torch.equal(cache, expected)


BATCH = (
    torch.tensor([[7, 9, 4, 0], [1, 2, 3, 0]]),
    torch.tensor([[5, 8, 7, 0], [0, 1, 2, 0]]),
    torch.tensor([[-1, 0, 0, 3], [-1, 0, 1, 3]], dtype=torch.int32),
    torch.tensor([3, 3], dtype=torch.int32),
)


def all_steps(module: ModuleType, cache: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """A round's end, from the target's choices to the order of the step's rows."""
    walked = module.walk_rows(*inputs, max_depth=3)
    starts = 4 * torch.arange(inputs[3].shape[0], dtype=torch.int32, device=cache.device)
    order = module.path_order(walked.path, walked.num_accepted, starts, inputs[3], 9)
    steps = torch.arange(walked.path.shape[1], device=cache.device)
    sources = (starts[:, None] + walked.path).to(torch.int64)
    targets = starts[:, None] + steps
    valid = steps <= walked.num_accepted[:, None]
    module.move_rows(cache, sources.flatten(), targets.flatten(), valid.flatten())
    return walked.path, walked.num_accepted, walked.token_ids, order, cache


def test_no_value_is_read_and_no_shape_depends_on_one() -> None:
    real = all_steps(device_steps, caches()["head-major"], *BATCH)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in (caches()["head-major"], *BATCH)]
        fake = all_steps(device_steps, *fakes)
    assert [(t.shape, t.dtype) for t in fake] == [(t.shape, t.dtype) for t in real]


class OnlyMeta(TorchDispatchMode):
    """Fails where an operation reads or makes a tensor on another device: a copy, or a wait."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, out)):
            assert not isinstance(tensor, Tensor) or tensor.is_meta, func
        return out


def test_all_work_is_on_the_device_of_the_input() -> None:
    cache = torch.empty((4, 2, 3, 5), device="meta").transpose(1, 2)
    inputs = [tensor.to("meta") for tensor in BATCH]
    with OnlyMeta():
        all_steps(device_steps, cache, *inputs)


@pytest.fixture
def as_users_import_it(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module without the checks of tests/conftest.py, which torch.compile cannot trace."""
    spec = importlib.util.spec_from_file_location("plain_steps", device_steps.__file__)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "plain_steps", module)
    spec.loader.exec_module(module)
    return module


def test_a_rounds_end_compiles_into_one_graph(as_users_import_it: ModuleType) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph

    compiled = torch.compile(all_steps, fullgraph=True, backend=backend)
    for choices in (BATCH[0], BATCH[0] * 0, BATCH[0].flip(0)):
        inputs = (choices, *BATCH[1:])
        expected = all_steps(device_steps, caches()["head-major"], *inputs)
        actual = compiled(as_users_import_it, caches()["head-major"], *inputs)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert len(graphs) == 1
