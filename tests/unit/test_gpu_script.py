"""The script for a lent GPU runs whole on a CPU, and no section can take the others with it."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ddtree.attention.backends import BACKENDS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("gpu.__main__")


def run(
    gpu: ModuleType, out: Path, monkeypatch: pytest.MonkeyPatch, *options: str
) -> dict[str, Any]:
    arguments = ["--device", "cpu", "--small", *options, "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["benchmarks/gpu", *arguments])
    gpu.main()
    return json.loads((out / "gpu.json").read_text())


@pytest.mark.usefixtures("unchecked")
def test_every_section_ends_well_on_a_cpu_and_the_report_is_whole(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(gpu, tmp_path, monkeypatch, "--here")
    sections = result["sections"]
    troubles = {name: part["failures"] for name, part in sections.items() if part["failures"]}
    assert troubles == {}
    assert {name: part["status"] for name, part in sections.items()} == dict.fromkeys(
        gpu.SECTIONS, "ok"
    )
    assert all(part["tables"] for part in sections.values())
    assert {"command", "commit", "versions", "machine"} <= set(result["card"])
    rows = sections["Qwen3-4B"]["tables"]["Verify, ms"]
    setup = gpu.Setup(device="cpu", small=True)
    assert [(row["T"], row["N"]) for row in rows] == [
        (length, count) for length in setup.contexts for count in setup.rows
    ]
    assert all(set(BACKENDS) <= set(row) for row in rows)
    text = (tmp_path / "gpu.md").read_text()
    for part in sections.values():
        assert all(f"### {title}" in text for title in part["tables"])
    assert [path.name for path in tmp_path.glob("*.partial")] == []


def test_it_runs_as_a_folder_and_says_how(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--small", "--only", "machine", "--out", str(tmp_path)]
    subprocess.run([sys.executable, "benchmarks/gpu", *options], cwd=BENCHMARKS.parent, check=True)
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert result["sections"]["machine"]["status"] == "ok"
    assert result["card"]["command"].startswith("python benchmarks/gpu/__main__.py --device cpu")


def test_a_spawned_process_finds_every_section(gpu: ModuleType) -> None:
    # It does not import `__main__`, which is what the script's first file is called.
    for section in gpu.SECTIONS.values():
        assert b"__main__" not in pickle.dumps(section.run)


def fails(setup: object, report: Any) -> None:
    report.row("Before", value=1)
    raise ValueError("on purpose")


def dies(setup: object, report: Any) -> None:
    report.row("Before", value=1)
    os._exit(9)


def hangs(setup: object, report: Any) -> None:
    report.row("Before", value=1)
    time.sleep(60)


def works(setup: object, report: Any) -> None:
    with report.case("broken"):
        raise ValueError("within")
    report.check("Holds", True, value=2)


# These sections compute nothing, so a forked child of a process with threads does no harm.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_section_that_fails_dies_or_hangs_leaves_what_it_found_and_the_others(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = {run.__name__: gpu.Section(run, 1) for run in (fails, dies, hangs, works)}
    monkeypatch.setattr(gpu, "SECTIONS", planted)
    monkeypatch.setattr(gpu, "GRACE_S", 0.3)
    monkeypatch.setattr(gpu, "start_method", lambda setup: "fork")
    sections = run(gpu, tmp_path, monkeypatch, "--minutes", "0.05")["sections"]
    assert {name: part["status"] for name, part in sections.items()} == dict.fromkeys(
        planted, "failed"
    )
    said = {name: part["failures"][0]["traceback"] for name, part in sections.items()}
    assert "ValueError: on purpose" in said["fails"]
    assert "exit code 9" in said["dies"]
    assert "past its time" in said["hangs"]
    assert "ValueError: within" in said["works"]
    for name in ("fails", "dies", "hangs"):
        assert sections[name]["tables"] == {"Before": [{"value": 1}]}
    assert sections["works"]["tables"] == {"Holds": [{"value": 2, "ok": True}]}
    text = (tmp_path / "gpu.md").read_text()
    assert all(failure in text for failure in said.values())


def test_a_check_that_does_not_hold_fails_its_section_and_lateness_is_on_record(
    gpu: ModuleType,
) -> None:
    found = gpu.Found()
    report = gpu.Report(lambda message: found.take(*message), deadline=time.monotonic())
    assert report.late("the rest")
    found.end(1.0)
    assert (found.status, found.skipped) == ("partial", ["the rest"])
    report.check("Holds", False)
    found.end(1.0)
    assert found.status == "failed"
