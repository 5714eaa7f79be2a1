"""Options of `ddtree generate` that change what the target may say, and what is told of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ddtree.errors import OptionError, first_line

MinPOption = Annotated[
    float | None,
    typer.Option(help="Keep tokens at least p times as likely as the best.", show_default="all"),
]
TypicalPOption = Annotated[
    float | None,
    typer.Option(help="Keep the mass p nearest to the expected surprise.", show_default="all"),
]
RepetitionPenaltyOption = Annotated[
    float, typer.Option(help="Above 1 makes tokens rarer that occur already, the prompt included.")
]
PresencePenaltyOption = Annotated[
    float, typer.Option(help="Taken from the logit of each token that occurs in the new text.")
]
FrequencyPenaltyOption = Annotated[
    float, typer.Option(help="Taken from it for every time the token occurs in the new text.")
]
LogitBiasOption = Annotated[
    list[str] | None,
    typer.Option(
        "--logit-bias",
        metavar="ID=VALUE",
        help="Add a value to a token's logit; -inf bans it; repeatable.",
        show_default="none",
    ),
]
BadWordOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT",
        help="Never say the tokens that spell this; repeatable.",
        show_default="none",
    ),
]
SuppressTokenOption = Annotated[
    list[int] | None,
    typer.Option(
        metavar="ID", help="Never say the token with this id; repeatable.", show_default="none"
    ),
]
MinNewTokensOption = Annotated[
    int, typer.Option(help="Hold back the model's stop tokens until so many tokens have come.")
]
JsonSchemaOption = Annotated[
    Path | None,
    typer.Option(
        "--json-schema",
        metavar="FILE",
        help="Hold the text to this JSON schema.",
        show_default="none",
    ),
]
RegexOption = Annotated[
    str | None,
    typer.Option(help="Hold the whole text to this expression.", show_default="none"),
]
LogprobsOption = Annotated[
    int | None,
    typer.Option(
        help="With --json: log-probabilities of the tokens, and of so many alternatives each.",
        show_default="none",
    ),
]


def logit_bias(texts: Sequence[str]) -> tuple[tuple[int, float], ...]:
    """Pairs of token id and value, from ID=VALUE each.

    Raises:
        OptionError: something else.

    >>> logit_bias(["42=-5", "7=-inf"])
    ((42, -5.0), (7, -inf))
    """
    pairs = []
    for text in texts:
        token_id, _, value = text.partition("=")
        try:
            pairs.append((int(token_id), float(value)))
        except ValueError as error:
            raise OptionError(
                "--logit-bias",
                expected="ID=VALUE, a token id and a number",
                got=repr(text),
                remedy="For example --logit-bias 42=-5.",
            ) from error
    return tuple(pairs)


def json_schema(path: Path | None) -> str | None:
    """The text of a schema's file.

    Raises:
        OptionError: a file that cannot be read.
    """
    if path is None:
        return None
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(
            "--json-schema",
            expected="a readable file of UTF-8 text",
            got=f"{path}: {first_line(error)}",
            remedy="Check the path.",
        ) from error


def refuse_logprobs_without_json(logprobs: int | None, *, as_json: bool) -> None:
    """Log-probabilities have no place in a text.

    Raises:
        OptionError: they are asked for and JSON is not.
    """
    if logprobs is not None and not as_json:
        raise OptionError(
            "--logprobs",
            expected="--json beside it",
            got=f"{logprobs} without --json",
            remedy="Add --json: the numbers are printed with the text's tokens.",
        )
