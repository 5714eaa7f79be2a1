"""Options that several commands of the command line share, and loading what they name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from ddtree.pair import Pair

TargetOption = Annotated[
    str, typer.Option(help="Hub id, local folder, or the embedded smollm2-135m.")
]
DrafterOption = Annotated[
    str | None,
    typer.Option(
        help="Hub id or folder of a drafter: DFlash, Medusa or PARD.", show_default="known one"
    ),
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")]
DtypeOption = Annotated[
    str,
    typer.Option(
        help="auto, float32, mixed, bfloat16 or float16 (auto on CPU: float32; mixed: products of "
        "linear layers in bfloat16, on a CPU with AVX512-BF16)."
    ),
]
AllowUntestedOption = Annotated[
    bool,
    typer.Option(
        "--allow-untested",
        help="Let in an architecture that is not in the table; its first text is checked.",
    ),
]


def load_pair(
    target: str,
    drafter: str | None,
    device: str,
    dtype: str,
    *,
    needs_drafter: bool,
    allow_untested: bool = False,
) -> Pair:
    """The models that a command was asked for, without the library's own chatter."""
    from ddtree.models.loading import load_target, silence_transformers
    from ddtree.pair import Pair, load

    silence_transformers()
    if not needs_drafter:
        loaded = load_target(
            target, device=device, dtype=dtype, allow_untested=allow_untested, say=say
        )
        return Pair(loaded, None)
    return load(target, drafter, device=device, dtype=dtype, allow_untested=allow_untested, say=say)


def say(message: str) -> None:
    """Tell the person, apart from the results."""
    Console(stderr=True).print(message, style="dim", soft_wrap=True, markup=False)
