"""Order and learning rate depend on the seed and the step alone."""

from __future__ import annotations

import itertools

import pytest

from ddtree.train.schedule import BatchPlan, held_out, learning_rate

LENGTHS = [5, 9, 3, 7, 7, 2, 8, 4, 6, 1, 12]


def test_every_sample_comes_at_most_once_an_epoch() -> None:
    plan = BatchPlan(LENGTHS, 2, seed=0)
    epoch = [plan.batch(step) for step in range(plan.steps_per_epoch)]
    assert {number for number, _ in epoch} == {0}
    places = [place for _, batch in epoch for place in batch]
    assert len(places) == len(set(places)) == 10
    assert plan.batch(plan.steps_per_epoch)[0] == 1


def test_a_step_asked_for_alone_is_the_same_step() -> None:
    plan = BatchPlan(LENGTHS, 3, seed=4)
    steps = [plan.batch(step) for step in range(9)]
    assert [BatchPlan(LENGTHS, 3, seed=4).batch(step) for step in range(9)] == steps


def test_epochs_and_seeds_differ_in_order() -> None:
    plan = BatchPlan(LENGTHS, 2, seed=0)
    first = [plan.batch(step)[1] for step in range(5)]
    second = [plan.batch(step)[1] for step in range(5, 10)]
    other = [BatchPlan(LENGTHS, 2, seed=1).batch(step)[1] for step in range(5)]
    assert first != second
    assert first != other


def test_a_batch_larger_than_the_set_is_the_whole_set() -> None:
    assert sorted(BatchPlan([3, 1], 8, seed=0).batch(0)[1]) == [0, 1]


def test_the_learning_rate_rises_stays_and_falls() -> None:
    rates = [
        learning_rate(step, peak=2.0, warmup=4, total=100, decay_share=0.5) for step in range(100)
    ]
    assert rates[0] == pytest.approx(0.5)
    assert rates[3] == rates[50] == pytest.approx(2.0)
    assert rates[-1] < 0.12
    assert all(a >= b for a, b in itertools.pairwise(rates[3:]))


def test_about_the_share_of_the_prompts_is_held_out_whatever_the_response() -> None:
    chosen = [held_out([number, 7], 0.1) for number in range(2000)]
    assert 150 < sum(chosen) < 250
    assert chosen == [held_out((number, 7), 0.1) for number in range(2000)]
