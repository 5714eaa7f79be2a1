"""`ddtree serve`: an OpenAI-compatible server, vLLM's own, with draft trees in it."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from ddtree.cli.options import say
from ddtree.cli.prompt import parse_budget
from ddtree.errors import OptionError


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Hub id, local folder, or smollm2-135m.")],
    drafter: Annotated[
        str | None,
        typer.Option(help="Hub id or folder of its DFlash drafter.", show_default="known one"),
    ] = None,
    method: Annotated[
        str, typer.Option(help="ddtree (draft trees), dflash (chains) or ar (no drafts).")
    ] = "ddtree",
    budget: Annotated[
        str, typer.Option(help="Most nodes of a request's tree; 0: no drafts; auto: what pays.")
    ] = "auto",
    max_nodes: Annotated[
        int, typer.Option(help="Nodes that vLLM's buffers have room for; the most for --budget.")
    ] = 16,
    max_batch_rows: Annotated[
        int | None,
        typer.Option(help="Most rows of a step's trees, all requests.", show_default="no limit"),
    ] = None,
    no_lookup: Annotated[
        bool, typer.Option("--no-lookup", help="Draft without what the text itself repeats.")
    ] = False,
    no_transitions: Annotated[
        bool, typer.Option("--no-transitions", help="Draft without the drafter's transition head.")
    ] = False,
    print_command: Annotated[
        bool, typer.Option("--print-command", help="Print the `vllm serve` to run, and end.")
    ] = False,
) -> None:
    """Serve a model with vLLM and draft trees; flags of `vllm serve` may follow."""
    from ddtree.models.loading import silence_transformers
    from ddtree.serving.launch import prepare
    from ddtree.serving.options import ServingOptions

    if model.startswith("-"):
        raise OptionError(
            "MODEL",
            expected="the model before the flags of vLLM",
            got=repr(model),
            remedy="For example: ddtree serve smollm2-135m --port 8000.",
        )
    silence_transformers()
    options = ServingOptions(
        method=method,  # type: ignore[arg-type]
        budget=parse_budget(budget),
        max_nodes=max_nodes,
        max_batch_rows=max_batch_rows,
        lookup=not no_lookup,
        transitions=not no_transitions,
    )
    launch = prepare(model, drafter, options, context.args, say=say)
    if print_command:
        typer.echo(launch.shell)
        return
    say(launch.shell)
    sys.stdout.flush()
    sys.stderr.flush()
    # vLLM takes this process over, so that signals reach it and nothing of ours stays in memory.
    os.execvpe(launch.command[0], launch.command, {**os.environ, **launch.environment})
