"""The command line of the harness: `ddtree bench`, its report, and the comparison of two runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ddtree.cli.options import (
    AllowUntestedOption,
    DeviceOption,
    DrafterOption,
    DtypeOption,
    TargetOption,
    load_pair,
    say,
)
from ddtree.errors import OptionError

bench = typer.Typer(help="Measure methods side by side on suites of prompts, and report.")

_Folder = Annotated[Path, typer.Argument(help="Folder of a finished `ddtree bench`.")]


@bench.callback(invoke_without_command=True)
def run(
    context: typer.Context,
    suite: Annotated[
        list[str] | None,
        typer.Option(
            help="Suites by name, or NAME=FILE.jsonl; commas between them; repeatable.",
            show_default="the five packaged ones",
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(help="Of suites by name: packaged or hub.", show_default="packaged, else hub"),
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            help="ar, dflash, ddtree, ddtree-no-lookup; outside ones, greedy only: hf-generate, "
            "prompt-lookup, assistant. ar always runs: it is the baseline."
        ),
    ] = "ar,dflash,ddtree",
    budgets: Annotated[
        str | None, typer.Option(help="Of trees, each an arm.", show_default="8,16,32,auto")
    ] = None,
    assistant: Annotated[
        str | None,
        typer.Option(
            help="Hub id or folder of the small model of method assistant.", show_default="none"
        ),
    ] = None,
    temperature: Annotated[str, typer.Option(help="One or more; 0 is greedy.")] = "0",
    limit: Annotated[
        int | None, typer.Option(help="First prompts of each suite.", show_default="all")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Length limit of an answer.")] = 128,
    seed: Annotated[int, typer.Option(help="Of sampled answers and the order of arms.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results; resumed if it is there.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Write all rounds for `ddtree replay`; gone on with if it is there. Times then "
            "include the hearing.",
            show_default="none",
        ),
    ] = None,
    target: TargetOption = "smollm2-135m",
    drafter: DrafterOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    allow_untested: AllowUntestedOption = False,
) -> None:
    """Measure methods side by side: every arm on every prompt, in random order.

    A run that was stopped goes on with the same command. Or see the commands.
    """
    if context.invoked_subcommand is not None:
        return
    if out is None:
        raise OptionError(
            "--out",
            expected="a folder for the results",
            got="none",
            remedy="Give --out DIR, or see `ddtree bench --help`.",
        )
    from ddtree.bench.arms import check_arms, plan_arms
    from ddtree.bench.outside import load_assistant
    from ddtree.bench.plots import check_installed
    from ddtree.bench.run_bench import BenchJob, run_bench, show_disagreement
    from ddtree.bench.run_report import rebuild
    from ddtree.bench.runner import Bench, BenchConfig
    from ddtree.bench.workloads import PACKAGED_SUITES, read_suites

    config = BenchConfig(
        temperatures=_temperatures(temperature),
        max_new_tokens=max_new_tokens,
        seed=seed,
        limit=limit,
    )
    arms = plan_arms(methods, budgets)
    check_arms(arms, config.temperatures, assistant)
    check_installed()  # before hours of work whose report could not be drawn
    suites = read_suites(suite or PACKAGED_SUITES, source)  # type: ignore[arg-type]
    drafts = any(arm.method in ("dflash", "ddtree") for arm in arms)
    pair = load_pair(
        target, drafter, device, dtype, needs_drafter=drafts, allow_untested=allow_untested
    )
    small = None if assistant is None else load_assistant(assistant, pair.target, say=say)
    whole = Bench(pair=pair, arms=arms, config=config, assistant=small)
    console = Console(stderr=True)
    result = run_bench(BenchJob(bench=whole, suites=suites, out=out, trace=trace), console)
    rebuild(out, console)
    exact = str(pair.target.dtype) == "torch.float32"
    show_disagreement(result, console, exact=exact)
    if exact and any(record.disagreeing for record in result.prompts):
        raise typer.Exit(1)


@bench.command("report")
def report(folder: _Folder) -> None:
    """Make report.html and report.md anew from results.json."""
    from ddtree.bench.run_report import rebuild

    rebuild(folder, Console(stderr=True))


@bench.command("compare")
def compare(
    before: _Folder,
    after: Annotated[Path, typer.Argument(help="Folder of another one.")],
) -> None:
    """Set two runs side by side, with intervals."""
    from ddtree.bench.run_compare import compare_runs

    compare_runs(before, after, Console())


def _temperatures(text: str) -> tuple[float, ...]:
    """Numbers between commas."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise OptionError(
            "temperature",
            expected="numbers with commas between them",
            got=repr(text),
            remedy="For example --temperature 0,1.",
        ) from error
