"""A replay needs what the real run needed: the same rounds, trees and paths, without a model."""

from __future__ import annotations

import dataclasses
import functools
import io
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from rich.console import Console

from ddtree.config import DecodeConfig
from ddtree.decode import BUILDERS
from ddtree.errors import BuilderError, TraceError
from ddtree.models.target import Target
from ddtree.pair import Pair
from ddtree.tracing.replay import first_difference, replay
from ddtree.tracing.replay_report import Outcome, outcome_json, outcomes, show
from ddtree.tracing.trace import TraceCard, TracedGeneration
from ddtree.tracing.trace_file import Trace
from ddtree.tree.chain import build_chain
from ddtree.tree.reference import build_tree
from ddtree.types import DraftTree, Generation, Marginals, Round
from tests.support import drafters
from tests.support.models import VOCAB_SIZE, dflash_drafter, tiny_model, tiny_target
from tests.support.tokenizers import tiny_tokenizer
from tests.support.traces import recorded

PROMPT = [5, 17, 42, 8, 23, 11, 2]
NUM_NEW = 18
SAMPLED = {"temperature": 1.0, "seed": 7}
NAMED = {"tree": build_tree, "chain": build_chain}
CARD = TraceCard(
    target="t", drafter="d", dtype="torch.float32", vocab_size=61, num_depths=7, origin={}
)


@functools.cache
def script(**rule: object) -> tuple[int, ...]:
    """What the target says, further than any test goes."""
    plain = Pair(tiny_target("llama"), None).generate(
        PROMPT, method="ar", max_new_tokens=80, **rule
    )
    return (*PROMPT, *plain.token_ids)


def pair_with(kind: str, **rule: object) -> Pair:
    """Perfect and siblings accept long paths; dflash is the real network, and drafts noise."""
    target = Target(tiny_model("llama"), tiny_tokenizer(), name="tiny")
    if kind == "dflash":
        return Pair(target, dflash_drafter(target))
    ranks: Callable[[int], int] = {"perfect": lambda p: 0, "siblings": lambda p: p % 3}[kind]
    return Pair(target, drafters.right_at_rank(ranks, script(**rule), VOCAB_SIZE))


def shape(rounds: Sequence[Round]) -> list[tuple[object, ...]]:
    """What must be the same where another run's marginals were rounded otherwise."""
    return [
        (r.token_ids, r.path, r.finish_reason, r.tree.token_ids.tolist(), r.tree.parents.tolist())
        for r in rounds
    ]


@pytest.fixture
def eos() -> Iterator[Callable[[list[int]], None]]:
    """Sets the shared model's stop tokens, and takes them back."""
    config = tiny_model("llama").generation_config

    def declare(ids: list[int]) -> None:
        config.eos_token_id = ids

    yield declare
    config.eos_token_id = None


# Agreement with real runs.


@pytest.mark.parametrize("rule", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", ["dflash", "ddtree"])
@pytest.mark.parametrize("kind", ["perfect", "siblings", "dflash"])
def test_the_run_itself_is_replayed_to_the_last_bit(
    kind: str, method: str, rule: dict[str, object]
) -> None:
    pair = pair_with(kind, **rule)
    for budget, num_ranks in ((1, 64), (5, None), (24, 16)):
        options = {"method": method, "budget": budget, "max_new_tokens": 12, **rule}
        traced, real = recorded(pair, PROMPT, num_ranks=num_ranks, **options)
        again = replay(traced, BUILDERS[method], budget)
        assert first_difference(again.rounds, real.rounds[1:]) is None
        assert again.acceptance_length == real.acceptance_length


# A coupled drafter learns from its rounds, and other rounds teach it otherwise.
@pytest.mark.parametrize("rule", [{}, {**SAMPLED, "coupled": False}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["perfect", "siblings", "dflash"])
def test_other_builders_and_budgets_need_the_rounds_that_their_real_runs_need(
    kind: str, rule: dict[str, object]
) -> None:
    pair = pair_with(kind, **rule)
    num_new = 12 if kind == "dflash" else NUM_NEW
    traced, _ = recorded(pair, PROMPT, budget=6, max_new_tokens=num_new, **rule)
    seen = set()
    for method in ("dflash", "ddtree"):
        for budget in (0, 3, 17, 64):
            options = {"method": method, "budget": budget, "max_new_tokens": num_new, **rule}
            # A pair of its own: what was learnt of the text's repetitions outlives a generation.
            real = pair_with(kind, **rule).generate(PROMPT, **options)
            again = replay(traced, BUILDERS[method], budget, lookup=method == "ddtree")
            assert shape(again.rounds) == shape(real.rounds[1:]), (method, budget)
            seen.add(len(again.rounds))
    assert len(seen) > 1


@pytest.mark.parametrize("end", ["token", "string", "length"])
@pytest.mark.parametrize("place", [1, 2, 3, 5, 8, 10])
def test_a_text_may_end_anywhere_in_an_accepted_path(
    place: int, end: str, eos: Callable[[list[int]], None]
) -> None:
    said = script()[len(PROMPT) :]
    options: dict[str, object] = {"max_new_tokens": 20}
    if end == "token":
        eos([said[place]])
    elif end == "string":
        options["stop"] = (tiny_tokenizer().decode(said[place : place + 2]),)
    else:
        options["max_new_tokens"] = place
    pair = pair_with("perfect" if place % 2 else "siblings")
    traced, first = recorded(pair, PROMPT, budget=4, **options)
    assert len(first.token_ids) <= place + 2
    for method, budget in (("ddtree", 2), ("ddtree", 12), ("dflash", 7)):
        fresh = pair_with("perfect" if place % 2 else "siblings")
        real = fresh.generate(PROMPT, method=method, budget=budget, **options)
        assert real.finish_reason == ("length" if end == "length" else "stop")
        again = replay(traced, BUILDERS[method], budget, lookup=method == "ddtree")
        assert shape(again.rounds) == shape(real.rounds[1:]), (method, budget)


def test_a_recorded_auto_run_is_replayed_with_fixed_budgets() -> None:
    pair = pair_with("dflash")
    traced, auto = recorded(pair, PROMPT, max_new_tokens=NUM_NEW)
    assert traced.options["budget"] == "auto"
    assert any(done.marginals is None for done in traced.rounds)
    for budget in (2, 16):
        real = pair_with("dflash").generate(PROMPT, budget=budget, max_new_tokens=NUM_NEW)
        assert real.token_ids == auto.token_ids
        assert shape(replay(traced, build_tree, budget).rounds) == shape(real.rounds[1:])


def test_what_was_learnt_of_repetitions_before_is_where_a_replay_begins() -> None:
    pair = pair_with("siblings")
    known = pair.lookup_weights(DecodeConfig())
    for _ in range(60):
        for kind in range(5):
            known.learn(kind, 0, 0.0, False)
    before = known.counts
    traced, real = recorded(pair, PROMPT, budget=9, max_new_tokens=NUM_NEW)
    assert traced.lookup == before != known.counts
    assert shape(replay(traced, build_tree, 9).rounds) == shape(real.rounds[1:])
    plain, _ = recorded(pair, PROMPT, budget=9, max_new_tokens=NUM_NEW, lookup=False)
    assert plain.lookup is None


def test_builders_get_the_ranks_and_depths_of_a_real_round() -> None:
    traced, _ = recorded(pair_with("siblings"), PROMPT, budget=8, max_new_tokens=NUM_NEW)
    shapes = []

    def watched(marginals: Marginals, root_id: int, budget: int) -> DraftTree:
        shapes.append(tuple(marginals.log_probs.shape))
        return build_tree(marginals, root_id, budget)

    again = replay(traced, watched, 5)
    left = [NUM_NEW - 1 - sum(r.num_tokens for r in again.rounds[:i]) for i in range(len(shapes))]
    assert shapes == [(min(7, room - 1), 5) for room in left]
    assert len(shapes) > 2


def test_one_round_that_is_not_the_same_is_found() -> None:
    traced, real = recorded(pair_with("siblings"), PROMPT, budget=8, max_new_tokens=NUM_NEW)
    rounds = list(real.rounds[1:])
    assert first_difference(rounds, rounds) is None
    assert first_difference(rounds[:-1], rounds) == len(rounds) - 1
    scores = rounds[2].tree.log_probs.copy()
    scores[-1] = np.nextafter(scores[-1], np.float32(0))
    tree = dataclasses.replace(rounds[2].tree, log_probs=scores)
    off = [*rounds[:2], dataclasses.replace(rounds[2], tree=tree), *rounds[3:]]
    assert first_difference(off, rounds) == 2
    short = dataclasses.replace(rounds[1], path=rounds[1].path[:-1])
    assert first_difference([rounds[0], short], rounds) == 1
    assert len(replay(traced, build_tree, 8).rounds) == len(rounds)


@pytest.mark.parametrize("options", [{"method": "ar"}, {"budget": 0}], ids=str)
def test_what_was_never_drafted_cannot_be_replayed(options: dict[str, object]) -> None:
    traced, _ = recorded(pair_with("perfect"), PROMPT, max_new_tokens=9, **options)
    assert replay(traced, build_tree, 0).acceptance_length == 1.0
    with pytest.raises(TraceError, match="marginals at every position of the text, got none at"):
        replay(traced, build_tree, 4)


def test_rounds_alone_cannot_be_replayed_with_another_budget() -> None:
    options = {"budget": 16, "max_new_tokens": NUM_NEW}
    traced, _ = recorded(pair_with("siblings"), PROMPT, num_ranks=None, **options)
    with pytest.raises(TraceError, match="got none at position"):
        replay(traced, build_tree, 1)


# Builders of others.


def spoiled(**changes: Callable[[np.ndarray], object]) -> Callable[..., object]:
    """A good builder whose trees have columns changed."""

    def build(marginals: Marginals, root_id: int, budget: int) -> DraftTree:
        tree = build_tree(marginals, root_id, budget)
        columns = {name: change(getattr(tree, name).copy()) for name, change in changes.items()}
        return dataclasses.replace(tree, **columns)

    return build


def put(index: int, value: int) -> Callable[[np.ndarray], np.ndarray]:
    def change(column: np.ndarray) -> np.ndarray:
        column[index] = value
        return column

    return change


def twins(marginals: Marginals, root_id: int, budget: int) -> DraftTree:
    """Two children of the root that propose one token."""
    return DraftTree(
        np.array([root_id, 9, 9]),
        np.array([-1, 0, 0], np.int32),
        np.array([0, 1, 1], np.int32),
        np.array([-1, 0, 1], np.int32),
        np.array([0, -1, -1], np.float32),
    )


@pytest.mark.parametrize(
    ("builder", "named"),
    [
        (lambda m, r, b: None, "got NoneType"),
        (lambda m, r, b: build_tree(m, r, b + 1), "at most 4 nodes behind the root, got one of 5"),
        (lambda m, r, b: build_tree(m, r + 1, b), "row 0 is not the root"),
        (spoiled(parents=put(0, 0)), "row 0 is not the root"),
        (spoiled(token_ids=lambda c: c.tolist()), r"token_ids that are no int64 array \[N\]"),
        (spoiled(ranks=lambda c: c.astype(np.int64)), r"ranks that are no int32 array \[N\]"),
        (spoiled(log_probs=lambda c: c[1:]), "4 log_probs for 5 rows"),
        (spoiled(parents=put(2, 2)), "node 2 does not come after its parent"),
        (spoiled(parents=put(2, -1)), "node 2 does not come after its parent"),
        (spoiled(depths=put(1, 2)), "depths are not its parents' plus 1"),
        (twins, "the same token twice"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.usefixtures("unchecked")
def test_a_tree_that_could_not_be_verified_is_named(
    builder: Callable[..., DraftTree], named: str
) -> None:
    traced, _ = recorded(pair_with("perfect"), PROMPT, budget=4, max_new_tokens=NUM_NEW)
    assert replay(traced, build_tree, 4).acceptance_length > 3
    with pytest.raises(BuilderError, match=named):
        replay(traced, builder, 4)


# Side by side.


def trace_of(*generations: TracedGeneration) -> Trace:
    return Trace(card=CARD, generations=generations, is_torn=False)


@functools.cache
def several() -> tuple[Trace, dict[str, Generation]]:
    """Two texts by several arms each, and a third at another temperature."""
    arms = {
        "ar": {"method": "ar"},
        "chain-8": {"method": "dflash", "budget": 8},
        "tree-8": {"budget": 8},
        "tree-16": {"budget": 16},
    }
    found, real = [], {}
    for text, length in (("long", NUM_NEW), ("short", 9)):
        for arm, options in arms.items():
            ranks = 64 if arm == "tree-16" else None
            id = f"{text}/{arm}"
            traced, real[id] = recorded(
                pair_with("siblings"),
                PROMPT,
                id=id,
                num_ranks=ranks,
                max_new_tokens=length,
                **options,
            )
            found.append(traced)
    warm, real["warm"] = recorded(
        pair_with("siblings", **SAMPLED), PROMPT, id="warm", budget=8, max_new_tokens=9, **SAMPLED
    )
    return trace_of(*found, warm), real


def test_a_text_counts_once_and_is_set_beside_its_real_run() -> None:
    trace, real = several()
    found = {(o.temperature, o.builder, o.budget): o for o in outcomes(trace, NAMED, (8, 16, 32))}
    assert [key for key in found if key[0] == 1.0] == [
        (1.0, name, budget) for name in NAMED for budget in (8, 16, 32)
    ]
    for name, budget, arm in (("tree", 8, "tree-8"), ("chain", 8, "chain-8")):
        outcome = found[0.0, name, budget]
        assert [t.id for t in outcome.texts] == [f"long/{arm}", f"short/{arm}"]
        both = [real[f"long/{arm}"], real[f"short/{arm}"]]
        assert len(outcome.total.rounds) == sum(g.num_rounds for g in both)
        assert first_difference(outcome.total.rounds, outcome.recorded.rounds) is None
        assert outcome.differing == ()
    wide = found[0.0, "tree", 32]
    assert [t.id for t in wide.texts] == ["long/tree-16", "short/tree-16"]
    assert wide.recorded is None


def test_fewer_ranks_than_the_budget_are_noted_where_they_matter() -> None:
    traced, _ = recorded(pair_with("siblings"), PROMPT, num_ranks=4, budget=2, max_new_tokens=9)
    assert traced.num_ranks == 4
    found = outcomes(trace_of(traced), NAMED, (2, 4, 5))
    kept = {(o.builder, o.budget): o.kept_ranks for o in found}
    assert kept.pop(("tree", 5)) == 4
    assert set(kept.values()) == {None}


def test_coupled_drafting_is_noted_where_nothing_real_is_beside_it() -> None:
    options = {"budget": 8, "max_new_tokens": 9, **SAMPLED}
    coupled, _ = recorded(pair_with("dflash"), PROMPT, **options)
    alone, _ = recorded(pair_with("dflash"), PROMPT, coupled=False, **options)
    for traced, noted in ((coupled, True), (alone, False)):
        real, other = outcomes(trace_of(traced), {"tree": build_tree}, (8, 4))
        assert (real.is_coupled, other.is_coupled) == (False, noted)
        assert ("learns from its rounds" in shown([real, other])) == noted


def test_a_real_run_that_differs_is_said() -> None:
    traced, _ = recorded(pair_with("siblings"), PROMPT, budget=8, max_new_tokens=NUM_NEW)
    (outcome,) = outcomes(trace_of(traced), {"tree": build_chain}, (8,))
    (text,) = outcome.differing
    assert text.first_difference == 0
    assert outcome_json(outcome)["agrees"] is False
    assert "tree 8: generation 0 differs from the real run first in round 0." in shown([outcome])


def shown(found: Sequence[Outcome]) -> str:
    console = Console(file=io.StringIO(), width=80)
    show(found, console)
    return console.file.getvalue()


def test_the_table_has_a_row_for_each_and_fits_into_80_columns() -> None:
    trace, _ = several()
    found = outcomes(trace, NAMED, (8, 128))
    table, _, notes = shown(found).partition("\n3 texts;")
    assert [line for line in table.split("\n") if len(line) > 80] == []
    assert table.count("agrees") == 3
    assert "128*" in table
    assert "only the best 64 ranks" in notes
    (line,) = [line for line in table.split("\n") if line.split()[:3] == ["0", "tree", "8"]]
    total = found[0].total
    assert line.split()[3:5] == [str(len(total.rounds)), f"{total.acceptance_length:.2f}"]


def test_json_counts_rounds_by_their_tokens() -> None:
    trace, real = several()
    found = outcome_json(outcomes(trace, {"tree": build_tree}, (8,))[0])
    long, short = found["texts"]
    assert long["acceptance_histogram"] == list(real["long/tree-8"].acceptance_histogram)
    assert (long["agrees"], short["agrees"], found["agrees"]) == (True, True, True)
    assert found["num_tokens"] == NUM_NEW - 1 + 8
    assert found["acceptance_length"] == found["num_tokens"] / found["num_rounds"]
    assert found["recorded"]["num_rounds"] == found["num_rounds"]


def test_a_trace_without_marginals_has_nothing_to_replay() -> None:
    traced, _ = recorded(pair_with("perfect"), PROMPT, method="ar", max_new_tokens=5)
    for trace in (trace_of(traced), trace_of()):
        with pytest.raises(TraceError, match="a generation that was drafted"):
            outcomes(trace, NAMED, (8,))


def test_a_text_of_one_token_has_no_round_to_replay() -> None:
    traced, _ = recorded(pair_with("perfect"), PROMPT, budget=4, max_new_tokens=1)
    assert replay(traced, build_tree, 4).rounds == ()
    (outcome,) = outcomes(trace_of(traced), {"tree": build_tree}, (4,))
    assert outcome_json(outcome)["acceptance_length"] is None
    assert " - " in shown([outcome])
