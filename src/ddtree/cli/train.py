"""The command line of training: `ddtree train`, all stages of a recipe, or one stage alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ddtree.cli.options import (
    AllowUntestedOption,
    DeviceOption,
    DrafterOption,
    DtypeOption,
    TargetOption,
    load_pair,
)
from ddtree.errors import OptionError

if TYPE_CHECKING:
    from ddtree.train.recipe import Recipe

train = typer.Typer(help="Make a drafter for a target: all stages, or one of them.")

_DEFAULT_TARGET = "smollm2-135m"
_NumWorkers = Annotated[
    int, typer.Option(help="Processes; on a CPU as many as it has cores, if memory allows.")
]
_Recipe = Annotated[
    Path | None, typer.Option(help="TOML file with all options.", show_default="defaults")
]
_RecipeTarget = Annotated[
    str | None,
    typer.Option(
        help="Hub id, local folder, or the embedded smollm2-135m.",
        show_default=f"the recipe's, else {_DEFAULT_TARGET}",
    ),
]
_NumSteps = Annotated[int | None, typer.Option(help="Gradient steps.", show_default="the recipe's")]


@train.callback(invoke_without_command=True)
def train_all(
    context: typer.Context,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(help="JSON lines with a prompt or turns; repeatable.", show_default="recipe"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for everything; resumed if it is there.")
    ] = None,
    target: _RecipeTarget = None,
    recipe: _Recipe = None,
    num_steps: _NumSteps = None,
    num_workers: _NumWorkers = 1,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    allow_untested: AllowUntestedOption = False,
) -> None:
    """Make a drafter: respond, features, fit, evaluate. Or run one stage: see the commands."""
    if context.invoked_subcommand is not None:
        return
    if out is None:
        raise OptionError(
            "--out",
            expected="a folder for responses, samples and the drafter",
            got="none",
            remedy="Give --out DIR, or see `ddtree train --help`.",
        )
    from ddtree.train.pipeline import TrainJob, run_train
    from ddtree.train.target_source import TargetSource

    wanted = _recipe(recipe, num_steps)
    if prompts:
        wanted = replace(wanted, prompts=tuple(prompts), responses=None)
    job = TrainJob(
        target=TargetSource(
            name=_target(target, wanted), device=device, dtype=dtype, allow_untested=allow_untested
        ),
        recipe=wanted,
        out=out,
        num_workers=num_workers,
    )
    run_train(job, Console(stderr=True))


@train.command("respond")
def train_respond(
    prompts: Annotated[
        list[Path], typer.Option(help="JSON lines with a prompt or turns; .gz too; repeatable.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for responses.jsonl; resumed if it is there.")],
    target: TargetOption = _DEFAULT_TARGET,
    max_new_tokens: Annotated[int, typer.Option(help="Length limit of a response.")] = 192,
    num_rows: Annotated[int, typer.Option(help="Requests that decode side by side.")] = 32,
    temperature: Annotated[float, typer.Option(help="Of the sampled responses.")] = 0.8,
    sampled_share: Annotated[
        float, typer.Option(help="Share that is sampled; the others are greedy.")
    ] = 0.4,
    samples_per_prompt: Annotated[
        int, typer.Option(help="Responses per prompt; from the second on all are sampled.")
    ] = 1,
    seed: Annotated[int, typer.Option(help="Decides what is sampled, and how.")] = 0,
    record_layers: Annotated[
        str,
        typer.Option(help="Target layers whose features are kept, like 1,8,14.", show_default="no"),
    ] = "",
    num_workers: _NumWorkers = 1,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    allow_untested: AllowUntestedOption = False,
) -> None:
    """Let the target answer prompts, as text for a drafter to learn from."""
    from ddtree.train.respond import RespondConfig
    from ddtree.train.run_respond import RespondJob, run_respond
    from ddtree.train.target_source import TargetSource

    config = RespondConfig(
        max_new_tokens=max_new_tokens,
        num_rows=num_rows,
        temperature=temperature,
        sampled_share=sampled_share,
        samples_per_prompt=samples_per_prompt,
        seed=seed,
    )
    job = RespondJob(
        target=TargetSource(name=target, device=device, dtype=dtype, allow_untested=allow_untested),
        prompt_files=prompts,
        out=out,
        config=config,
        layer_ids=_layer_ids(record_layers, "--record-layers"),
        num_workers=num_workers,
    )
    run_respond(job, Console(stderr=True))


@train.command("features")
def train_features(
    responses: Annotated[Path, typer.Option(help="File of stage respond, or like it; .gz too.")],
    out: Annotated[
        Path, typer.Option(help="Folder; its folder samples is resumed if it is there.")
    ],
    layers: Annotated[str, typer.Option(help="Target layers whose features are kept: 1,8,14.")],
    target: TargetOption = _DEFAULT_TARGET,
    num_workers: _NumWorkers = 1,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    allow_untested: AllowUntestedOption = False,
) -> None:
    """Keep what the target thinks of responses, where stage respond has not recorded it."""
    from ddtree.train.run_features import FeaturesJob, run_features
    from ddtree.train.target_source import TargetSource

    job = FeaturesJob(
        target=TargetSource(name=target, device=device, dtype=dtype, allow_untested=allow_untested),
        responses=responses,
        out=out,
        layer_ids=_layer_ids(layers, "--layers"),
        num_workers=num_workers,
    )
    run_features(job, Console(stderr=True))


@train.command("fit")
def train_fit(
    samples: Annotated[Path, typer.Option(help="Folder of samples, of respond or features.")],
    out: Annotated[Path, typer.Option(help="Folder for the drafter; resumed if it is there.")],
    target: _RecipeTarget = None,
    recipe: _Recipe = None,
    num_steps: _NumSteps = None,
    start_from: Annotated[
        str | None,
        typer.Option(help="Drafter to begin with.", show_default="the recipe's, else random"),
    ] = None,
    num_workers: _NumWorkers = 1,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    allow_untested: AllowUntestedOption = False,
) -> None:
    """Train a drafter on samples.

    The bar's tokens/s counts tokens of responses, each once for every block that predicts it.
    """
    from ddtree.train.run_fit import FitJob, run_fit
    from ddtree.train.target_source import TargetSource

    wanted = _recipe(recipe, num_steps)
    job = FitJob(
        target=TargetSource(
            name=_target(target, wanted), device=device, dtype=dtype, allow_untested=allow_untested
        ),
        samples=samples,
        out=out,
        network=wanted.network,
        config=wanted.fit,
        start_from=start_from or wanted.start_from,
        num_workers=num_workers,
    )
    run_fit(job, Console(stderr=True))


@train.command("evaluate")
def train_evaluate(
    prompts: Annotated[
        list[Path],
        typer.Option(help="Held-out prompts, JSON lines; each file is a suite; repeatable."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the results; resumed if it is there.")],
    target: TargetOption = _DEFAULT_TARGET,
    drafter: DrafterOption = None,
    budgets: Annotated[
        str, typer.Option(help="Budgets of the trees; the chain is always measured.")
    ] = "8,16,32",
    max_new_tokens: Annotated[int, typer.Option(help="Length limit of a response.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of sampled responses.")] = 0,
    limit: Annotated[
        int | None, typer.Option(help="First prompts of each file.", show_default="all")
    ] = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    allow_untested: AllowUntestedOption = False,
) -> None:
    """Measure a drafter on held-out prompts: tau, accuracy by depth, calibration."""
    from ddtree.train.evaluate import EvaluateConfig
    from ddtree.train.run_evaluate import EvaluateJob, parse_budgets, run_evaluate

    config = EvaluateConfig(
        budgets=parse_budgets(budgets),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        limit=limit,
    )
    pair = load_pair(
        target, drafter, device, dtype, needs_drafter=True, allow_untested=allow_untested
    )
    job = EvaluateJob(pair=pair, files=prompts, out=out, config=config)
    evaluation = run_evaluate(job, Console(stderr=True))
    if not evaluation.agree and str(pair.target.dtype) == "torch.float32":
        raise typer.Exit(1)


def _recipe(path: Path | None, num_steps: int | None) -> Recipe:
    """The recipe, or the defaults, with the number of steps that the command line asks for."""
    from ddtree.train.recipe import Recipe, read_recipe

    recipe = Recipe() if path is None else read_recipe(path)
    if num_steps is None:
        return recipe
    return replace(recipe, fit=replace(recipe.fit, num_steps=num_steps))


def _target(named: str | None, recipe: Recipe) -> str:
    """The target of the command line, else the recipe's, else the embedded one."""
    return named or recipe.target or _DEFAULT_TARGET


def _layer_ids(text: str, option: str) -> tuple[int, ...]:
    """Numbers between commas."""
    try:
        return tuple(int(part) for part in text.split(",")) if text.strip() else ()
    except ValueError as error:
        raise OptionError(
            option,
            expected="layer ids with commas between them",
            got=repr(text),
            remedy="For example 1,8,14,20,27.",
        ) from error
