"""Options as a user gives them: turned into what the record takes, and checked against the models.

Ranges and types are the record's own matter (`config`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

from ddtree.config import AUTO, DecodeConfig
from ddtree.draft import Drafter
from ddtree.errors import OptionError, listed
from ddtree.models.target import Target

_T = TypeVar("_T")


def check_options(config: DecodeConfig, target: Target, drafter: Drafter | None) -> None:
    """Refuse what these models cannot do.

    Raises:
        OptionError: a method that drafts without a drafter, text without a tokenizer, token ids
            beyond the vocabulary, or a budget beyond the target's memory for a round.
    """
    if drafter is None and config.method != "ar":
        raise OptionError(
            "drafter",
            expected=f"a drafter for method {config.method}",
            got=f"none, and none is known for {target.name}",
            remedy='Give the checkpoint of a drafter, or use method "ar".',
        )
    if config.stop and target.tokenizer is None:
        raise OptionError(
            "stop",
            expected="a tokenizer to find stop strings with",
            got="a target without one",
            remedy="Load a tokenizer with the model, or stop at token ids.",
        )
    if config.bad_words and target.tokenizer is None:
        raise OptionError(
            "bad_words",
            expected="a tokenizer to spell words with",
            got="a target without one",
            remedy="Load a tokenizer with the model, or give bad_words_ids.",
        )
    if config.budget != AUTO and config.method != "ar":
        check_budget(config.budget, target)
    named = {
        "logit_bias": [token for token, _ in config.logit_bias],
        "bad_words_ids": [token for word in config.bad_words_ids for token in word],
        "suppress_tokens": list(config.suppress_tokens),
    }
    for name, token_ids in named.items():
        if beyond := [token for token in token_ids if token >= target.vocab_size]:
            raise OptionError(
                name,
                expected=f"token ids from 0 to {target.vocab_size - 1}",
                got=listed(map(str, beyond)),
                remedy=f"Take the ids from the tokenizer of {target.name}.",
            )


def check_budget(budget: int, target: Target) -> None:
    """Refuse a tree whose rows would take more memory than this target gives a round.

    Raises:
        OptionError: says how many nodes fit.
    """
    if target.max_rows is None or budget < target.max_rows:
        return
    raise OptionError(
        "budget",
        expected=f"at most {target.max_rows - 1} nodes for {target.name}, whose recurrent layers "
        f"have {target.round_bytes / 2**20:.4g} MiB for the rows of a round",
        got=budget,
        remedy="Take fewer nodes, or set target.round_bytes to more.",
    )


# What has another type than a user may give goes on as it is: the config refuses it by name.


def as_tuple(items: Sequence[_T]) -> tuple[_T, ...]:
    """The same items; a single string is one of them."""
    if isinstance(items, str):
        return cast("tuple[_T, ...]", (items,))
    return tuple(items) if isinstance(items, Sequence) else items


def as_tuples(sequences: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The same sequences of token ids."""
    outer = as_tuple(sequences)
    return tuple(map(as_tuple, outer)) if isinstance(outer, tuple) else outer


def as_json(schema: str | Mapping[str, object] | None) -> str | None:
    """The same schema as text."""
    if not isinstance(schema, Mapping):
        return schema
    try:
        return json.dumps(schema)
    except (TypeError, ValueError):
        return cast("str", schema)


def as_pairs(bias: Mapping[int, float] | None) -> tuple[tuple[int, float], ...]:
    """The same numbers by token id, as pairs."""
    if bias is None:
        return ()
    return tuple(bias.items()) if isinstance(bias, Mapping) else bias
