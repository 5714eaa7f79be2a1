"""The program: `ddtree generate`, `doctor`, and the commands of the other files beside this one.

Text goes to standard output as it comes, everything else to standard error, so that output can be
piped. A user's mistake is one line and exit code 2.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

from ddtree import __version__
from ddtree.cli.bench import bench
from ddtree.cli.convert import convert
from ddtree.cli.options import (
    AllowUntestedOption,
    DeviceOption,
    DrafterOption,
    DtypeOption,
    TargetOption,
    load_pair,
    say,
)
from ddtree.cli.prompt import Request, parse_budget, read_prompt
from ddtree.cli.record import (
    ProfileOption,
    RecordFiles,
    TraceOption,
    TraceRanksOption,
    observer,
)
from ddtree.cli.replay import replay
from ddtree.cli.sampling import (
    BadWordOption,
    FrequencyPenaltyOption,
    JsonSchemaOption,
    LogitBiasOption,
    LogprobsOption,
    MinNewTokensOption,
    MinPOption,
    PresencePenaltyOption,
    RegexOption,
    RepetitionPenaltyOption,
    SuppressTokenOption,
    TypicalPOption,
    json_schema,
    logit_bias,
    refuse_logprobs_without_json,
)
from ddtree.cli.serve import serve
from ddtree.cli.train import train
from ddtree.cli.tree import tree
from ddtree.config import AUTO, DecodeConfig
from ddtree.errors import UserError

if TYPE_CHECKING:
    from ddtree.pair import Pair
    from ddtree.types import Generation

EXIT_USER_ERROR = 2

app = typer.Typer(
    name="ddtree",
    help="Faster generation with draft trees: the target model's own text, token for token.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")
app.add_typer(train, name="train")
app.command()(replay)
app.command()(convert)
app.command()(tree)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve)


def main() -> NoReturn:
    """Entry point: run a command and turn a user's mistake into a message."""
    try:
        app(standalone_mode=True)
    except UserError as error:
        typer.secho("error: ", fg="red", bold=True, err=True, nl=False)
        typer.echo(str(error), err=True)
        sys.exit(EXIT_USER_ERROR)
    sys.exit(0)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of the program itself."""


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help='The user\'s message, or "-" for standard input.')],
    target: TargetOption = "smollm2-135m",
    drafter: DrafterOption = None,
    method: Annotated[
        str, typer.Option(help="ddtree (draft tree), dflash (chain) or ar (plain decoding).")
    ] = "ddtree",
    budget: Annotated[
        str, typer.Option(help="Most nodes drafted per round; 0 drafts none; auto: what pays.")
    ] = "auto",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[
        int | None, typer.Option(help="Keep the k most probable tokens.", show_default="all")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Keep the likeliest mass p.", show_default="all")
    ] = None,
    min_p: MinPOption = None,
    typical_p: TypicalPOption = None,
    repetition_penalty: RepetitionPenaltyOption = 1.0,
    presence_penalty: PresencePenaltyOption = 0.0,
    frequency_penalty: FrequencyPenaltyOption = 0.0,
    bias: LogitBiasOption = None,
    bad_word: BadWordOption = None,
    suppress_token: SuppressTokenOption = None,
    schema: JsonSchemaOption = None,
    regex: RegexOption = None,
    seed: Annotated[int, typer.Option(help="One seed gives one text, with any method.")] = 0,
    no_coupled: Annotated[
        bool, typer.Option("--no-coupled", help="Draft without the sampler's noise: more rounds.")
    ] = False,
    no_lookup: Annotated[
        bool, typer.Option("--no-lookup", help="Draft without what the text itself repeats.")
    ] = False,
    min_new_tokens: MinNewTokensOption = 0,
    max_new_tokens: Annotated[int, typer.Option(help="Length limit.")] = 256,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="End the text before this string; repeatable.", show_default="none"),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the model's stop tokens.")
    ] = False,
    system: Annotated[
        str | None, typer.Option(help="System message.", show_default="the template's")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template around the prompt.")] = False,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    allow_untested: AllowUntestedOption = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
    logprobs: LogprobsOption = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run ar, dflash and ddtree and set them side by side.")
    ] = False,
    trace: TraceOption = None,
    trace_ranks: TraceRanksOption = None,
    profile: ProfileOption = None,
) -> None:
    """Generate text: the target's own, faster."""
    config = DecodeConfig(
        method=method,  # type: ignore[arg-type]
        budget=parse_budget(budget),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=logit_bias(bias or ()),
        bad_words=tuple(bad_word or ()),
        suppress_tokens=tuple(suppress_token or ()),
        min_new_tokens=min_new_tokens,
        json_schema=json_schema(schema),
        regex=regex,
        logprobs=logprobs,
        seed=seed,
        coupled=not no_coupled,
        lookup=not no_lookup,
        max_new_tokens=max_new_tokens,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    refuse_logprobs_without_json(logprobs, as_json=as_json)
    files = RecordFiles(trace=trace, num_ranks=trace_ranks, profile=profile)
    if compare:
        files.refuse_compare()
    request = Request(prompt=read_prompt(prompt), system=system, raw=raw)
    needs_drafter = compare or method != "ar"
    pair = load_pair(
        target,
        drafter,
        device,
        dtype,
        needs_drafter=needs_drafter,
        allow_untested=allow_untested,
    )
    if compare:
        _compare(pair, request, config, as_json=as_json)
    else:
        _generate(pair, request, config, files, as_json=as_json)


@app.command()
def doctor(
    target: TargetOption = "smollm2-135m",
    drafter: DrafterOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what is installed, which backends work, and whether target and drafter fit together."""
    from ddtree import doctor as examination

    report = examination.examine(target, drafter)
    if as_json:
        typer.echo(json.dumps(examination.as_json(report), indent=2))
    else:
        examination.show(report, Console())
    if not report.well:
        raise typer.Exit(EXIT_USER_ERROR)


def _generate(
    pair: Pair, request: Request, config: DecodeConfig, files: RecordFiles, *, as_json: bool
) -> None:
    from ddtree.types import Generation

    recording = files.recording(pair, config)
    # Checks the options.
    pieces = pair.run(request.messages, config, raw=request.raw, observe=observer(recording))
    if config.budget == AUTO and config.method != "ar":
        pair.measure(say)
    for item in pieces:
        if isinstance(item, Generation):
            _finish(item, as_json=as_json)
            if recording is not None:
                tell = (lambda message: None) if as_json else say
                files.write(pair, recording, item, say=tell)
        elif not as_json:
            typer.echo(item, nl=False)
            sys.stdout.flush()


def _finish(generation: Generation, *, as_json: bool) -> None:
    from ddtree import report

    if as_json:
        typer.echo(json.dumps(report.generation_json(generation)))
        return
    typer.echo()
    Console(stderr=True).print(report.statistics_line(generation), style="dim", soft_wrap=True)


def _compare(pair: Pair, request: Request, config: DecodeConfig, *, as_json: bool) -> None:
    from ddtree import report
    from ddtree.comparison import compare

    console = Console(stderr=True)
    with console.status("") as status:
        comparison = compare(pair, request.messages, config, raw=request.raw, say=status.update)
    if as_json:
        typer.echo(json.dumps(report.comparison_json(comparison)))
    else:
        typer.echo(comparison.generations[0].text)
        report.show_comparison(comparison, pair, console)
    if not comparison.agree and str(pair.target.dtype) == "torch.float32":
        raise typer.Exit(1)
