"""What is seen of each round: its nodes with their probabilities and what became of them.

Between a `Generation` and the two ways to show it. Knows tokens by their ids only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ddtree.tree.geometry import child_lookup
from ddtree.types import DraftTree, Round

State = Literal["root", "accepted", "bonus", "rejected"]


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node as it is drawn.

    Args:
        token_id: what it proposes.
        parent: its parent's index in `Scene.nodes`; -1 for the root.
        depth: the root has 0.
        state: what became of it; the bonus token is the last that a round delivers.
        rank: 0 = the most probable token of its depth; None where it was not drafted: the root,
            and nearly every bonus token.
        probability: the drafter's, given the parent, in (0, 1]; None likewise.
        path_probability: the drafter's, of all nodes from the root on; None likewise.
    """

    token_id: int
    parent: int
    depth: int
    state: State
    rank: int | None = None
    probability: float | None = None
    path_probability: float | None = None


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One round: 0 is the prefill, which has no root and delivers one token.

    Args:
        number: of the round.
        nodes: those of the tree in score order, so each beginning is a tree too; then the bonus
            token, unless the tree has it: generation may end inside an accepted path.
        num_drafted: nodes of the tree, the root not counted.
        token_ids: the tokens delivered; the last is the bonus token.
        expected_tokens: how many the drafter expected, the bonus token included.
    """

    number: int
    nodes: tuple[Node, ...]
    num_drafted: int
    token_ids: tuple[int, ...]
    expected_tokens: float

    @property
    def num_accepted(self) -> int:
        """Accepted nodes."""
        return len(self.token_ids) - 1

    def children(self) -> list[list[int]]:
        """Of each node its children, the most probable first, the bonus token last."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for index, node in enumerate(self.nodes):
            if node.parent >= 0:
                found[node.parent].append(index)
        # Score order is rank order among siblings, and an undrafted bonus token is the last node.
        return found


def scenes_of(rounds: Sequence[Round]) -> list[Scene]:
    """The scenes of a generation's rounds, the prefill first."""
    return [_scene(number, done) for number, done in enumerate(rounds)]


def _scene(number: int, done: Round) -> Scene:
    if done.tree is None:
        first = Node(token_id=done.token_ids[-1], parent=-1, depth=0, state="bonus")
        return Scene(
            number=number,
            nodes=(first,),
            num_drafted=0,
            token_ids=done.token_ids,
            expected_tokens=1.0,
        )
    return Scene(
        number=number,
        nodes=_nodes(done.tree, done.path, done.token_ids[-1]),
        num_drafted=done.tree.num_nodes,
        token_ids=done.token_ids,
        expected_tokens=done.tree.expected_acceptance_length,
    )


def _nodes(tree: DraftTree, path: tuple[int, ...], bonus_id: int) -> tuple[Node, ...]:
    last = path[-1] if path else 0
    drafted_bonus = child_lookup(tree).get((last, bonus_id))
    states: dict[int, State] = dict.fromkeys(path, "accepted")
    if drafted_bonus is not None:
        states[drafted_bonus] = "bonus"
    parents, scores = tree.parents.tolist(), tree.log_probs.tolist()
    token_ids, depths, ranks = tree.token_ids.tolist(), tree.depths.tolist(), tree.ranks.tolist()
    nodes = [Node(token_id=token_ids[0], parent=-1, depth=0, state="root")]
    for i in range(1, tree.num_rows):
        node = Node(
            token_id=token_ids[i],
            parent=parents[i],
            depth=depths[i],
            state=states.get(i, "rejected"),
            rank=ranks[i],
            # Scores are rounded to float32: a child of probability 1 must not get more than that.
            probability=min(1.0, math.exp(scores[i] - scores[parents[i]])),
            path_probability=math.exp(scores[i]),
        )
        nodes.append(node)
    if drafted_bonus is None:
        bonus = Node(token_id=bonus_id, parent=last, depth=nodes[last].depth + 1, state="bonus")
        nodes.append(bonus)
    return tuple(nodes)
