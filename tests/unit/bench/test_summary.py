"""The numbers of a report, against records whose figures can be worked out by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest

from ddtree.bench.records import BIN_EDGES, NUM_BINS, Arm, ArmRecord, PromptRecord, RoundRecord, Run
from ddtree.bench.statistics import Bootstrap
from ddtree.bench.summary import AtTemperature, Cell, Summary, summarise
from ddtree.costs import CostProfile
from ddtree.types import StageSeconds
from tests.support.bench_runs import Made, make_run

AR = Arm(name="ar", method="ar")
TREE_4 = Arm(name="ddtree-4", method="ddtree", budget=4)
TREE_8 = Arm(name="ddtree-8", method="ddtree", budget=8)
LOOKUP = Arm(name="prompt-lookup", method="prompt-lookup")
FEW = Bootstrap(num_resamples=200)


def a_round(
    tokens: int, *, nodes: int = 4, ranks: Sequence[int] | None = None, context: int = 10
) -> RoundRecord:
    """A round of 1 s, of which 0.25 s for the draft."""
    return RoundRecord(
        context=context,
        nodes=nodes,
        promised=2.0,
        tokens=tokens,
        ranks=tuple(ranks if ranks is not None else [0] * (tokens - 1)),
        seconds=StageSeconds(
            draft=0.25 if nodes else 0.0, verify=0.5 if nodes else 0.75, walk=0.25
        ),
    )


def a_text(
    arm: Arm, seconds: float, rounds: Sequence[RoundRecord] = (), num_tokens: int = 10
) -> ArmRecord:
    """Ten tokens in so many seconds."""
    return ArmRecord(
        arm=arm.name,
        token_ids=tuple(range(num_tokens)),
        elapsed_s=seconds,
        prefill_s=1.0 if rounds else None,
        rounds=tuple(rounds),
        node_bins=(),
    )


def a_prompt(
    *arms: ArmRecord, index: int = 0, turn: int = 0, suite: str = "s", temperature: float = 0.0
) -> PromptRecord:
    return PromptRecord(
        suite=suite,
        id=f"{suite}/{index}",
        index=index,
        turn=turn,
        temperature=temperature,
        num_prompt_tokens=10,
        order=tuple(arm.arm for arm in arms),
        arms=arms,
    )


def summary_of(
    *prompts: PromptRecord, arms: Sequence[Arm] = (AR, TREE_4), profile: CostProfile | None = None
) -> Summary:
    card = {"cost_profile": None if profile is None else asdict(profile)}
    return summarise(Run(card=card, arms=tuple(arms), prompts=prompts), FEW)


def cell(at: AtTemperature, arm: str, suite: str | None = None) -> Cell:
    """Of an arm on a suite, or its mean."""
    row = next(row for row in at.rows if row.arm.name == arm)
    found = row.mean if suite is None else row.cells[at.suites.index(suite)]
    assert found is not None
    return found


def plain(seconds: float) -> ArmRecord:
    return a_text(AR, seconds, [a_round(1, nodes=0)] * 9)


def test_a_speedup_is_the_mean_of_ratios_and_that_of_totals_a_ratio_of_sums() -> None:
    # 4 s against 2 s, and 8 s against 8 s: ratios 2 and 1; in total 12 s against 10 s.
    (at,) = summary_of(
        a_prompt(plain(4.0), a_text(TREE_4, 2.0, [a_round(3)] * 3)),
        a_prompt(plain(8.0), a_text(TREE_4, 8.0, [a_round(3)] * 3), index=1),
    ).temperatures
    found = cell(at, "ddtree-4", "s")
    assert found.speedup.value == 1.5
    assert (found.speedup.low, found.speedup.high) == (1.0, 2.0)
    assert found.total_speedup.value == pytest.approx(1.2)
    assert cell(at, "ar", "s").speedup.value == 1.0


def test_tau_is_tokens_by_rounds_over_a_suite_and_the_headline_the_mean_of_suites() -> None:
    # In s 10 tokens in 4 rounds, not the mean of 4 and 2; in t 2 in 1.
    (at,) = summary_of(
        a_prompt(plain(1.0), a_text(TREE_4, 1.0, [a_round(4)])),
        a_prompt(plain(1.0), a_text(TREE_4, 1.0, [a_round(2)] * 3), index=1),
        a_prompt(plain(1.0), a_text(TREE_4, 1.0, [a_round(2)]), suite="t"),
    ).temperatures
    in_s, mean = cell(at, "ddtree-4", "s").tau, cell(at, "ddtree-4").tau
    assert in_s is not None
    assert mean is not None
    assert in_s.value == 2.5
    assert mean.value == 2.25
    # Suite t has one prompt: nobody knows how much it would vary.
    assert mean.low is None


def test_turns_of_a_conversation_are_one_prompt_to_the_intervals() -> None:
    (at,) = summary_of(
        a_prompt(plain(4.0), a_text(TREE_4, 2.0, [a_round(3)])),
        a_prompt(plain(4.0), a_text(TREE_4, 4.0, [a_round(3)]), turn=1),
    ).temperatures
    found = cell(at, "ddtree-4", "s")
    assert found.num_prompts == 1
    assert (found.speedup.value, found.speedup.low) == (1.5, None)


def test_outside_arms_have_no_tau_and_arms_that_did_not_run_have_no_row() -> None:
    summary = summary_of(
        a_prompt(plain(4.0), a_text(LOOKUP, 2.0)),
        a_prompt(plain(4.0), temperature=1.0),
        arms=(AR, LOOKUP),
    )
    greedy, sampled = summary.temperatures
    assert cell(greedy, "prompt-lookup").tau is None
    assert cell(greedy, "prompt-lookup").speedup.value == 2.0
    assert [row.arm.name for row in sampled.rows] == ["ar"]
    assert [r.arm for r in greedy.rounds] == ["ar"]


def test_budgets_are_chosen_on_even_prompts_and_reported_on_odd_ones() -> None:
    # Budget 4 is twice as fast on even prompts, budget 8 four times on odd ones: 4 is chosen all
    # the same, and what it does on odd prompts is reported.
    def one(index: int, four: float, eight: float) -> PromptRecord:
        arms = (a_text(TREE_4, four, [a_round(3)]), a_text(TREE_8, eight, [a_round(4)]))
        return a_prompt(plain(8.0), *arms, index=index)

    summary = summary_of(one(0, 4.0, 8.0), one(1, 16.0, 2.0), arms=(AR, TREE_4, TREE_8))
    rows = {row.label: row for row in summary.temperatures[0].paper.rows}
    assert rows.keys() == {"ar", "ddtree, one budget", "ddtree, budget per suite"}
    for label in ("ddtree, one budget", "ddtree, budget per suite"):
        assert rows[label].budgets == (4,)
        (found,) = rows[label].cells
        assert found is not None
        assert found.speedup.value == 0.5


def test_one_budget_is_chosen_by_the_mean_over_suites() -> None:
    def one(suite: str, index: int, four: float, eight: float) -> PromptRecord:
        arms = (a_text(TREE_4, four, [a_round(3)]), a_text(TREE_8, eight, [a_round(4)]))
        return a_prompt(plain(8.0), *arms, index=index, suite=suite)

    both = [one("s", i, 2.0, 8.0) for i in (0, 1)] + [one("t", i, 8.0, 4.0) for i in (0, 1)]
    paper = summary_of(*both, arms=(AR, TREE_4, TREE_8)).temperatures[0].paper
    budgets = {row.label: row.budgets for row in paper.rows}
    assert budgets["ddtree, one budget"] == (4, 4)
    assert budgets["ddtree, budget per suite"] == (4, 8)


def test_a_suite_of_one_prompt_is_left_out_of_the_papers_layout_by_name() -> None:
    paper = (
        summary_of(
            a_prompt(plain(4.0), a_text(TREE_4, 2.0, [a_round(3)]), suite="lonely"),
            *(a_prompt(plain(4.0), a_text(TREE_4, 2.0, [a_round(3)]), index=i) for i in (0, 1)),
        )
        .temperatures[0]
        .paper
    )
    assert paper.suites == ("s",)
    assert paper.left_out == ("lonely",)


def test_acceptance_is_counted_by_tokens_depth_and_rank() -> None:
    rounds = [a_round(3, ranks=(0, 2)), a_round(2, ranks=(0,)), a_round(1), a_round(1, nodes=0)]
    summary = summary_of(a_prompt(plain(4.0), a_text(TREE_4, 2.0, rounds)))
    found = summary.temperatures[0].rounds[1]
    assert found.histogram == (0, 2, 1, 1)
    assert found.at_least == (0.5, 0.25)
    assert found.ranks == (2, 0, 1)
    assert (found.drafted, found.nodes, found.delivered) == (0.75, 3.0, 1.75)


def test_calibration_compares_bins_and_weighs_their_error_by_nodes() -> None:
    low, high = [(0, 0.0, 0)] * NUM_BINS, [(0, 0.0, 0)] * NUM_BINS
    low[3], high[15] = (30, 3.0, 6), (10, 9.0, 5)
    text = a_text(TREE_4, 2.0, [a_round(3)])
    summary = summary_of(
        a_prompt(plain(4.0), replace(text, node_bins=tuple(low))),
        a_prompt(plain(4.0), replace(text, node_bins=tuple(high)), index=1),
    )
    found = summary.temperatures[0].rounds[1].calibration
    assert found is not None
    assert found.predicted == pytest.approx((0.1, 0.9))
    assert found.observed == pytest.approx((0.2, 0.5))
    assert found.num_nodes == (30, 10)
    assert found.error == pytest.approx((30 * 0.1 + 10 * 0.4) / 40)
    assert len(BIN_EDGES) == NUM_BINS - 1


def test_a_rounds_milliseconds_add_up_to_what_the_generation_took() -> None:
    # 1 s of prefill, 3 rounds of 1 s, and half a second that no stage had.
    text = a_text(TREE_4, 4.5, [a_round(3)] * 3)
    ms = summary_of(a_prompt(plain(4.0), text)).temperatures[0].rounds[1].ms
    assert (ms.draft, ms.verify, ms.walk) == (250.0, 500.0, 250.0)
    assert ms.other == pytest.approx(500 / 3)
    assert ms.total == pytest.approx(3500 / 3)


def test_the_cost_model_is_exact_where_the_machine_obeys_the_profile() -> None:
    # Verify: 1 s for one row, 1.5 s for five; a draft 0.5 s. Plain round 1 s, ours 2 s.
    profile = CostProfile(contexts=(64,), rows=(1, 5), verify=((1.0, 1.5),), draft=0.5)
    drafted = replace(a_round(3), seconds=StageSeconds(draft=0.5, verify=1.5))
    ours = a_text(TREE_4, 1.0 + 3 * 2.0, [drafted] * 3)
    summary = summary_of(a_prompt(plain(10.0), ours), profile=profile)
    base, found = summary.temperatures[0].predictions
    assert (base.predicted_ms, base.measured_ms, base.predicted_speedup) == (1000.0, 1000.0, 1.0)
    assert (found.predicted_ms, found.measured_ms) == (2000.0, 2000.0)
    assert found.predicted_rounds_speedup == found.measured_rounds_speedup == 1.5
    # 10 tokens each: 10 s against 7 s with the prefill.
    assert found.predicted_speedup == found.measured_speedup == pytest.approx(10 / 7)


def test_a_tree_of_the_root_alone_still_cost_a_drafter_pass() -> None:
    profile = CostProfile(contexts=(64,), rows=(1, 5), verify=((1.0, 1.5),), draft=0.5)
    in_vain = replace(a_round(1, nodes=0), seconds=StageSeconds(draft=0.5, verify=1.0))
    summary = summary_of(a_prompt(plain(10.0), a_text(TREE_4, 4.0, [in_vain])), profile=profile)
    assert summary.temperatures[0].predictions[1].predicted_ms == 1500.0


def test_without_a_profile_nothing_is_predicted() -> None:
    summary = summary_of(a_prompt(plain(4.0), a_text(TREE_4, 2.0, [a_round(3)] * 3)))
    assert summary.temperatures[0].predictions == ()
    assert all(point.predicted is None for point in summary.costs_by_rows)


def test_verify_costs_are_grouped_by_rows_and_by_context() -> None:
    texts = [a_text(TREE_4, 9.0, [a_round(2, context=c)] * 5) for c in (10, 2000)]
    summary = summary_of(*(a_prompt(plain(9.0), t, index=i) for i, t in enumerate(texts)))
    assert [(p.at, p.num_rounds, p.median) for p in summary.costs_by_rows] == [
        (1.0, 18, 750.0),
        (5.0, 10, 500.0),
    ]
    curves = {curve.arm: curve.points for curve in summary.costs_by_context}
    assert [point.at for point in curves["ddtree-4"]] == [10.0, 2000.0]


def test_every_disagreement_is_listed_with_its_place() -> None:
    text = a_text(TREE_4, 2.0, [a_round(3)])
    other = replace(text, token_ids=(0, 1, 2, 9, 4))
    shorter = replace(text, token_ids=(0, 1))
    summary = summary_of(
        a_prompt(plain(4.0), text),
        a_prompt(plain(4.0), other, index=1),
        a_prompt(plain(4.0), shorter, index=2),
    )
    assert (summary.num_agreed, summary.num_records) == (1, 3)
    found = [(d.id, d.arm, d.first_difference) for d in summary.disagreements]
    assert found == [("s/1", "ddtree-4", 3), ("s/2", "ddtree-4", 2)]


def test_a_text_without_a_round_has_no_part_in_tau() -> None:
    ended = a_text(TREE_4, 1.0, num_tokens=1)
    (at,) = summary_of(
        a_prompt(plain(4.0), ended),
        a_prompt(plain(4.0), a_text(TREE_4, 2.0, [a_round(3)]), index=1),
    ).temperatures
    found = cell(at, "ddtree-4", "s").tau
    assert found is not None
    assert (found.value, found.low) == (3.0, None)


def test_json_has_every_number_and_none_that_json_does_not_know() -> None:
    run = make_run(
        Made(suites={"a": 3, "b": 1}, outside=("prompt-lookup",), temperatures=(0.0, 1.0))
    )
    summary = summarise(run, FEW)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    raw = json.loads(summary.as_json(), parse_constant=refuse)
    assert raw["format"] == "ddtree-bench-report"
    assert raw["bootstrap"] == {"num_resamples": 200, "level": 0.95, "seed": 0}
    first = raw["temperatures"][0]["rows"][1]["cells"][0]["speedup"]
    expected = summary.temperatures[0].rows[1].cells[0]
    assert expected is not None
    assert first == asdict(expected.speedup)
    assert math.isfinite(first["low"])
