"""One step's rows: which tree they are, where they stand, and where accepted rows belong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ddtree.serving.step import (
    WORD_BITS,
    Step,
    ancestor_words,
    chain_of,
    is_chain,
    scheduled_tree,
    walk_tree,
)
from ddtree.serving.tree_rows import TreeRows
from ddtree.stopping import TextStopping
from ddtree.tree.chain import build_chain
from ddtree.tree.geometry import ancestor_mask
from ddtree.types import DraftTree, Marginals, Walk
from ddtree.walk import walk

# Few tokens, so that the target's choices are often in the tree.
VOCABULARY = 4
# Blocks of a request's table.
NUM_BLOCKS = 5


def tree_of(parents: Sequence[int], token_ids: Sequence[int]) -> DraftTree:
    """Node i scores -i, so that no two trees are alike by chance."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    num_rows = len(parents)
    return DraftTree(
        np.array(token_ids, np.int64),
        np.array(parents, np.int32),
        np.array(depths, np.int32),
        np.array([-1] + [0] * (num_rows - 1), np.int32),
        -np.arange(num_rows, dtype=np.float32),
    )


# A branch of two nodes and one of three: 1, 3 and 2, 4, 5.
FORKED = tree_of([-1, 0, 0, 1, 2, 4], [9, 10, 20, 11, 21, 22])


def any_tree(random: Random) -> DraftTree:
    """Up to 11 rows whose parents come first; siblings differ in their tokens, cousins need not."""
    parents, token_ids, taken = [-1], [0], set[tuple[int, int]]()
    for _ in range(random.randrange(11)):
        place = random.randrange(len(parents)), random.randrange(VOCABULARY)
        if place not in taken:
            taken.add(place)
            parents.append(place[0])
            token_ids.append(place[1])
    return tree_of(parents, token_ids)


def random_tree(num_rows: int, seed: int) -> DraftTree:
    rng = np.random.default_rng([num_rows, seed])
    return tree_of([-1, *(int(rng.integers(node)) for node in range(1, num_rows))], range(num_rows))


def same(one: DraftTree, other: DraftTree) -> bool:
    return (
        np.array_equal(one.token_ids, other.token_ids)
        and np.array_equal(one.parents, other.parents)
        and np.array_equal(one.depths, other.depths)
        and np.array_equal(one.ranks, other.ranks)
        and np.array_equal(one.log_probs, other.log_probs)
    )


@dataclass(frozen=True)
class Placed:
    """A request of a step.

    Args:
        tree: its rows with logits.
        root_position: of its root.
        rows_before: of its prompt in the same step.
    """

    tree: DraftTree
    root_position: int
    rows_before: int = 0

    @property
    def branches(self) -> bool:
        return any(parent != node - 1 for node, parent in enumerate(self.tree.parents.tolist()))


def step_of(placed: Sequence[Placed]) -> Step:
    root_rows, num_rows = [], 0
    for one in placed:
        root_rows.append(num_rows + one.rows_before)
        num_rows += one.rows_before + one.tree.num_rows
    return Step(
        trees=tuple(one.tree for one in placed),
        root_rows=np.array(root_rows, np.int64),
        root_positions=np.array([one.root_position for one in placed], np.int64),
        num_rows=num_rows,
        decoding=tuple(i for i, one in enumerate(placed) if one.rows_before == 0),
    )


def owners(placed: Sequence[Placed]) -> list[tuple[int, int]]:
    """Request and node of every row of the step; the nodes of prompt rows are below 0."""
    return [
        (i, node)
        for i, one in enumerate(placed)
        for node in range(-one.rows_before, one.tree.num_rows)
    ]


def any_placement(random: Random) -> Placed:
    """A tree, a chain, or a chunk of a prompt."""
    kind, position = random.choice("ttcp"), random.randrange(40)
    if kind == "t":
        return Placed(any_tree(random), position)
    if kind == "p":
        return Placed(chain_of(0, ()), position, rows_before=random.randrange(1, 6))
    return Placed(chain_of(0, random.choices(range(VOCABULARY), k=random.randrange(5))), position)


def said_at(tree: DraftTree, random: Random) -> list[int]:
    """What the target says at each row: mostly a token that is proposed behind it."""
    said = []
    for row in range(tree.num_rows):
        below = tree.token_ids[tree.parents == row].tolist()
        likely = below if random.random() < 0.8 else ()
        said.append(random.choice(likely or range(VOCABULARY)))
    return said


@dataclass(frozen=True)
class Walked:
    """A step of some requests, what the target says at the rows of each, and what that means."""

    placed: list[Placed]
    said: list[list[int]]

    @cached_property
    def step(self) -> Step:
        return step_of(self.placed)

    @cached_property
    def walks(self) -> list[Walk]:
        each = zip(self.placed, self.said, strict=True)
        return [walked_naively(one.tree, of_one) for one, of_one in each]


def any_walked(random: Random) -> Walked:
    placed = [any_placement(random) for _ in range(random.randrange(1, 5))]
    return Walked(placed, [said_at(one.tree, random) for one in placed])


# Drawn as a whole, and in the test: hypothesis would take its time over every node, and wants
# nothing random in a strategy, such as the choice of what is checked of an annotation.
SEEDS = st.integers(0, 2**40).map(Random)


def walked_naively(tree: DraftTree, said: Sequence[int]) -> Walk:
    """By looking at every row each time."""
    row, path, token_ids = 0, [], [said[0]]
    while True:
        below = [
            child
            for child in range(1, tree.num_rows)
            if tree.parents[child] == row and tree.token_ids[child] == token_ids[-1]
        ]
        if not below:
            return Walk(path=tuple(path), token_ids=tuple(token_ids), finish_reason=None)
        (row,) = below
        path.append(row)
        token_ids.append(said[row])


# Which tree the scheduled tokens are --------------------------------------------------------------


@given(SEEDS)
def test_whatever_is_cut_off_at_the_end_the_rest_is_the_tree_of_its_first_nodes(
    random: Random,
) -> None:
    drafted = any_tree(random)
    root_id, *token_ids = drafted.token_ids.tolist()
    for num_nodes in range(drafted.num_rows):
        found = scheduled_tree(drafted, root_id, token_ids[:num_nodes])
        assert same(found, drafted.first(num_nodes))
        assert found.num_nodes == num_nodes


@pytest.mark.parametrize(
    ("drafted", "root_id", "token_ids"),
    [
        (None, 9, (10, 20, 11)),
        (FORKED, 8, (10, 20, 11)),  # behind another root
        (FORKED, 9, (10, 20, 12)),
        (FORKED, 9, (7, 20, 11)),
        (FORKED, 9, (20, 10)),  # the same tokens in another order
        (FORKED, 9, (11,)),  # not its first tokens
        (FORKED, 9, (10, 20, 11, 21, 22, 23)),  # more than were proposed
        (DraftTree.root_only(9), 9, (10,)),
        (FORKED, 8, ()),
        (None, 9, ()),
    ],
)
def test_tokens_that_are_not_of_the_proposal_are_a_chain(
    drafted: DraftTree | None, root_id: int, token_ids: tuple[int, ...]
) -> None:
    found = scheduled_tree(drafted, root_id, token_ids)
    assert same(found, chain_of(root_id, token_ids))
    assert is_chain(found)


@pytest.mark.parametrize("sequence", [list, tuple])
def test_scheduled_tokens_may_be_any_sequence(sequence: Callable[..., Sequence[int]]) -> None:
    assert same(scheduled_tree(FORKED, 9, sequence((10, 20, 11))), FORKED.first(3))


def test_a_proposal_without_nodes_is_its_root() -> None:
    assert same(scheduled_tree(FORKED, 9, ()), DraftTree.root_only(9))


@pytest.mark.parametrize("token_ids", [(), (7,), (7, 8, 7)])
def test_a_chain_of_tokens_has_the_shape_that_the_chain_builder_makes(
    token_ids: tuple[int, ...],
) -> None:
    sure = Marginals(
        torch.zeros(max(len(token_ids), 1), 1), torch.tensor([*token_ids] or [0])[:, None]
    )
    assert same(chain_of(5, token_ids), build_chain(sure, 5, len(token_ids)))


@given(SEEDS)
def test_a_chain_is_a_tree_whose_every_parent_is_the_node_before(random: Random) -> None:
    tree = any_tree(random)
    assert is_chain(tree) == (not Placed(tree, 0).branches)


# Where the rows are -------------------------------------------------------------------------------


@given(SEEDS)
def test_logits_are_laid_out_one_request_behind_the_other(random: Random) -> None:
    drawn = any_walked(random)
    starts, num_logits = [], 0
    for one in drawn.placed:
        starts.append(num_logits)
        num_logits += one.tree.num_rows
    assert drawn.step.logit_starts.tolist() == [*starts, num_logits]


@given(SEEDS)
def test_branching_rows_are_those_of_trees_that_are_no_chains(random: Random) -> None:
    drawn = any_walked(random)
    placed, step = drawn.placed, drawn.step
    assert list(step.branching) == [i for i, one in enumerate(placed) if one.branches]
    assert step.branching_rows.tolist() == [
        row for row, (i, _) in enumerate(owners(placed)) if placed[i].branches
    ]


@given(SEEDS)
def test_a_row_stands_behind_as_many_positions_as_it_has_ancestors(random: Random) -> None:
    drawn = any_walked(random)
    placed, depths, places = drawn.placed, [], []
    for i, node in owners(placed):
        if placed[i].branches:
            places.append(placed[i].root_position + node)
            depth = 0
            while node > 0:
                node, depth = int(placed[i].tree.parents[node]), depth + 1
            depths.append(placed[i].root_position + depth)
    assert drawn.step.positions().tolist() == depths
    assert drawn.step.linear_positions().tolist() == places


def test_a_step_of_chains_and_prompts_needs_nothing_of_us() -> None:
    step = step_of([Placed(chain_of(1, (2, 3)), 7), Placed(chain_of(4, ()), 5, rows_before=3)])
    assert step.branching == ()
    rows = (step.branching_rows, step.positions(), step.linear_positions())
    assert all(found.shape == (0,) and found.dtype == np.int64 for found in rows)
    assert step.tree_rows(torch.zeros((2, NUM_BLOCKS), dtype=torch.int32), "cpu") is None
    assert step.moves(step.walk([2, 3, 4, 5])) is None


def test_a_worked_step() -> None:
    """A chunk of four prompt rows, a tree, a chain and the tree again, by hand."""
    placed = [
        Placed(chain_of(0, ()), 13, rows_before=3),
        Placed(FORKED, 100),
        Placed(chain_of(1, (2, 3)), 50),
        Placed(FORKED.first(3), 0),
    ]
    step = step_of(placed)
    assert (step.num_rows, step.root_rows.tolist()) == (17, [3, 4, 10, 13])
    assert step.logit_starts.tolist() == [0, 1, 7, 10, 14]
    assert step.branching_rows.tolist() == [4, 5, 6, 7, 8, 9, 13, 14, 15, 16]
    assert step.positions().tolist() == [100, 101, 101, 102, 102, 103, 0, 1, 1, 2]
    assert step.linear_positions().tolist() == [*range(100, 106), *range(4)]
    # The second branch down to its second node; all of the chain; the second node alone.
    walks = step.walk([7, *(20, 0, 21, 0, 23, 0), *(2, 3, 4), *(20, 0, 8, 0)])
    assert [one.path for one in walks] == [(), (2, 4), (1, 2), (2,)]
    assert [one.token_ids for one in walks] == [(7,), (20, 21, 23), (2, 3, 4), (20, 8)]
    moves = step.moves(walks)
    assert moves is not None
    assert moves.sources.tolist() == [6, 8, 15]
    assert moves.targets.tolist() == [5, 6, 14]
    order = step.order(walks).tolist()
    assert order == [*range(4), *(4, 6, 8, 5, 7, 9), *range(10, 13), *(13, 15, 14, 16)]
    assert step.walked_rows(walks, 4).tolist() == [
        [0, 0, 0, 0],
        [1, 3, 5, 1],
        [7, 8, 9, 7],
        [10, 12, 10, 10],
    ]


# Who sees whom ------------------------------------------------------------------------------------


def visible(words: Tensor) -> list[list[int]]:
    """Which bits are set in each row of words."""
    return [
        [64 * w + bit for w, word in enumerate(row) for bit in range(64) if word >> bit & 1]
        for row in words.tolist()
    ]


@pytest.mark.parametrize("num_rows", [1, 2, 5, 33, 63, 64, 65, 79, 80, 128, 129])
@pytest.mark.parametrize("num_words", [0, 1])
def test_words_have_a_bit_for_each_ancestor_and_the_row_itself(
    num_rows: int, num_words: int
) -> None:
    mask = ancestor_mask(random_tree(num_rows, seed=0))
    num_words += -(-num_rows // WORD_BITS)
    words = ancestor_words(mask, num_words)
    assert (words.dtype, words.shape) == (np.int64, (num_rows, num_words))
    assert visible(torch.from_numpy(words)) == [np.flatnonzero(row).tolist() for row in mask]


def test_the_last_bit_of_a_word_is_its_sign() -> None:
    words = ancestor_words(ancestor_mask(chain_of(0, range(64))), 2)
    assert words[63].tolist() == [-1, 0]
    assert words[64].tolist() == [-1, 1]


def block_table_of(num_requests: int) -> Tensor:
    """Blocks whose number says whose they are."""
    table = 100 * torch.arange(num_requests)[:, None] + torch.arange(NUM_BLOCKS)
    return table.to(torch.int32)


def check_tree_rows(found: TreeRows | None, placed: Sequence[Placed], table: Tensor) -> None:
    trees = [(i, one) for i, one in enumerate(placed) if one.branches]
    if not trees:
        assert found is None
        return
    assert found is not None
    first_rows = [row for row, (_, node) in enumerate(owners(placed)) if node == 0]
    index = [i for i, _ in trees]
    assert found.row_starts.tolist() == [first_rows[i] for i in index]
    assert found.num_rows.tolist() == [one.tree.num_rows for _, one in trees]
    assert found.context_lens.tolist() == [one.root_position for _, one in trees]
    assert found.block_tables.tolist() == [table[i].tolist() for i in index]
    assert found.max_rows == max(one.tree.num_rows for _, one in trees)
    assert found.max_context_len == max(one.root_position for _, one in trees)
    assert visible(found.ancestor_words) == [
        np.flatnonzero(row).tolist() for _, one in trees for row in ancestor_mask(one.tree)
    ]
    assert found.ancestor_words.shape[1] == -(-found.max_rows // WORD_BITS)
    short = (found.row_starts, found.num_rows, found.context_lens, found.block_tables)
    assert all(values.dtype == torch.int32 for values in short)
    assert found.ancestor_words.dtype == torch.int64


@given(SEEDS)
def test_attention_is_told_of_the_trees_alone(random: Random) -> None:
    drawn = any_walked(random)
    table = block_table_of(len(drawn.placed))
    check_tree_rows(drawn.step.tree_rows(table, "cpu"), drawn.placed, table)


@pytest.mark.parametrize("sizes", [(80,), (64, 3), (3, 65, 80), (80, 1, 64, 2, 7)])
def test_trees_of_more_rows_than_a_word_has_bits_are_told_alike(sizes: tuple[int, ...]) -> None:
    placed = [Placed(random_tree(n, seed), 10 * seed) for seed, n in enumerate(sizes)]
    placed.insert(1, Placed(chain_of(0, ()), 3, rows_before=2))
    table = block_table_of(len(placed))
    check_tree_rows(step_of(placed).tree_rows(table, "cpu"), placed, table)


def test_what_attention_is_told_lies_on_the_device_that_was_named() -> None:
    step, table = step_of([Placed(FORKED, 3)]), block_table_of(1).to("meta")
    found = step.tree_rows(table, torch.device("meta"))
    assert found is not None
    names = ("row_starts", "num_rows", "context_lens", "block_tables", "ancestor_words")
    assert all(getattr(found, name).is_meta for name in names)


# The walk -----------------------------------------------------------------------------------------


@given(SEEDS)
def test_each_request_is_walked_by_what_is_said_at_its_own_rows(random: Random) -> None:
    drawn = any_walked(random)
    walks = drawn.step.walk([token for of_one in drawn.said for token in of_one])
    assert list(walks) == drawn.walks


class Saying:
    """A rule that says at each row what it was told."""

    def __init__(self, said: Sequence[int]) -> None:
        self.said = said

    def chooser(self, logits_NV: Tensor) -> Callable[[int, Sequence[int]], int]:
        return lambda row, token_ids: self.said[row]


@given(SEEDS)
def test_a_walk_is_that_of_the_loop_where_nothing_ends_the_text(random: Random) -> None:
    tree = any_tree(random)
    said = said_at(tree, random)
    text = [int(tree.token_ids[0])]
    in_loop = walk(tree, torch.zeros(0, 0), Saying(said), TextStopping(99, (), None), text)
    assert walk_tree(tree, said) == in_loop


# After the walk -----------------------------------------------------------------------------------


@given(SEEDS)
def test_after_the_moves_the_slots_behind_each_root_hold_the_accepted_path(
    random: Random,
) -> None:
    drawn = any_walked(random)
    placed, step, walks = drawn.placed, drawn.step, drawn.walks
    rows = owners(placed)
    slots = random.sample(range(3 * len(rows)), len(rows))
    cache = dict(zip(slots, rows, strict=True))
    before = dict(cache)
    if (moves := step.moves(walks)) is not None:
        read = [cache[slots[row]] for row in moves.sources]
        cache.update(zip((slots[row] for row in moves.targets), read, strict=True))
        assert len(set(moves.targets.tolist())) == len(moves.targets)
        # One after another comes to the same: nothing is overwritten before it was read.
        in_order = dict(before)
        for source, target in zip(moves.sources, moves.targets, strict=True):
            in_order[slots[target]] = in_order[slots[source]]
        assert in_order == cache
    for i, (one, walked) in enumerate(zip(placed, walks, strict=True)):
        root_row = rows.index((i, 0))
        found = [cache[slots[root_row + place]] for place in range(len(walked.path) + 1)]
        assert found == [(i, node) for node in (0, *walked.path)]
        for row in range(root_row - one.rows_before, root_row):
            assert cache[slots[row]] == rows[row]
        if not one.branches:
            own = range(root_row, root_row + one.tree.num_rows)
            assert all(cache[slots[row]] == rows[row] for row in own)


@given(SEEDS)
def test_nothing_is_moved_that_is_where_it_should_be(random: Random) -> None:
    drawn = any_walked(random)
    walks = drawn.walks
    moves = drawn.step.moves(walks)
    in_place = all(walked.path == tuple(range(1, len(walked.path) + 1)) for walked in walks)
    assert (moves is None) == in_place
    if moves is not None:
        assert (moves.sources != moves.targets).all()
        assert moves.sources.dtype == moves.targets.dtype == np.int64


@given(SEEDS)
def test_the_order_puts_each_path_behind_its_root_and_leaves_other_requests_alone(
    random: Random,
) -> None:
    drawn = any_walked(random)
    placed, step, walks = drawn.placed, drawn.step, drawn.walks
    rows = owners(placed)
    order = step.order(walks)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(len(rows)))
    reordered = [rows[row] for row in order]
    assert [i for i, _ in reordered] == [i for i, _ in rows]
    for i, (one, walked) in enumerate(zip(placed, walks, strict=True)):
        nodes = [node for owner, node in reordered if owner == i]
        as_they_were = list(range(-one.rows_before, one.tree.num_rows))
        assert nodes[: one.rows_before] == as_they_were[: one.rows_before]
        path = [0, *walked.path]
        assert nodes[one.rows_before :][: len(path)] == path
        # Rejected rows keep their order, so a path that is where it should be changes nothing.
        assert nodes[one.rows_before :][len(path) :] == [
            node for node in range(one.tree.num_rows) if node not in path
        ]
        if not one.branches or path == list(range(len(path))):
            assert nodes == as_they_were


@given(SEEDS)
def test_in_the_order_the_engines_positions_are_right_along_the_path(random: Random) -> None:
    drawn = any_walked(random)
    step, walks = drawn.step, drawn.walks
    by_depth = np.full(step.num_rows, -1)
    by_depth[step.branching_rows] = step.positions()
    by_depth, by_place = by_depth[step.order(walks)], np.full(step.num_rows, -1)
    by_place[step.branching_rows] = step.linear_positions()
    for i in step.branching:
        along = slice(step.root_rows[i], step.root_rows[i] + len(walks[i].path) + 1)
        assert (by_depth[along] == by_place[along]).all()


@given(SEEDS, st.integers(0, 3))
def test_walked_rows_are_the_rows_with_logits_that_were_chosen_from(
    random: Random, padding: int
) -> None:
    drawn = any_walked(random)
    step, walks = drawn.step, drawn.walks
    width = max(len(walked.token_ids) for walked in walks) + padding
    found = step.walked_rows(walks, width)
    assert found.shape == (len(drawn.placed), width)
    flat = [token for of_one in drawn.said for token in of_one]
    starts = step.logit_starts
    for i, (rows, walked) in enumerate(zip(found.tolist(), walks, strict=True)):
        num_tokens = len(walked.token_ids)
        assert [flat[row] for row in rows[:num_tokens]] == list(walked.token_ids)
        assert rows[0] == starts[i]
        assert rows[1:num_tokens] == [starts[i] + node for node in walked.path]
        # Whatever stands behind is of the same request.
        assert all(starts[i] <= row < starts[i + 1] for row in rows)
