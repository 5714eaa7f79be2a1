"""The walk: the target's rule decides, the tree only says how far one round goes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ddtree.sampling.rule import Greedy
from ddtree.stopping import TextStopping
from ddtree.types import DraftTree
from ddtree.walk import walk

ROOT, STOP, LEAVES = 40, 2, 41
NO_LOGITS = torch.zeros(0, 0)


def tree_of(parents: Sequence[int], token_ids: Sequence[int]) -> DraftTree:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    num_rows = len(parents)
    return DraftTree(
        np.array(token_ids, np.int64),
        np.array(parents, np.int32),
        np.array(depths, np.int32),
        np.array([-1] + [0] * (num_rows - 1), np.int32),
        np.zeros(num_rows, np.float32),
    )


@dataclass
class ScriptedRule:
    """Says what the target chooses after some tokens, and remembers at which rows it was asked."""

    choice: Callable[[Sequence[int]], int]
    rows: list[int] = field(default_factory=list)

    def chooser(self, logits_NV: Tensor) -> Callable[[int, Sequence[int]], int]:
        def choose(row: int, token_ids: Sequence[int]) -> int:
            self.rows.append(row)
            return self.choice(token_ids)

        return choose


def saying(*tokens: int, prompt: Sequence[int]) -> ScriptedRule:
    return ScriptedRule(lambda token_ids: tokens[len(token_ids) - len(prompt)])


# The path of interest is 1, 3, 4 (tokens 10, 11, 12); beside it 2, 5 (tokens 20, 11).
TREE = tree_of([-1, 0, 0, 1, 3, 2], [ROOT, 10, 20, 11, 12, 11])
PROMPT = [5, 6, ROOT]


@pytest.mark.parametrize(
    ("choices", "path"),
    [
        ((LEAVES,), ()),
        ((11,), ()),  # a token of the tree, but no child of the root
        ((10, LEAVES), (1,)),
        ((10, 12), (1,)),  # a grandchild
        ((20, 11, 12), (2, 5)),  # a cousin's child
        ((10, 11, LEAVES), (1, 3)),
        ((10, 11, 12, LEAVES), (1, 3, 4)),
    ],
)
def test_the_walk_goes_on_while_the_choice_is_a_child_and_delivers_one_token_more(
    choices: tuple[int, ...], path: tuple[int, ...]
) -> None:
    token_ids, rule = list(PROMPT), saying(*choices, prompt=PROMPT)
    result = walk(TREE, NO_LOGITS, rule, TextStopping(99, (STOP,), None), token_ids)
    assert result.path == path
    assert result.token_ids == choices
    assert result.next_root_id == choices[-1]
    assert result.finish_reason is None
    assert token_ids == PROMPT + list(choices)
    assert rule.rows == [0, *path]


@pytest.mark.parametrize("place", range(4))
def test_a_stop_token_ends_the_walk_at_every_place_of_the_path(place: int) -> None:
    choices = (10, 11, 12, LEAVES)
    token_ids, rule = list(PROMPT), saying(*choices, prompt=PROMPT)
    stopping = TextStopping(99, (choices[place],), None)
    result = walk(TREE, NO_LOGITS, rule, stopping, token_ids)
    # The stop token is delivered; its own row is not committed, nor what lies beyond it.
    assert result.token_ids == choices[: place + 1]
    assert result.path == (1, 3, 4)[:place]
    assert result.finish_reason == "stop"
    assert token_ids == PROMPT + list(choices[: place + 1])
    assert rule.rows == [0, 1, 3, 4][: place + 1]
    assert stopping.room == 99 - (place + 1)


@pytest.mark.parametrize("limit", range(1, 5))
def test_the_limit_ends_the_walk_at_every_place_of_the_path(limit: int) -> None:
    choices = (10, 11, 12, LEAVES)
    token_ids, rule = list(PROMPT), saying(*choices, prompt=PROMPT)
    result = walk(TREE, NO_LOGITS, rule, TextStopping(limit, (STOP,), None), token_ids)
    assert result.token_ids == choices[:limit]
    assert result.path == (1, 3, 4)[: limit - 1]
    assert result.finish_reason == "length"
    assert token_ids == PROMPT + list(choices[:limit])
    assert rule.rows == [0, 1, 3, 4][:limit]


def test_a_stop_token_at_the_limit_is_a_stop() -> None:
    rule = saying(10, 11, prompt=PROMPT)
    result = walk(TREE, NO_LOGITS, rule, TextStopping(2, (11,), None), list(PROMPT))
    assert (result.token_ids, result.path, result.finish_reason) == ((10, 11), (1,), "stop")


def test_the_root_alone_gives_one_token_as_plain_decoding_does() -> None:
    token_ids, rule = list(PROMPT), saying(10, prompt=PROMPT)
    tree = DraftTree.root_only(ROOT)
    result = walk(tree, NO_LOGITS, rule, TextStopping(9, (STOP,), None), token_ids)
    assert (result.path, result.token_ids, result.finish_reason) == ((), (10,), None)


def test_the_rule_reads_the_logits_of_the_row_where_the_walk_stands() -> None:
    logits = torch.full((6, 42), -1.0)
    for row, token in [(0, 20), (2, 11), (5, 41), (1, 7), (3, 7), (4, 7)]:
        logits[row, token] = 1.0
    result = walk(TREE, logits, Greedy(), TextStopping(9, (STOP,), None), list(PROMPT))
    assert (result.path, result.token_ids) == ((2, 5), (20, 11, 41))


@given(st.data())
def test_whatever_the_tree_the_tokens_are_the_rules_own_sequence(data: st.DataObject) -> None:
    num_rows = data.draw(st.integers(1, 15))
    parents, token_ids, taken = [-1], [0], [set[int]() for _ in range(num_rows)]
    for node in range(1, num_rows):
        free = [parent for parent in range(node) if len(taken[parent]) < 3]
        parent = data.draw(st.sampled_from(free))
        token = data.draw(st.sampled_from([t for t in range(3) if t not in taken[parent]]))
        taken[parent].add(token)
        parents.append(parent)
        token_ids.append(token)
    script = data.draw(st.lists(st.integers(0, 2), min_size=16, max_size=16))
    stop_id, limit = data.draw(st.sampled_from([1, 99])), data.draw(st.integers(1, 16))
    tree = tree_of(parents, token_ids)

    text = [0]
    rule = saying(*script, prompt=[0])
    result = walk(tree, NO_LOGITS, rule, TextStopping(limit, (stop_id,), None), text)

    delivered = list(result.token_ids)
    assert delivered == script[: len(delivered)]
    assert text == [0, *delivered]
    assert [token_ids[node] for node in result.path] == delivered[:-1]
    assert [parents[node] for node in result.path] == [0, *result.path][:-1]
    assert rule.rows == [0, *result.path]
    stops = [i for i, token in enumerate(script) if token == stop_id or i == limit - 1]
    last = stops[0] if stops else None
    if result.finish_reason is None:
        assert last is None or len(delivered) <= last
        # It ended because the tree did.
        children = {token_ids[n] for n in range(1, num_rows) if parents[n] == rule.rows[-1]}
        assert delivered[-1] not in children
    else:
        assert len(delivered) - 1 == last
        assert result.finish_reason == ("stop" if script[last] == stop_id else "length")
