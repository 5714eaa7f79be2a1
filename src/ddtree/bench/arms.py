"""The ways of generating that a benchmark sets side by side, from what the command line names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from ddtree.bench.records import Arm
from ddtree.config import AUTO, MAX_BUDGET, DecodeConfig
from ddtree.errors import OptionError
from ddtree.types import METHODS

# What transformers does with the same target: its plain greedy loop and its assisted generation.
OUTSIDE_METHODS = ("hf-generate", "prompt-lookup", "assistant")
# Draft trees of the drafter alone: method "ddtree" with lookup=False.
NO_LOOKUP = "ddtree-no-lookup"
TREE_METHODS = ("ddtree", NO_LOOKUP)
DRAFTING_METHODS = ("dflash", *TREE_METHODS)
KNOWN_METHODS = (*METHODS, NO_LOOKUP, *OUTSIDE_METHODS)
DEFAULT_BUDGETS = "8,16,32,auto"


def plan_arms(methods: str, budgets: str | None) -> tuple[Arm, ...]:
    """The arms of a run, "ar" first whether it is named or not: it is what others are measured by.

    Args:
        methods: names with commas between them.
        budgets: of the trees; None takes the defaults. Each is an arm of its own.

    Raises:
        OptionError: an unknown method, one named twice, or budgets that are none or for nobody.

    >>> [arm.name for arm in plan_arms("ddtree,prompt-lookup", "8,auto")]
    ['ar', 'ddtree-8', 'ddtree-auto', 'prompt-lookup']
    """
    names = [name.strip() for name in methods.split(",")]
    if len(set(names)) < len(names) or not set(names) <= set(KNOWN_METHODS):
        raise OptionError(
            "methods",
            expected=f"some of {', '.join(KNOWN_METHODS)}, each once",
            got=repr(methods),
            remedy="For example --methods ar,dflash,ddtree.",
        )
    if budgets is not None and not set(TREE_METHODS) & set(names):
        raise OptionError(
            "budgets",
            expected="no budgets without method ddtree",
            got=repr(budgets),
            remedy="Add ddtree to --methods, or leave --budgets out.",
        )
    arms = [Arm(name="ar", method="ar")]
    for name in names:
        if name in TREE_METHODS:
            arms += [
                Arm(name=f"{name}-{budget}", method=name, budget=budget)
                for budget in _budgets(DEFAULT_BUDGETS if budgets is None else budgets)
            ]
        elif name != "ar":
            arms.append(Arm(name=name, method=name))
    return tuple(arms)


def check_arms(arms: Sequence[Arm], temperatures: Sequence[float], assistant: str | None) -> None:
    """Refuse, before a model is loaded, arms that could not run and options for nobody.

    Args:
        arms: of the run.
        temperatures: of the run.
        assistant: name of the model for arm "assistant".

    Raises:
        OptionError: outside arms without temperature 0; an assistant and no arm for it, or the
            other way round.
    """
    outside = [arm.name for arm in arms if is_outside(arm)]
    if outside and 0 not in temperatures:
        raise OptionError(
            "temperature",
            expected=f"0 among others for {', '.join(outside)}",
            got=", ".join(f"{t:g}" for t in temperatures),
            remedy="Outside methods run greedily only: add 0 to --temperature or leave them out.",
        )
    if ("assistant" in outside) != (assistant is not None):
        raise OptionError(
            "assistant",
            expected="a model with method assistant, and none without it",
            got="none" if assistant is None else repr(assistant),
            remedy="Give both: --methods ar,assistant --assistant MODEL.",
        )


def is_outside(arm: Arm) -> bool:
    """Whether transformers generates, and not we."""
    return arm.method in OUTSIDE_METHODS


def decode_config(
    arm: Arm, *, temperature: float, seed: int, max_new_tokens: int, num_depths: int
) -> DecodeConfig:
    """The options of one of our own arms.

    Args:
        arm: of a method of ours.
        temperature, seed, max_new_tokens: see `DecodeConfig`.
        num_depths: L of the drafter: the chain has all of its nodes.
    """
    budget = {"ar": 0, "dflash": num_depths}.get(arm.method, arm.budget)
    assert budget is not None, "a tree has a budget"
    return DecodeConfig(
        method="ddtree" if arm.method == NO_LOOKUP else arm.method,  # type: ignore[arg-type]
        budget=budget,
        lookup=arm.method != NO_LOOKUP,
        temperature=temperature,
        seed=seed,
        max_new_tokens=max_new_tokens,
    )


def _budgets(text: str) -> list[int | Literal["auto"]]:
    parts = [part.strip() for part in text.split(",")]
    fine = all(re.fullmatch("auto|[0-9]{1,6}", part) for part in parts)
    found = [AUTO if part == AUTO else int(part) for part in parts] if fine else []
    in_range = all(budget == AUTO or 1 <= budget <= MAX_BUDGET for budget in found)
    if not fine or not in_range or len(set(found)) < len(found):
        raise OptionError(
            "budgets",
            expected=f"whole numbers from 1 to {MAX_BUDGET} or auto, each once",
            got=repr(text),
            remedy=f"For example --budgets {DEFAULT_BUDGETS}.",
        )
    return found
