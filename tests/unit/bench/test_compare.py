"""Two runs side by side: paired by prompt, or refused."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from ddtree.bench.records import ArmRecord, PromptRecord, Run
from ddtree.bench.run_compare import compare_runs
from ddtree.bench.run_pairs import MEAN, changes_between, differing_conditions
from ddtree.bench.statistics import Bootstrap
from ddtree.errors import CheckpointError, OptionError
from tests.support.bench_runs import Made, make_run

FEW = Bootstrap(num_resamples=500)
RUN = make_run(Made(suites={"a": 8, "b": 8}, turns={"b": 2}))


def with_prompts(run: Run, change: Callable[[PromptRecord], PromptRecord]) -> Run:
    return replace(run, prompts=tuple(change(prompt) for prompt in run.prompts))


def faster(run: Run, arm: str, times: float) -> Run:
    """The same, but an arm took less time."""

    def quicken(record: ArmRecord) -> ArmRecord:
        if record.arm != arm:
            return record
        return replace(record, elapsed_s=record.elapsed_s / times)

    return with_prompts(run, lambda p: replace(p, arms=tuple(map(quicken, p.arms))))


def test_a_run_beside_itself_has_changed_nothing() -> None:
    (at,) = changes_between(RUN, RUN, FEW)
    rows = (*at.speedups, *at.taus, *at.plain_speeds)
    assert {row.arm for row in at.speedups} == {"dflash", "ddtree-8", "ddtree-16", "ddtree-auto"}
    assert {row.suite for row in rows} == {"a", "b", MEAN}
    for row in rows:
        change = row.figure.change
        assert row.figure.before == row.figure.after
        assert (change.value, change.low, change.high) == (0.0, 0.0, 0.0)


def test_pairing_finds_a_change_that_is_smaller_than_the_spread_of_prompts() -> None:
    (at,) = changes_between(RUN, faster(RUN, "ddtree-8", 1.02), FEW)
    changes = {(row.arm, row.suite): row.figure.change for row in at.speedups}
    found = changes["ddtree-8", MEAN]
    assert found.low is not None
    assert 0 < found.low < found.value
    assert changes["dflash", MEAN].high == 0.0
    assert all(row.figure.change.value == 0 for row in at.taus)


def test_a_faster_baseline_shows_as_such_and_as_smaller_speedups() -> None:
    (at,) = changes_between(RUN, faster(RUN, "ar", 2.0), FEW)
    for row in at.speedups:
        assert row.figure.after == pytest.approx(row.figure.before / 2)
    for row in at.plain_speeds:
        assert row.figure.after == pytest.approx(2 * row.figure.before)


def test_only_the_prompts_of_both_runs_are_compared() -> None:
    # What the second run lacks is slow in the first: it must not weigh there either.
    kept = tuple(p for p in RUN.prompts if p.index < 5)
    slow = with_prompts(RUN, lambda p: p if p.index < 5 else replace(p, arms=_slower(p.arms)))
    (at,) = changes_between(slow, replace(RUN, prompts=kept), FEW)
    assert all(row.figure.change.value == 0 for row in (*at.speedups, *at.taus, *at.plain_speeds))
    assert "a: 5 turns paired, of 8 and 5" in at.notes[0]
    assert "b: 10 turns paired, of 16 and 10" in at.notes[1]


def _slower(arms: tuple[ArmRecord, ...]) -> tuple[ArmRecord, ...]:
    return tuple(replace(arm, elapsed_s=9 * arm.elapsed_s, rounds=arm.rounds[:2]) for arm in arms)


def test_the_order_of_measuring_does_not_matter() -> None:
    other = faster(RUN, "dflash", 1.1)
    shuffled = replace(other, prompts=other.prompts[::-1])
    assert changes_between(RUN, other, FEW)[0].speedups == (
        changes_between(RUN, shuffled, FEW)[0].speedups
    )


def test_a_suite_without_common_prompts_is_refused_with_a_note() -> None:
    renamed = with_prompts(RUN, lambda p: replace(p, id=f"x{p.id}") if p.suite == "a" else p)
    (at,) = changes_between(RUN, renamed, FEW)
    assert {row.suite for row in at.speedups} == {"b"}
    assert at.notes[0] == "a: refused, no prompt is in both runs."
    only_a = replace(RUN, prompts=tuple(p for p in RUN.prompts if p.suite == "a"))
    assert changes_between(only_a, RUN, FEW)[0].notes[-1] == (
        "b: refused, the first run does not have it."
    )
    assert changes_between(RUN, only_a, FEW)[0].notes[-1] == (
        "b: refused, the second run does not have it."
    )


def test_one_pair_has_no_interval() -> None:
    one = replace(RUN, prompts=tuple(p for p in RUN.prompts if p.id == "b/0"))
    (at,) = changes_between(one, one, FEW)
    assert all(row.figure.change.low is None for row in at.speedups)


def test_other_conditions_are_named() -> None:
    assert differing_conditions(RUN, RUN) == ()
    options = {**RUN.card["options"], "max_new_tokens": 99}
    suites = {**RUN.card["suites"], "a": {"sha256": "1"}}
    card = {**RUN.card, "target": "x", "machine": "y", "options": options, "suites": suites}
    assert differing_conditions(RUN, replace(RUN, card=card)) == (
        "target: made-up-target | x",
        "machine: 2 cores, made up | y",
        "max_new_tokens: 40 | 99",
        "prompts of a: 00000000 | 1",
    )


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs, of which the second has other prompts in suite b and another machine."""
    other = with_prompts(RUN, lambda p: replace(p, id=f"x{p.id}") if p.suite == "b" else p)
    other = replace(other, card={**other.card, "machine": "another"})
    for name, run in (("one", RUN), ("two", other)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(run.as_json())
    return tmp_path / "one", tmp_path / "two"


def test_the_tables_say_it_in_eighty_columns(folders: tuple[Path, Path]) -> None:
    out = io.StringIO()
    compare_runs(*folders, Console(file=out, width=80))
    said = out.getvalue()
    assert "Not alike (A | B): machine: 2 cores, made up | another" in said
    assert "b: refused, no prompt is in both runs." in said
    row = next(line for line in said.split("\n") if line.startswith("ddtree-auto"))
    assert row.split()[-3:] == ["+0.00", "[+0.00,", "+0.00]"]


def test_runs_without_a_common_prompt_are_refused(tmp_path: Path) -> None:
    other = replace(RUN, prompts=tuple(replace(p, temperature=0.5) for p in RUN.prompts))
    for name, run in (("one", RUN), ("two", other)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(run.as_json())
    with pytest.raises(OptionError, match="none in common"):
        compare_runs(tmp_path / "one", tmp_path / "two", Console(file=io.StringIO()))
    with pytest.raises(CheckpointError, match="finished"):
        compare_runs(tmp_path / "one", tmp_path / "three", Console(file=io.StringIO()))
