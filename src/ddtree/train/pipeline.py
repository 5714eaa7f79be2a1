"""All stages of a recipe in one go: respond, features, fit, evaluate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ddtree.errors import OptionError
from ddtree.models.loading import load_drafter
from ddtree.pair import Pair
from ddtree.train.network import NetworkConfig, spread_taps
from ddtree.train.recipe import Recipe
from ddtree.train.run import FeaturesJob, RespondJob, TargetSource, run_features, run_respond
from ddtree.train.run_evaluate import EvaluateJob, run_evaluate
from ddtree.train.run_fit import FitJob, run_fit


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
    layer_ids = _layer_ids(job.target, recipe.network)
    responses = recipe.responses
    if responses is None:
        _announce(console, "respond")
        run_respond(
            RespondJob(
                target=job.target,
                prompt_files=recipe.prompts,
                out=job.out,
                config=recipe.respond,
                layer_ids=layer_ids,
                num_workers=job.num_workers,
            ),
            console,
        )
        responses = job.out / "responses.jsonl"
    _announce(console, "features")
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
    _announce(console, "fit")
    drafter = run_fit(
        FitJob(
            target=job.target,
            samples=job.out / "samples",
            out=job.out / "fit",
            network=recipe.network,
            config=recipe.fit,
            start_from=recipe.start_from,
            num_workers=job.num_workers,
        ),
        console,
    )
    if recipe.evaluate_prompts:
        _announce(console, "evaluate")
        target = job.target.load()
        run_evaluate(
            EvaluateJob(
                pair=Pair(target, load_drafter(drafter, target)),
                files=recipe.evaluate_prompts,
                out=job.out / "evaluation",
                config=recipe.evaluate,
            ),
            console,
        )
    return drafter


def _layer_ids(target: TargetSource, network: NetworkConfig) -> tuple[int, ...]:
    return network.target_layer_ids or spread_taps(target.shape().num_layers)


def _announce(console: Console, stage: str) -> None:
    console.rule(stage, align="left")
