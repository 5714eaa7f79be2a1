"""Options of stage "fit", checked at birth."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

from ddtree.errors import OptionError
from ddtree.train.precision import PRECISIONS

OPTIMIZERS = ("adamw", "muon")


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """Options of the stage.

    Args:
        num_steps: gradient steps in all.
        sequences_per_step: responses of one step.
        anchors_per_sequence: blocks of each of them.
        optimizer: "adamw"; or "muon" for the matrices of the layers and `fc`, AdamW for all else.
        learning_rate: its peak.
        weight_decay: of the matrices.
        warmup_steps: linear rise at the start.
        decay_share: last share of the steps in which the learning rate falls to a fiftieth.
        clip: most norm of the gradient.
        gamma: where `reach_share` is 0, depth k weighs exp(-(k - 1) / gamma); None: 4, 5, 7 for
            blocks of 8, 10, 16.
        reach_share: how far the weight of a label follows the drafter's own probability of getting
            there, in place of the fixed decay; see `reach_weights`. 0: not at all.
        soft_share: share of the loss that asks for the target's distribution, not for the text.
        short_share: first share of the steps that train on shortened blocks: a step's blocks reach
            depth k with probability exp(-(k - 1) / gamma), which costs half as much as whole ones,
            and what a depth weighs is divided by that probability.
        validation_share: share of the prompts that is only validated on.
        seed: of first weights, order and anchors.
        validate_every: steps between validations.
        precision: of products, see `pick_precision`.

    Raises:
        OptionError: an option outside its range.
    """

    num_steps: int = 2000
    sequences_per_step: int = 8
    anchors_per_sequence: int = 16
    optimizer: str = "adamw"
    learning_rate: float = 1.5e-3
    weight_decay: float = 0.01
    warmup_steps: int = 50
    decay_share: float = 0.4
    clip: float = 1.0
    gamma: float | None = None
    reach_share: float = 1.0
    soft_share: float = 0.5
    short_share: float = 0.0
    validation_share: float = 0.02
    seed: int = 0
    validate_every: int = 100
    precision: str = "auto"

    def __post_init__(self) -> None:
        for field_ in fields(self):
            name, value = field_.name, getattr(self, field_.name)
            expected, is_right = _RANGES[name]
            if not is_right(value) and not (name == "gamma" and value is None):
                raise OptionError(
                    name,
                    expected=expected,
                    got=repr(value),
                    remedy=f"The default is {field_.default}.",
                )


_Check = Callable[[object], bool]


def _number(is_right: Callable[[float], bool]) -> _Check:
    return lambda x: isinstance(x, int | float) and not isinstance(x, bool) and is_right(x)


_COUNT = ("a whole number >= 1", _number(lambda x: isinstance(x, int) and x >= 1))
_COUNT_OR_NONE = ("a whole number >= 0", _number(lambda x: isinstance(x, int) and x >= 0))
_POSITIVE = ("a number > 0", _number(lambda x: 0 < x < math.inf))
_SHARE = ("a number in [0, 1]", _number(lambda x: 0 <= x <= 1))
_RANGES: dict[str, tuple[str, _Check]] = {
    "num_steps": _COUNT,
    "sequences_per_step": _COUNT,
    "anchors_per_sequence": _COUNT,
    "optimizer": (f"one of {', '.join(OPTIMIZERS)}", lambda x: x in OPTIMIZERS),
    "learning_rate": _POSITIVE,
    "weight_decay": ("a number >= 0", _number(lambda x: 0 <= x < math.inf)),
    "warmup_steps": _COUNT_OR_NONE,
    "decay_share": _SHARE,
    "clip": _POSITIVE,
    "gamma": _POSITIVE,
    "reach_share": _SHARE,
    "soft_share": _SHARE,
    "short_share": _SHARE,
    "validation_share": ("a number between 0 and 1", _number(lambda x: 0 < x < 1)),
    "seed": _COUNT_OR_NONE,
    "validate_every": _COUNT,
    "precision": (f"one of {', '.join(PRECISIONS)}", lambda x: x in PRECISIONS),
}
