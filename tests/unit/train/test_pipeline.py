"""`ddtree train`: prompts in, a drafter that drafts out, through the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import ddtree
from ddtree.cli import app as cli
from ddtree.train.pipeline import TrainJob
from ddtree.train.run_fit import FitJob
from tests.support.checkpoints import write_target
from tests.support.disk import fill_disk

pytestmark = pytest.mark.usefixtures("unchecked")

RECIPE = """
[respond]
max_new_tokens = 12
num_rows = 4
[network]
block_size = 4
num_layers = 1
target_layer_ids = [0, 2]
mask_token_id = 60
[fit]
num_steps = 4
sequences_per_step = 2
anchors_per_sequence = 3
validation_share = 0.3
[evaluate]
prompts = ["held-out.jsonl"]
max_new_tokens = 8
budgets = [3]
"""
Train = Callable[..., int]


@pytest.fixture
def train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Train:
    """Runs `ddtree train` in a folder with a target, prompts and a recipe; its exit code."""
    write_target(tmp_path / "target")
    texts = ["hello", "why not", "lazy dog", "brown fox", "over", "hi dog", "jumps", "the fox"]
    lines = [json.dumps({"prompt": text}) for text in texts]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "held-out.jsonl").write_text(json.dumps({"prompt": "quick dog"}) + "\n")
    (tmp_path / "recipe.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["ddtree", "train", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0)

    return call


ALL = ("--target", "target", "--recipe", "recipe.toml", "--prompts", "prompts.jsonl")


def test_one_command_makes_a_drafter_and_measures_it(train: Train) -> None:
    assert train(*ALL, "--out", "work") == 0
    pair = ddtree.load("target", "work/fit/drafter")
    texts = [
        pair.generate("hello", budget=16, method=method, max_new_tokens=10).token_ids
        for method in ("ar", "ddtree")
    ]
    assert texts[0] == texts[1]
    evaluation = json.loads(Path("work/evaluation/evaluation.json").read_text())
    assert evaluation
    assert Path("work/responses.jsonl").exists()


def test_the_same_command_again_finds_everything_done(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(*ALL, "--out", "work") == 0
    before = Path("work/fit/drafter/model.safetensors").read_bytes()
    capsys.readouterr()
    assert train(*ALL, "--out", "work") == 0
    assert "8 of 8 responses are there already" in capsys.readouterr().err
    assert Path("work/fit/drafter/model.safetensors").read_bytes() == before


def test_stages_alone_make_a_drafter_too(train: Train) -> None:
    assert train(*ALL, "--out", "work") == 0
    target = ("--target", "target")
    responses = ("--responses", "work/responses.jsonl", "--layers", "0,2")
    assert train("features", *target, *responses, "--out", "again") == 0
    fit = ("--samples", "again/samples", "--recipe", "recipe.toml", "--out", "again/fit")
    assert train("fit", *target, *fit) == 0
    assert Path("again/fit/drafter/model.safetensors").exists()
    evaluate = ("--drafter", "again/fit/drafter", "--prompts", "held-out.jsonl")
    assert train("evaluate", *target, *evaluate, "--max-new-tokens", "8", "--out", "found") == 0


@pytest.mark.parametrize("stage", ["", "fit"])
@pytest.mark.parametrize(
    ("flag", "recipe", "found"),
    [
        ("mine", 'target = "theirs"', "mine"),
        (None, 'target = "theirs"', "theirs"),
        (None, "", "smollm2-135m"),
    ],
    ids=str,
)
def test_the_target_is_the_flags_else_the_recipes_else_the_embedded_one(
    stage: str,
    flag: str | None,
    recipe: str,
    found: str,
    train: Train,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs: list[TrainJob | FitJob] = []
    monkeypatch.setattr("ddtree.train.pipeline.run_train", lambda job, console: jobs.append(job))
    monkeypatch.setattr("ddtree.train.run_fit.run_fit", lambda job, console: jobs.append(job))
    Path("recipe.toml").write_text(f"{recipe}\n{RECIPE}")
    arguments = ["--recipe", "recipe.toml", "--out", "work"]
    if stage:
        arguments = [stage, "--samples", "work/samples", *arguments]
    assert train(*arguments, *(["--target", flag] if flag else [])) == 0
    assert [job.target.name for job in jobs] == [found]


def test_a_full_disk_is_one_line_and_exit_code_2(
    train: Train, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_disk(monkeypatch, "metrics.jsonl")
    assert train(*ALL, "--out", "work") == cli.EXIT_USER_ERROR
    error = capsys.readouterr().err.strip().split("\n")[-1]
    assert error.startswith("error: work/fit/metrics.jsonl: expected a writable folder with room")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompts", "prompts.jsonl"), "--out: expected a folder"),
        (("--out", "work"), "--prompts: expected prompts"),
        ((*ALL[:4], "--prompts", "none.jsonl", "--out", "work"), "none.jsonl"),
        (("--out", "work", "--recipe", "none.toml"), "none.toml"),
        ((*ALL, "--out", "work", "--num-steps", "0"), "num_steps"),
        ((*ALL, "--out", "work", "--num-workers", "0"), "num_workers"),
    ],
    ids=str,
)
def test_mistakes_are_one_line_and_exit_code_2(
    arguments: tuple[str, ...], message: str, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(*arguments) == cli.EXIT_USER_ERROR
    error = capsys.readouterr().err.strip().split("\n")[-1]
    assert error.startswith("error: ")
    assert message in error
