"""Costs: interpolated between what was measured, kept by machine and pair, never in the way."""

import json
from pathlib import Path

import pytest

from ddtree import costs
from ddtree.costs import ROWS_ON_CPU, CostProfile, measure, profile_for
from tests.support.models import dflash_drafter, tiny_target

PROFILE = CostProfile(
    contexts=(100, 200), rows=(1, 5, 9), verify=((1.0, 2.0, 4.0), (2.0, 3.0, 5.0)), draft=0.5
)


@pytest.mark.parametrize(
    ("rows", "context", "expected"),
    [(1, 100, 1.0), (3, 100, 1.5), (9, 200, 5.0), (13, 100, 6.0), (5, 150, 2.5), (1, 400, 4.0)],
)
def test_costs_are_interpolated_and_carried_on(rows: int, context: int, expected: float) -> None:
    assert PROFILE.verify_s(rows, context) == pytest.approx(expected)


def test_a_shorter_context_than_measured_is_never_free() -> None:
    assert PROFILE.verify_s(1, 1) == 1.0


def test_one_context_is_enough() -> None:
    one = CostProfile(contexts=(100,), rows=(1, 5), verify=((1.0, 2.0),), draft=0.5)
    assert one.verify_s(3, 4000) == 1.5


def test_a_measurement_covers_its_grid_and_rises() -> None:
    target = tiny_target("llama")
    profile = measure(target, dflash_drafter(target))
    assert profile.rows == ROWS_ON_CPU
    assert profile.contexts[-1] + profile.rows[-1] <= target.context_limit
    assert profile.draft > 0
    for row in profile.verify:
        assert row[0] > 0
        assert list(row) == sorted(row)
    shorter, longer = profile.verify[0], profile.verify[-1]
    assert all(s <= t for s, t in zip(shorter, longer, strict=True))


def test_a_slow_target_is_measured_in_few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "_SLOW_S", 0.0)
    target = tiny_target("llama")
    profile = measure(target, dflash_drafter(target))
    assert (len(profile.rows), len(profile.contexts)) == (3, 1)


def test_a_profile_is_measured_once_and_then_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target("llama")
    drafter = dflash_drafter(target)
    said: list[str] = []
    first = profile_for(target, drafter, tmp_path / "profiles", say=said.append)
    assert len(said) == 1
    monkeypatch.setattr(costs, "measure", lambda *pair: pytest.fail("measured again"))
    assert profile_for(target, drafter, tmp_path / "profiles", say=said.append) == first
    assert len(said) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"key": 1}', '{"key": null, "profile": {}}'])
def test_a_file_that_cannot_be_used_is_replaced(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "measure", lambda *pair: PROFILE)
    target = tiny_target("llama")
    drafter = dflash_drafter(target)
    profile_for(target, drafter, tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(text)
    assert profile_for(target, drafter, tmp_path) == PROFILE
    assert json.loads(path.read_text())["profile"]["draft"] == 0.5


def test_another_pair_or_thread_count_has_a_profile_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "measure", lambda *pair: PROFILE)
    for architecture in ("llama", "qwen2"):
        target = tiny_target(architecture)
        profile_for(target, dflash_drafter(target), tmp_path)
    monkeypatch.setattr(costs.torch, "get_num_threads", lambda: 77)
    profile_for(target, dflash_drafter(target), tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_folder_that_cannot_be_written_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "measure", lambda *pair: PROFILE)
    (tmp_path / "file").write_text("in the way")
    target = tiny_target("llama")
    assert profile_for(target, dflash_drafter(target), tmp_path / "file") == PROFILE
