"""How one text is generated: a frozen record, validated at birth."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

from ddtree.errors import OptionError
from ddtree.types import METHODS, Method

MAX_SEED = 2**64 - 1
# A verify forward of more rows costs more than any tree can win, and its mask is N x N.
MAX_BUDGET = 4096
AUTO: Literal["auto"] = "auto"


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Options of one generation.

    Args:
        method: "ar" (plain decoding), "dflash" (chain) or "ddtree" (tree).
        budget: B, the most nodes of a round besides the root, at most 4096; 0 means no
            speculation. "auto" gives every round as many as pay on this machine.
        temperature: 0 is greedy; above 0 sampling with noise by seed and position.
        top_k: keep the k most probable tokens; None keeps all. Without effect when greedy.
        top_p: keep the fewest tokens whose mass reaches p, in (0, 1]; None keeps all. Likewise.
        seed: 0 <= seed < 2**64; one seed gives one text, whatever the method.
        max_new_tokens: the length limit, >= 1.
        stop: strings that end the text; they are not part of it.
        ignore_eos: do not end at the model's stop tokens.

    Raises:
        OptionError: an option outside its range or of the wrong type.

    >>> DecodeConfig(budget=32).method
    'ddtree'
    """

    method: Method = "ddtree"
    budget: int | Literal["auto"] = "auto"
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise OptionError(
                "method",
                expected=f"one of {', '.join(METHODS)}",
                got=repr(self.method),
                remedy="Use ddtree for draft trees, dflash for the chain, ar for plain decoding.",
            )
        if self.budget != AUTO:
            _check_int(
                "budget",
                self.budget,
                low=0,
                high=MAX_BUDGET,
                or_else=AUTO,
                remedy="auto measures what pays; 0 does not speculate.",
            )
        _check_int("max_new_tokens", self.max_new_tokens, low=1, remedy="Ask for a token or more.")
        _check_int("seed", self.seed, low=0, high=MAX_SEED, remedy="Any such number will do.")
        if self.top_k is not None:
            _check_int("top_k", self.top_k, low=1, remedy="Leave it out to keep all tokens.")
        _check_temperature(self.temperature)
        if self.top_p is not None and not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise OptionError(
                "top_p",
                expected="a number in (0, 1]",
                got=repr(self.top_p),
                remedy="Leave it out, or use 1, to keep all tokens.",
            )
        _check_stop(self.stop)
        if not isinstance(self.ignore_eos, bool):
            raise OptionError(
                "ignore_eos",
                expected="True or False",
                got=repr(self.ignore_eos),
                remedy="True goes on past the model's stop tokens.",
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_int(
    name: str,
    value: object,
    *,
    low: int,
    remedy: str,
    high: int | None = None,
    or_else: str | None = None,
) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if whole and value >= low and (high is None or value <= high):  # type: ignore[operator]
        return
    limit = f">= {low}" if high is None else f"from {low} to {high}"
    limit += "" if or_else is None else f", or {or_else}"
    raise OptionError(name, expected=f"a whole number {limit}", got=repr(value), remedy=remedy)


def _check_temperature(value: object) -> None:
    if _is_number(value) and 0 <= value <= sys.float_info.max:  # type: ignore[operator]
        return
    raise OptionError(
        "temperature",
        expected="a finite number >= 0",
        got=repr(value),
        remedy="0 is greedy decoding, 1 samples from the model as it is.",
    )


def _check_stop(stop: object) -> None:
    if isinstance(stop, tuple) and all(isinstance(s, str) and s for s in stop):
        return
    raise OptionError(
        "stop",
        expected="non-empty strings",
        got=repr(stop),
        remedy='Give a tuple of strings, for example stop=("\\n\\n",).',
    )
