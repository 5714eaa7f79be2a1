"""All stages of a recipe in one go: respond, features, fit, evaluate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ddtree.errors import OptionError
from ddtree.models.loading import load_drafter
from ddtree.pair import Pair
from ddtree.train.network import spread_taps
from ddtree.train.recipe import Recipe
from ddtree.train.run_evaluate import EvaluateJob, run_evaluate
from ddtree.train.run_features import FeaturesJob, run_features
from ddtree.train.run_fit import FitJob, run_fit
from ddtree.train.run_respond import RespondJob, run_respond
from ddtree.train.samples import samples_folder
from ddtree.train.target_source import TargetSource


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """A whole recipe.

    Args:
        target: for whom.
        recipe: see `Recipe`.
        out: folder; responses.jsonl, samples/, fit/ and evaluation/ go there.
        num_workers: processes of each stage.
    """

    target: TargetSource
    recipe: Recipe
    out: Path
    num_workers: int = 1


def run_train(job: TrainJob, console: Console) -> Path:
    """Make a drafter; every stage goes on where an earlier run stopped.

    Returns:
        The folder of the drafter.

    Raises:
        UserError: see the stages.
    """
    recipe = job.recipe
    if not recipe.prompts and recipe.responses is None:
        raise OptionError(
            "--prompts",
            expected="prompts for the target to answer, here or in the recipe",
            got="none",
            remedy='Give --prompts FILE, one {"prompt": "..."} a line.',
        )
    layer_ids = recipe.network.target_layer_ids or spread_taps(job.target.shape().num_layers)
    responses = recipe.responses
    if responses is None:
        _announce(console, "respond")
        responses = _respond(job, layer_ids, console)
    _announce(console, "features")
    _features(job, responses, layer_ids, console)
    _announce(console, "fit")
    drafter = _fit(job, console)
    if recipe.evaluate_prompts:
        _announce(console, "evaluate")
        _evaluate(job, drafter, console)
    return drafter


def _respond(job: TrainJob, layer_ids: tuple[int, ...], console: Console) -> Path:
    run_respond(
        RespondJob(
            target=job.target,
            prompt_files=job.recipe.prompts,
            out=job.out,
            config=job.recipe.respond,
            layer_ids=layer_ids,
            num_workers=job.num_workers,
        ),
        console,
    )
    return job.out / "responses.jsonl"


def _features(job: TrainJob, responses: Path, layer_ids: tuple[int, ...], console: Console) -> None:
    run_features(
        FeaturesJob(
            target=job.target,
            responses=responses,
            out=job.out,
            layer_ids=layer_ids,
            num_workers=job.num_workers,
        ),
        console,
    )


def _fit(job: TrainJob, console: Console) -> Path:
    return run_fit(
        FitJob(
            target=job.target,
            samples=samples_folder(job.out),
            out=job.out / "fit",
            network=job.recipe.network,
            config=job.recipe.fit,
            start_from=job.recipe.start_from,
            num_workers=job.num_workers,
        ),
        console,
    )


def _evaluate(job: TrainJob, drafter: Path, console: Console) -> None:
    target = job.target.load()
    run_evaluate(
        EvaluateJob(
            pair=Pair(target, load_drafter(drafter, target)),
            files=job.recipe.evaluate_prompts,
            out=job.out / "evaluation",
            config=job.recipe.evaluate,
        ),
        console,
    )


def _announce(console: Console, stage: str) -> None:
    console.rule(stage, align="left")
