"""`ddtree convert`: a drafter in the other format, or in speculators' anew."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddtree.cli.options import say


def convert(
    source: Annotated[str, typer.Argument(help="Hub id, folder or alias of a DFlash drafter.")],
    to: Annotated[str, typer.Option(help="speculators or z-lab.")],
    out: Annotated[Path, typer.Option(help="New folder, or one that was converted before.")],
    target: Annotated[
        str | None,
        typer.Option(
            help="Its target: of this only embedding and head are read.",
            show_default="the one that SOURCE names",
        ),
    ] = None,
) -> None:
    """Write a drafter in z-lab's or speculators' format: the same tensors, bit for bit."""
    from ddtree import convert as conversion
    from ddtree.models.loading import silence_transformers

    silence_transformers()
    done = conversion.convert(source, to=to, out=out, target=target, say=say)
    size = done.draft_vocab_size
    vocabulary = "" if size is None else f", {size} tokens that it can propose"
    held = "" if done.target is None else f"; target {done.target}"
    say(
        f"{source}: from {done.source_format} to {done.format}, "
        f"{done.num_tensors} tensors{vocabulary}{held}"
    )
    typer.echo(str(done.folder))
