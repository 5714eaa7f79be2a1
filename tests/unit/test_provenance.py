"""Where a result comes from is said truly, or not at all."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from ddtree import provenance
from tests.support.drafters import right_for
from tests.support.models import dflash_drafter, tiny_target


def test_all_of_it_is_json() -> None:
    found = provenance.origin()
    assert list(found) == ["command", "commit", "versions", "machine", "date"]
    assert json.loads(json.dumps(found)) == found
    assert "threads" in str(found["machine"])


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["/home/me/.venv/bin/ddtree", "train", "--out", "a b"], "ddtree train --out 'a b'"),
        (["benchmarks/memory.py", "--seed", "1"], "python benchmarks/memory.py --seed 1"),
    ],
)
def test_the_command_can_be_typed_again(
    arguments: list[str], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", arguments)
    assert provenance.origin()["command"] == command


def test_the_commit_is_the_packages_own_and_not_that_of_a_checkout_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        name = ("-c", "user.name=me", "-c", "user.email=me@example.org")
        subprocess.run(["git", *name, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    git("commit", "--allow-empty", "--message", "first")
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=tmp_path, check=True, capture_output=True, text=True
    ).stdout.strip()
    for place, found in (
        (tmp_path / "src" / "ddtree", head[:12]),
        (tmp_path / ".venv" / "lib" / "site-packages" / "ddtree", None),
    ):
        monkeypatch.setattr(provenance, "__file__", str(place / "provenance.py"))
        assert provenance.origin()["commit"] == found


def test_a_drafter_is_told_by_its_weights_packed_or_not() -> None:
    target = tiny_target("llama")
    plain, packed, other = (dflash_drafter(target) for _ in range(3))
    packed.pack()
    said = provenance.drafter_digest(plain)
    assert said is not None
    assert provenance.drafter_digest(packed) == said
    with torch.no_grad():
        other.network.layers[0].mlp.up_proj.weight[0, 0] += 1
    assert provenance.drafter_digest(other) != said
    assert provenance.drafter_digest(right_for(1, [1, 2], 9, 1)) is None
