"""The command line of `ddtree tree`: draft trees in the terminal, or on a page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ddtree.cli.options import (
    DeviceOption,
    DrafterOption,
    DtypeOption,
    TargetOption,
    load_pair,
    say,
)
from ddtree.cli.prompt import Request, parse_budget, read_prompt
from ddtree.config import AUTO, DecodeConfig
from ddtree.errors import OptionError

if TYPE_CHECKING:
    from ddtree.pair import Pair
    from ddtree.types import Generation

_FIRST_ROUNDS = range(4)
_DEFAULT_NODES = 32


def tree(
    prompt: Annotated[str, typer.Argument(help='The user\'s message, or "-" for standard input.')],
    html: Annotated[
        Path | None,
        typer.Option(
            help="Write a page that steps through all rounds, and print no trees.",
            show_default="none",
        ),
    ] = None,
    rounds: Annotated[
        str | None,
        typer.Option(help="Rounds to print, like 3 or 2-5; 0 is the prefill.", show_default="0-3"),
    ] = None,
    max_nodes: Annotated[
        int | None,
        typer.Option(
            help="Nodes to print of a tree, the most probable first.",
            show_default=str(_DEFAULT_NODES),
        ),
    ] = None,
    target: TargetOption = "smollm2-135m",
    drafter: DrafterOption = None,
    method: Annotated[
        str, typer.Option(help="ddtree (draft tree), dflash (chain) or ar (plain decoding).")
    ] = "ddtree",
    budget: Annotated[
        str, typer.Option(help="Most nodes drafted per round, or auto: what pays.")
    ] = "16",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="One seed gives one text, with any method.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(help="Length limit.")] = 64,
    system: Annotated[
        str | None, typer.Option(help="System message.", show_default="the template's")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template around the prompt.")] = False,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
) -> None:
    """Show the draft trees of a generation, and what the target accepted of them.

    p|parent: the drafter's probability of a token behind its parent.
    p path: that of all tokens from the root to it.
    rank: the token's place in its depth, 0 is the most probable.
    bonus: the target's own token, behind the last one that it accepted.
    """
    config = DecodeConfig(
        method=method,  # type: ignore[arg-type]
        budget=parse_budget(budget),
        temperature=temperature,
        seed=seed,
        max_new_tokens=max_new_tokens,
    )
    chosen = _parse_rounds(rounds)
    num_nodes = _checked_nodes(max_nodes)
    if html is not None:
        _check_page(html, rounds, max_nodes)
    request = Request(prompt=read_prompt(prompt), system=system, raw=raw)
    pair = load_pair(target, drafter, device, dtype, needs_drafter=method != "ar")
    generation = _generate(pair, request, config)
    if html is None:
        _print(pair, generation, chosen, num_nodes)
    else:
        _write(pair, generation, request, config, html)


def _generate(pair: Pair, request: Request, config: DecodeConfig) -> Generation:
    from ddtree.types import Generation

    pieces = pair.run(request.messages, config, raw=request.raw)  # checks the options
    if config.budget == AUTO and config.method != "ar":
        pair.measure(say)
    with Console(stderr=True).status("Generating ..."):
        *_, generation = pieces
    assert isinstance(generation, Generation), "the last item of a run"
    return generation


def _print(pair: Pair, generation: Generation, chosen: range | None, max_nodes: int) -> None:
    from ddtree import report
    from ddtree.viewer.scenes import scenes_of
    from ddtree.viewer.token_names import TokenNames
    from ddtree.viewer.tree_text import show_scenes

    num_rounds = len(generation.rounds)
    wanted = _FIRST_ROUNDS if chosen is None else chosen
    if wanted.start >= num_rounds:
        raise OptionError(
            "--rounds",
            expected=f"rounds from 0 to {num_rounds - 1}, which this generation has",
            got=str(wanted.start),
            remedy="Ask for an earlier one, or for more tokens with --max-new-tokens.",
        )
    shown = range(wanted.start, min(wanted.stop, num_rounds))
    tokenizer = pair.target.tokenizer
    assert tokenizer is not None, "the prompt was text"
    console = Console()
    scenes = scenes_of(generation.rounds)
    show_scenes(scenes, shown, TokenNames(tokenizer), console, max_nodes=max_nodes)
    say(report.statistics_line(generation))
    if chosen is None and shown.stop < num_rounds:
        rest = f"{shown.stop}-{num_rounds - 1}"
        say(f"Rounds {rest} are not shown: --rounds {rest} prints them, --html FILE draws all.")


def _write(
    pair: Pair, generation: Generation, request: Request, config: DecodeConfig, path: Path
) -> None:
    from ddtree import report
    from ddtree.viewer.tree_page import write_page

    tokenizer = pair.target.tokenizer
    assert tokenizer is not None, "the prompt was text"
    write_page(
        path,
        generation,
        tokenizer,
        prompt=request.prompt,
        config=config,
        target_name=pair.target.name,
    )
    say(report.statistics_line(generation))
    say(f"Wrote {path}: open it in a browser.")


def _parse_rounds(text: str | None) -> range | None:
    """The rounds that were asked for, the last one included."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip(), re.ASCII)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if last < first:
        raise OptionError(
            "--rounds",
            expected="a round or a first and a last one",
            got=repr(text),
            remedy="For example 3 or 2-5; 0 is the prefill.",
        )
    return range(first, last + 1)


def _checked_nodes(max_nodes: int | None) -> int:
    if max_nodes is not None and max_nodes < 0:
        raise OptionError(
            "--max-nodes",
            expected="a whole number >= 0",
            got=max_nodes,
            remedy="0 prints what was accepted and nothing else.",
        )
    return _DEFAULT_NODES if max_nodes is None else max_nodes


def _check_page(path: Path, rounds: str | None, max_nodes: int | None) -> None:
    """Before the work: a page that could not be written, or options that it would ignore."""
    if path.is_dir() or not path.parent.is_dir():
        raise OptionError(
            "--html",
            expected="a file in a folder that is there",
            got=str(path),
            remedy="Give a name like tree.html, and make the folder first.",
        )
    for option, value in (("--rounds", rounds), ("--max-nodes", max_nodes)):
        if value is not None:
            raise OptionError(
                option,
                expected="none with --html",
                got=repr(value),
                remedy="A page holds all rounds and all nodes: leave it out.",
            )
