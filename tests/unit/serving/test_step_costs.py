"""Costs of a step: lines between what was measured, corrected by what steps take, calm in noise."""

import pickle
from collections.abc import Callable

import numpy as np
import pytest

from ddtree.serving.step_costs import StepCosts

ROWS, SECONDS = (1, 4, 8, 16, 32, 64), (0.010, 0.010, 0.011, 0.012, 0.015, 0.025)


def costs() -> StepCosts:
    return StepCosts.measured(ROWS, SECONDS, draft_requests=(1, 8), draft_seconds=(0.002, 0.003))


def run(
    world: Callable[[int, int], float], num_steps: int, *, seed: int = 0, noise: float = 0.0
) -> StepCosts:
    """Steps of many sizes, of which every third drafts nothing."""
    rng, found = np.random.default_rng(seed), costs()
    for step in range(num_steps):
        drafted = 0 if step % 3 == 0 else 4
        rows = int(rng.integers(1, 60))
        seconds = world(rows, drafted) * float(np.exp(noise * rng.standard_normal()))
        found.observe(num_rows=rows, num_drafted=drafted, seconds=seconds)
    return found


def as_measured(rows: int, drafted: int) -> float:
    return costs().verify_s(rows) + costs().draft_s(drafted)


def all_of(found: StepCosts) -> list[float]:
    return [*found.verify_by_rows(1, 100), *map(found.draft_s, range(20)), found.slowness]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [(1, 0.010), (2, 0.010), (6, 0.0105), (24, 0.0135), (64, 0.025), (96, 0.035)],
)
def test_between_points_costs_lie_on_lines_and_beyond_they_go_on(
    rows: int, expected: float
) -> None:
    assert costs().verify_s(rows) == pytest.approx(expected)


def test_drafter_passes_are_by_requests_and_none_is_free() -> None:
    found = [costs().draft_s(n) for n in (0, 1, 8, 15)]
    assert found == pytest.approx([0.0, 0.002, 0.003, 0.004])


def test_costs_by_rows_are_those_of_each_number() -> None:
    found = costs()
    assert found.verify_by_rows(3, 80).tolist() == [found.verify_s(n) for n in range(3, 83)]


def test_fewer_rows_than_measured_cost_what_the_fewest_do() -> None:
    found = StepCosts.measured((8, 16), (0.01, 0.02), draft_requests=(4,), draft_seconds=(0.002,))
    assert found.verify_s(1) == 0.01
    assert found.draft_s(1) == 0.002


def test_one_point_is_enough() -> None:
    found = StepCosts.measured((8,), (0.01,), draft_requests=(1,), draft_seconds=(0.002,))
    assert found.verify_by_rows(1, 20).tolist() == [0.01] * 20
    found.observe(num_rows=8, num_drafted=0, seconds=0.01)
    assert found.verify_s(8) == 0.01


def test_a_measurement_that_falls_is_noise() -> None:
    found = StepCosts.measured(
        (1, 2, 3), (0.02, 0.01, 0.03), draft_requests=(1, 2), draft_seconds=(0.002, 0.001)
    )
    assert [found.verify_s(n) for n in (1, 2, 3)] == [0.02, 0.02, 0.03]
    assert found.draft_s(2) == 0.002


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [
        ((), ()),
        ((1, 2), (1.0,)),
        ((2, 1), (1.0, 1.0)),
        ((1, 1), (1.0, 1.0)),
        ((0, 1), (1.0, 1.0)),
        ((1,), (0.0,)),
        ((1,), (float("nan"),)),
        ((1,), (float("inf"),)),
    ],
)
def test_points_that_make_no_table_are_a_bug(
    rows: tuple[int, ...], seconds: tuple[float, ...]
) -> None:
    with pytest.raises(AssertionError):
        StepCosts.measured(rows, seconds, draft_requests=(1,), draft_seconds=(1.0,))
    with pytest.raises(AssertionError):
        StepCosts.measured((1,), (1.0,), draft_requests=rows, draft_seconds=seconds)


def test_a_clock_that_stands_still_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="stands still"):
        costs().observe(num_rows=1, num_drafted=0, seconds=0.0)


def test_steps_that_take_what_was_measured_change_nothing() -> None:
    assert all_of(run(as_measured, 200)) == pytest.approx(all_of(costs()), rel=1e-9)


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_a_machine_of_another_speed_changes_nothing_but_the_slowness(factor: float) -> None:
    found = run(lambda rows, drafted: factor * as_measured(rows, drafted), 200)
    assert all_of(found)[:-1] == pytest.approx(all_of(costs())[:-1], rel=1e-9)
    assert found.slowness == pytest.approx(factor)


def test_rows_that_are_dearer_than_measured_are_found_out_where_steps_were() -> None:
    def world(rows: int, drafted: int) -> float:
        return as_measured(rows, drafted) * (1.0 + 0.02 * max(0, rows - 8))

    found = run(world, 600)
    ratios = [found.verify_s(n) / world(n, 0) * world(8, 0) / found.verify_s(8) for n in ROWS[:-1]]
    assert ratios == pytest.approx([1.0] * len(ratios), abs=0.08)


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_drafter_passes_that_cost_other_than_measured_are_found_out(factor: float) -> None:
    """Steps without them are there for comparison."""
    found = run(lambda rows, n: costs().verify_s(rows) + factor * costs().draft_s(n), 600)
    assert found.draft_s(4) / found.verify_s(16) == pytest.approx(
        factor * costs().draft_s(4) / costs().verify_s(16), rel=0.15
    )


def test_costs_never_fall_with_rows_whatever_steps_take() -> None:
    found = run(lambda rows, drafted: 0.05 if rows < 20 else 0.001, 300)
    assert np.all(np.diff(found.verify_by_rows(1, 200)) >= 0)
    assert found.verify_s(1) > 0


def test_noise_is_averaged() -> None:
    found = run(as_measured, 600, noise=0.2)
    known = np.array(all_of(costs()))[:60]
    assert np.abs(np.array(all_of(found))[:60] / known - 1.0).mean() < 0.08


@pytest.mark.parametrize("when", [0, 1, 3, 50])
def test_a_step_that_took_a_hundred_times_as_long_is_forgiven(when: int) -> None:
    found, known = costs(), costs()
    for step in range(150):
        slow = 100.0 if step == when else 1.0
        found.observe(num_rows=16, num_drafted=4, seconds=slow * as_measured(16, 4))
        if step == when and when > 0:
            assert found.verify_s(16) < 1.5 * known.verify_s(16)
    assert found.verify_s(16) == pytest.approx(known.verify_s(16), rel=0.02)
    assert found.draft_s(4) == pytest.approx(known.draft_s(4), rel=0.02)
    assert found.slowness == pytest.approx(1.0, rel=0.02)


def test_a_compilation_in_the_first_step_does_not_make_what_follows_look_cheap() -> None:
    found = costs()
    found.observe(num_rows=16, num_drafted=4, seconds=30.0)
    for _ in range(4):
        found.observe(num_rows=16, num_drafted=4, seconds=as_measured(16, 4))
    assert found.verify_s(16) == pytest.approx(costs().verify_s(16), rel=1e-9)


def test_a_larger_size_than_ever_measured_corrects_the_last_point() -> None:
    found = costs()
    for _ in range(20):
        found.observe(num_rows=1, num_drafted=0, seconds=as_measured(1, 0))
        found.observe(num_rows=200, num_drafted=0, seconds=2.0 * as_measured(200, 0))
    before = costs().verify_s(200) / costs().verify_s(1)
    assert found.verify_s(200) / found.verify_s(1) == pytest.approx(2.0 * before, rel=0.15)


def test_a_copy_sent_to_another_rank_learns_the_same_from_the_same() -> None:
    first = run(as_measured, 50, noise=0.3)
    other = pickle.loads(pickle.dumps(first))
    for found in (first, other):
        for step in range(50):
            found.observe(num_rows=1 + step % 40, num_drafted=step % 3, seconds=0.01 + step / 1e4)
    assert all_of(first) == all_of(other)
