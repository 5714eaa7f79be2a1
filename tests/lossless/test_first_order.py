"""A first-order draft changes the number of rounds and not a token."""

from __future__ import annotations

import functools

import pytest

from ddtree.models.target import Target
from ddtree.pair import Pair
from ddtree.tracing.replay import first_difference, replay
from ddtree.tree.chain import build_chain
from ddtree.tree.host import build_tree
from tests.support.first_order import FirstOrderDrafter
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.traces import recorded

PROMPT = [5, 17, 42, 8, 23, 11, 2]
RULES = [{}, {"temperature": 1.0, "seed": 7}]
NUM_NEW = 24


def pair_of(drafter: FirstOrderDrafter | None) -> Pair:
    return Pair(Target(tiny_model("llama"), None, name="tiny"), drafter)


@functools.cache
def plain(index: int) -> tuple[int, ...]:
    """What the target says by itself, further than any test goes."""
    options = {"method": "ar", "max_new_tokens": NUM_NEW + 8, **RULES[index]}
    return pair_of(None).generate(PROMPT, **options).token_ids


def drafter(index: int, *, tells: bool = True) -> FirstOrderDrafter:
    return FirstOrderDrafter([*PROMPT, *plain(index)], VOCAB_SIZE, tells)


@pytest.mark.parametrize("index", range(len(RULES)), ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("method", "budget"), [("dflash", 7), ("ddtree", 1), ("ddtree", 12), ("ddtree", "auto")]
)
def test_the_text_is_the_targets_own(method: str, budget: int | str, index: int) -> None:
    options = {"method": method, "budget": budget, "max_new_tokens": NUM_NEW, **RULES[index]}
    generation = pair_of(drafter(index)).generate(PROMPT, lookup=False, **options)
    assert generation.token_ids == plain(index)[:NUM_NEW]


def test_what_positions_say_of_each_other_saves_rounds() -> None:
    options = {"budget": 12, "max_new_tokens": NUM_NEW, "lookup": False}
    told = pair_of(drafter(0)).generate(PROMPT, **options)
    untold = pair_of(drafter(0, tells=False)).generate(PROMPT, **options)
    assert told.token_ids == untold.token_ids
    # Each of four first tokens leads on to what is nearly sure behind it.
    assert told.acceptance_length > untold.acceptance_length + 0.5


@pytest.mark.parametrize("index", range(len(RULES)), ids=["greedy", "sampled"])
def test_a_recording_replays_to_the_last_bit_at_every_budget(index: int) -> None:
    pair = pair_of(drafter(index))
    options = {"max_new_tokens": NUM_NEW, "lookup": False, **RULES[index]}
    traced, real = recorded(pair, PROMPT, budget=2, num_ranks=16, **options)
    assert all(r.marginals.transitions is not None for r in traced.rounds if r.marginals)
    assert first_difference(replay(traced, build_tree, 2).rounds, real.rounds[1:]) is None
    for method, builder, budget in (("ddtree", build_tree, 12), ("dflash", build_chain, 7)):
        real = pair.generate(PROMPT, method=method, budget=budget, **options)
        assert first_difference(replay(traced, builder, budget).rounds, real.rounds[1:]) is None
