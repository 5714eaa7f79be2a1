"""`ddtree replay`: other builders and budgets on a trace, without a model."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ddtree.config import MAX_BUDGET
from ddtree.errors import BuilderError, OptionError, first_line

if TYPE_CHECKING:
    from ddtree.budget import Builder


def replay(
    file: Annotated[Path, typer.Argument(help="Written by `ddtree generate --trace`.")],
    builders: Annotated[
        str, typer.Option(help="tree, chain, or your own as module:function; by commas.")
    ] = "tree,chain",
    budgets: Annotated[str, typer.Option(help="Nodes of a round at most, by commas.")] = "8,16,32",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Say how other builders and budgets would have drafted recorded texts, without a model."""
    sizes = parse_budgets(budgets)
    named = parse_builders(builders)
    from ddtree.tracing import replay_report
    from ddtree.tracing.trace_file import read_trace

    trace = read_trace(file)
    if trace.is_torn and not as_json:
        typer.echo(f"{file}: its last generation is not complete and is left out.", err=True)
    found = replay_report.outcomes(trace, named, sizes)
    if as_json:
        results = [replay_report.outcome_json(outcome) for outcome in found]
        card = {"target": trace.card.target, "drafter": trace.card.drafter}
        whole = {"trace": str(file), **card, "is_torn": trace.is_torn, "results": results}
        typer.echo(json.dumps(whole, allow_nan=False))
    else:
        replay_report.show(found, Console())
    if any(outcome.differing for outcome in found):
        raise typer.Exit(1)


def parse_budgets(text: str) -> list[int]:
    """Numbers from `--budgets`.

    Raises:
        OptionError: no number, out of range, or twice.
    """
    words = [word.strip() for word in text.split(",")]
    sizes = [int(word) for word in words if re.fullmatch(r"\d{1,9}", word)]
    good = len(sizes) == len(words) == len(set(sizes)) and max(sizes) <= MAX_BUDGET
    if not good:
        raise OptionError(
            "--budgets",
            expected=f"different whole numbers from 0 to {MAX_BUDGET}, by commas",
            got=repr(text),
            remedy="For example 8,16,32. What auto would do is not replayed: it depends on time.",
        )
    return sizes


def parse_builders(text: str) -> dict[str, Builder]:
    """Builders from `--builders`, by the names given there.

    Raises:
        BuilderError: unknown, twice, or a function that cannot be found.
    """
    from ddtree.tree.chain import build_chain
    from ddtree.tree.host import build_tree

    known: dict[str, Builder] = {"tree": build_tree, "chain": build_chain}
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if (name not in known and ":" not in name) or names.count(name) > 1:
            raise BuilderError(
                "--builders",
                expected=f"different ones of {', '.join(known)} and module:function, by commas",
                got=repr(text),
                remedy="For example tree,chain,my_module:build.",
            )
    return {name: known[name] if name in known else _imported(name) for name in names}


def _imported(name: str) -> Builder:
    """The function of a user's own module, which may lie in the current folder."""
    from pkgutil import resolve_name

    module_name, _, function_name = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = resolve_name(f"{module_name}:")
    except (ImportError, ValueError) as error:
        raise BuilderError(
            "--builders",
            expected=f"a module {module_name!r} in this folder or installed",
            got=f"{type(error).__name__}: {first_line(error)}",
            remedy="Run from the module's folder, or set PYTHONPATH.",
        ) from error
    builder = getattr(module, function_name, None)
    if not callable(builder):
        raise BuilderError(
            "--builders",
            expected=f"a function {function_name!r} in module {module_name}",
            got="none" if builder is None else type(builder).__name__,
            remedy="It takes (marginals, root_id, budget) and gives a ddtree.DraftTree.",
        )
    return builder  # type: ignore[no-any-return]
