"""Drafters that are no DFlash, on the command line: used where they can be, refused where not."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers.utils import logging as transformers_logging

from ddtree.cli import app as cli
from tests.support.checkpoints import edit_json, write_target
from tests.support.sources import medusa_tensors, write_medusa, write_pard

pytestmark = pytest.mark.usefixtures("unchecked")

WRITERS = {"medusa": write_medusa, "pard": write_pard}
SHORT = ("--max-new-tokens", "8", "--budget", "8")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `ddtree` in this process; gives exit code, output and messages without line breaks."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ddtree", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, " ".join(captured.err.split())

    yield call
    transformers_logging.set_verbosity_warning()
    transformers_logging.enable_progress_bar()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("sources") / "target")


@pytest.fixture(params=WRITERS)
def drafter(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return WRITERS[request.param](tmp_path / request.param)


def test_generate_takes_them_and_says_what_they_are(drafter: Path, run: Run, target: Path) -> None:
    pair = ("--target", str(target), "--drafter", str(drafter))
    code, out, err = run("generate", "hello", *pair, *SHORT, "--json")
    assert code == 0
    assert "Medusa heads" in err or "a PARD drafter" in err
    alone = ("--target", str(target), "--method", "ar", *SHORT[:2])
    _, plain, _ = run("generate", "hello", *alone, "--json")
    assert json.loads(out)["token_ids"] == json.loads(plain)["token_ids"]


def test_doctor_reads_what_they_declare(drafter: Path, run: Run, target: Path) -> None:
    for weights in drafter.glob("*.safetensors"):
        weights.unlink()
    pair = ("--target", str(target), "--drafter", str(drafter))
    code, out, _ = run("doctor", *pair)
    assert code == 0
    assert "2 or more Medusa heads" in out or "mask token 7, 12 positions in a pass" in out
    key = "pard_token" if drafter.name == "pard" else "medusa_num_heads"
    edit_json(drafter / "config.json", **{key: -1})
    code, out, _ = run("doctor", *pair)
    assert code == 2
    assert f"config.json: {key}: expected a whole number" in out


def test_evaluate_measures_them(drafter: Path, run: Run, target: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "held-out.jsonl", tmp_path / "out"
    prompts.write_text('{"prompt": "hello"}\n')
    pair = ("--target", str(target), "--drafter", str(drafter))
    options = ("--prompts", str(prompts), "--out", str(out), "--max-new-tokens", "4")
    code, _, err = run("train", "evaluate", *pair, *options, "--budgets", "3")
    assert code == 0
    assert "same tokens on 1 of 1 prompts" in err
    # Other weights under the same name are another drafter: their results are not mixed.
    if drafter.name == "pard":
        write_pard(drafter, "qwen3-tied")
    else:
        write_medusa(drafter, tensors=medusa_tensors(seed=1))
    code, _, err = run("train", "evaluate", *pair, *options, "--budgets", "3")
    assert code == 2
    assert "drafter_sha256" in err


def test_convert_refuses_them_by_name(drafter: Path, run: Run, tmp_path: Path) -> None:
    code, _, err = run("convert", str(drafter), "--to", "speculators", "--out", str(tmp_path / "o"))
    assert code == 2
    assert "expected a DFlash drafter, got Medusa heads" in err or "got a PARD drafter" in err
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("declared", [{}, {"model_type": ""}], ids=str)
def test_heads_are_no_target(declared: dict[str, object], run: Run, tmp_path: Path) -> None:
    heads = write_medusa(tmp_path / "heads", **declared)
    code, _, err = run("generate", "hello", "--target", str(heads), "--method", "ar")
    assert code == 2
    assert "expected a causal language model, got the Medusa heads" in err
