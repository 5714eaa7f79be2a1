"""One engine step: which rows belong to which request, and the tree that they are.

The engine lays a request's draft tokens out one after another, in the order of the tree's nodes:
every parent comes before its children, so whatever the scheduler cuts off at the end, what is left
is a tree. Knows no engine and no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Int32, Int64
from numpy import ndarray
from torch import Tensor

from ddtree.serving.tree_rows import TreeRows
from ddtree.tree.geometry import ancestor_mask, child_lookup
from ddtree.types import DraftTree, Walk

WORD_BITS = 64


def chain_of(root_id: int, token_ids: Sequence[int]) -> DraftTree:
    """Draft tokens of which no tree is known: one node per depth, scores unknown (0).

    >>> chain_of(5, [7, 8]).parents.tolist()
    [-1, 0, 1]
    """
    num_rows = len(token_ids) + 1
    return DraftTree(
        np.array([root_id, *token_ids], np.int64),
        np.arange(-1, num_rows - 1, dtype=np.int32),
        np.arange(num_rows, dtype=np.int32),
        np.array([-1] + [0] * (num_rows - 1), np.int32),
        np.zeros(num_rows, np.float32),
    )


def scheduled_tree(drafted: DraftTree | None, root_id: int, token_ids: Sequence[int]) -> DraftTree:
    """The tree that a request's scheduled draft tokens are.

    Args:
        drafted: what the drafter proposed for this request last, if anything.
        root_id: the last decided token.
        token_ids: what the scheduler left of the proposal: its first tokens. Tokens that are not
            from this proposal, whoever put them there, are verified as a chain.
    """
    num_nodes = len(token_ids)
    if drafted is not None and drafted.num_nodes >= num_nodes:
        tree = drafted.first(num_nodes)
        if tree.token_ids[0] == root_id and tree.token_ids[1:].tolist() == list(token_ids):
            return tree
    return chain_of(root_id, token_ids)


def is_chain(tree: DraftTree) -> bool:
    """Whether every node's parent is the node before it, as engines think of draft tokens."""
    return bool((tree.depths == np.arange(tree.num_rows)).all())


@dataclass(frozen=True)
class Step:
    """The rows of one step. R requests, in the engine's order; M rows with logits.

    Args:
        trees: of each request; its root alone where nothing was drafted, or where the prompt is
            still being read (the root is then the chunk's last token).
        root_rows: [R], row of the step that is each request's root.
        root_positions: [R], its position in the text, which is also how much of the text is in the
            cache.
        num_rows: of the step, those of prompts that are read included.
        decoding: requests whose prompt was read before.
    """

    trees: tuple[DraftTree, ...]
    root_rows: Int64[ndarray, " R"]
    root_positions: Int64[ndarray, " R"]
    num_rows: int
    decoding: tuple[int, ...]

    @cached_property
    def logit_starts(self) -> Int64[ndarray, " R1"]:
        """[R + 1], where each request's rows begin among the M rows with logits, and M."""
        return np.cumsum([0, *(tree.num_rows for tree in self.trees)], dtype=np.int64)

    @cached_property
    def branching(self) -> tuple[int, ...]:
        """Requests whose tree is no chain: they need tree attention."""
        return tuple(i for i, tree in enumerate(self.trees) if not is_chain(tree))

    @cached_property
    def branching_rows(self) -> Int64[ndarray, " X"]:
        """Rows of the step that belong to them, in order."""
        spans = [self.root_rows[i] + np.arange(self.trees[i].num_rows) for i in self.branching]
        return np.concatenate([np.empty(0, np.int64), *spans])

    def positions(self) -> Int64[ndarray, " X"]:
        """Position in the text of each of `branching_rows`: by its depth."""
        spans = [self.root_positions[i] + self.trees[i].depths for i in self.branching]
        return np.concatenate([np.empty(0, np.int64), *spans])

    def linear_positions(self) -> Int64[ndarray, " X"]:
        """Position of each of `branching_rows` as the engine counts: one after another."""
        spans = [self.root_positions[i] + np.arange(self.trees[i].num_rows) for i in self.branching]
        return np.concatenate([np.empty(0, np.int64), *spans])

    def tree_rows(
        self, block_table: Int32[Tensor, "R P"], device: torch.device | str
    ) -> TreeRows | None:
        """What attention must know; None where all trees are chains."""
        if not self.branching:
            return None
        trees = [self.trees[i] for i in self.branching]
        index = np.array(self.branching, np.int64)
        counts = np.array([tree.num_rows for tree in trees], np.int32)
        contexts = self.root_positions[index].astype(np.int32)
        most = int(counts.max())
        words = [ancestor_words(ancestor_mask(tree), -(-most // WORD_BITS)) for tree in trees]

        def on_device(values: ndarray) -> Tensor:
            return torch.from_numpy(values).to(device)

        return TreeRows(
            row_starts=on_device(self.root_rows[index].astype(np.int32)),
            num_rows=on_device(counts),
            context_lens=on_device(contexts),
            block_tables=block_table[on_device(index)],
            ancestor_words=on_device(np.concatenate(words)),
            max_rows=most,
            max_context_len=int(contexts.max()),
        )

    def walk(self, chosen: Sequence[int]) -> tuple[Walk, ...]:
        """Follow the target's choices down each tree.

        Args:
            chosen: M tokens, what the target says at each row with logits.
        """
        starts = self.logit_starts.tolist()
        return tuple(
            walk_tree(tree, chosen[starts[i] : starts[i + 1]]) for i, tree in enumerate(self.trees)
        )

    def moves(self, walks: Sequence[Walk]) -> Moves | None:
        """Which rows' keys and values belong elsewhere; None where all are where they should be."""
        sources: list[int] = []
        targets: list[int] = []
        for i in self.branching:
            root = int(self.root_rows[i])
            for place, node in enumerate(walks[i].path, start=1):
                if node != place:
                    sources.append(root + node)
                    targets.append(root + place)
        return Moves(np.array(sources), np.array(targets)) if sources else None

    def walked_rows(self, walks: Sequence[Walk], width: int) -> Int64[ndarray, "R width"]:
        """Rows with logits that each walk came to, padded with its root's.

        Args:
            walks: of each request.
            width: at least the most tokens of a walk.
        """
        rows = np.repeat(self.logit_starts[:-1, None], width, axis=1)
        for i, walk in enumerate(walks):
            rows[i, 1 : 1 + len(walk.path)] += np.array(walk.path, np.int64)
        return rows

    def order(self, walks: Sequence[Walk]) -> Int64[ndarray, " X"]:
        """All rows of the step, each branching request's accepted path directly behind its root.

        What reads rows as if drafts were chains then finds accepted tokens where it looks for them.
        """
        order = np.arange(self.num_rows, dtype=np.int64)
        for i in self.branching:
            tree, path = self.trees[i], np.array((0, *walks[i].path))
            others = np.setdiff1d(np.arange(tree.num_rows), path)
            rows = slice(int(self.root_rows[i]), int(self.root_rows[i]) + tree.num_rows)
            order[rows] = rows.start + np.concatenate([path, others])
        return order


@dataclass(frozen=True)
class Moves:
    """Rows of a step whose keys and values go to the cache slots of other rows.

    Args:
        sources: [X], rows of accepted nodes.
        targets: [X], rows whose slots they belong to.
    """

    sources: Int64[ndarray, " X"]
    targets: Int64[ndarray, " X"]


def walk_tree(tree: DraftTree, chosen: Sequence[int]) -> Walk:
    """The accepted path and the token behind it.

    Args:
        tree: N rows.
        chosen: N tokens, what the target says at each row.

    >>> tree = chain_of(5, [7, 8])
    >>> walk_tree(tree, [7, 9, 1]).token_ids
    (7, 9)
    """
    children = child_lookup(tree)
    row, path, said = 0, [], [chosen[0]]
    while (child := children.get((row, said[-1]))) is not None:
        path.append(child)
        said.append(chosen[child])
        row = child
    return Walk(path=tuple(path), token_ids=tuple(said), finish_reason=None)


def ancestor_words(mask: Bool[ndarray, "N N"], num_words: int) -> Int64[ndarray, "N W"]:
    """A mask's rows as bits: bit j % 64 of word j // 64 is entry j.

    >>> ancestor_words(np.array([[True, False], [True, True]]), 1).tolist()
    [[1], [3]]
    """
    bits = np.zeros((mask.shape[0], num_words * WORD_BITS), np.bool_)
    bits[:, : mask.shape[1]] = mask
    words: Int64[ndarray, "N W"] = np.packbits(bits, axis=1, bitorder="little").view("<i8")
    return words
