"""Coupled drafting: rank tokens by the noise that is going to pick the target's (DESIGN 5).

The noise of a position is fixed by the seed before anything is drafted, so the drafter may use it:

    score of token v at depth i = a_i * logits_i(v) + b_i * T * G_{start+i}(v)

and softmax over v of the score is the probability that the target says v. (DESIGN's form
(logits / T + G) / c is a_i = b_i = 1 / (c_i T); to weigh the two apart fits better, see
docs/decisions/0011.) The text is the same function of seed and context as without.

The weights are learnt from the rounds: the target's choices are a softmax regression on two
numbers per token, whose likelihood has one maximum. Where the logits of a depth depend on the token
before it, they are those behind the token that the walk took. Knows no tree and no target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64
from numpy import ndarray
from torch import Tensor

from ddtree.sampling.noise import Noise
from ddtree.types import Walk

# Given the tokens at the first M depths, what they and the root change of the logits of the first
# M + 1 depths: [M + 1, Vd].
ChangesBehind = Callable[[Sequence[int]], Float[Tensor, "M Vd"]]


@runtime_checkable
class Perturb(Protocol):
    """What turns the logits of one drafter pass into scores, to rank and normalise instead."""

    def __call__(
        self, logits: Float[Tensor, "L Vd"], token_ids: Int64[Tensor, " Vd"] | None
    ) -> Float[Tensor, "L Vd"]:
        """The scores.

        Args:
            logits: of every token that can be proposed.
            token_ids: the token of each column; None where the columns are the ids.
        """
        ...

    def weigh(self, changes: Float[Tensor, "L ..."]) -> Float[Tensor, "L ..."]:
        """What is to be added to the scores where this would be added to the logits."""
        ...

    def keep(self, changes_behind: ChangesBehind) -> None:
        """Hear how the logits depend on the tokens before them, for when the walk is known.

        For drafters whose `Marginals` have transitions; called after the scores were asked for.
        """
        ...


# Of logits and noise, before a choice was seen: those of the embedded default's drafter, which
# hardly differ between depths or between temperatures.
_START = (0.9, 0.6)
# How sure that is, in the unit of the likelihood's curvature: worth some ten choices.
_PRIOR_CURVATURE = 10.0
# Older choices fade, with so many choices of their depth to half their weight.
_HALF_LIFE = 100.0
# No single choice moves a weight further than this, and none leaves the range.
_LONGEST_STEP, _LEAST, _MOST = 0.3, 0.02, 4.0
# Beyond it the logits are a grain of sand beside the noise, and float32 would overflow.
_HIGHEST_TEMPERATURE = 1e4


class CouplingWeights:
    """What the drafter's logits and the noise are worth at each depth; outlives a generation.

    Args:
        num_depths: L, the most depths of a drafter pass.
    """

    def __init__(self, num_depths: int) -> None:
        self.values: Float64[ndarray, "L 2"] = np.tile(np.array(_START), (num_depths, 1))
        self._curvature: Float64[ndarray, "L 2 2"] = np.zeros((num_depths, 2, 2))

    def learn(self, depth: int, gradient: Float64[ndarray, " 2"], curvature: ndarray) -> None:
        """One Newton step on the log-likelihood of the target's choices at a depth.

        Args:
            depth: from 0 for the first drafted position.
            gradient: of the log-likelihood of this choice.
            curvature: [2, 2], minus its second derivative.
        """
        total = self._curvature[depth]
        total *= 0.5 ** (1.0 / _HALF_LIFE)
        total += curvature
        step = np.linalg.solve(total + _PRIOR_CURVATURE * np.eye(2), gradient)
        moved = self.values[depth] + step.clip(-_LONGEST_STEP, _LONGEST_STEP)
        self.values[depth] = moved.clip(_LEAST, _MOST)


class Coupling:
    """Lends one request's noise to its drafter, and learns what it is worth.

    Args:
        temperature: T > 0 of the decoding rule.
        noise: of the decoding rule.
        weights: of this target and drafter; mutated.
    """

    def __init__(self, *, temperature: float, noise: Noise, weights: CouplingWeights) -> None:
        self._temperature = min(temperature, _HIGHEST_TEMPERATURE)
        self._noise = noise
        self._weights = weights
        self._pass: _Pass | None = None

    def perturb(self, position: int, vocab_size: int) -> Perturb:
        """What turns a pass's logits into scores.

        Args:
            position: of the token at depth 1.
            vocab_size: V of the target, over which the rule draws the noise.
        """
        self._noise.forget_before(position)
        self._pass = _Pass(position, vocab_size, self._temperature, self._noise, self._weights)
        return self._pass

    def observe(self, walk: Walk) -> None:
        """Learn from what the target chose where the walk stood; nothing if nothing was drafted."""
        if self._pass is not None:
            self._pass.learn(walk.token_ids)
            self._pass = None


@dataclass
class _Pass:
    """One pass of the drafter of a coupled request: its `Perturb`."""

    position: int
    vocab_size: int
    temperature: float
    noise: Noise
    weights: CouplingWeights
    both: Float32[Tensor, "2 L Vd"] | None = None  # logits and noise, once scores were asked for
    token_ids: Int64[Tensor, " Vd"] | None = None
    changes_behind: ChangesBehind | None = None

    def __call__(
        self, logits: Float[Tensor, "L Vd"], token_ids: Int64[Tensor, " Vd"] | None
    ) -> Float32[Tensor, "L Vd"]:
        num_depths, num_columns = logits.shape
        both = torch.empty((2, num_depths, num_columns), device=logits.device)
        # The shift changes no rank; without it, scores of large logits would lose their last bits.
        torch.sub(logits, logits.amax(dim=1, keepdim=True), out=both[0])
        for depth in range(num_depths):
            row = self.noise.row(self.position + depth, self.vocab_size, logits.device)
            if token_ids is None:
                both[1, depth] = row[:num_columns]
            else:
                torch.index_select(row, 0, token_ids, out=both[1, depth])
        both[1] *= self.temperature
        self.both, self.token_ids = both, token_ids
        return self._scores(both)

    def weigh(self, changes: Float[Tensor, "L ..."]) -> Float32[Tensor, "L ..."]:
        a = torch.from_numpy(self.weights.values[: len(changes), 0]).to(changes.device)
        return changes * a.float().reshape(-1, *[1] * (changes.dim() - 1))

    def keep(self, changes_behind: ChangesBehind) -> None:
        self.changes_behind = changes_behind

    def _scores(self, both: Float32[Tensor, "2 M Vd"]) -> Float32[Tensor, "M Vd"]:
        weights = self.weights.values[: both.shape[1]].T.copy()
        a, b = torch.from_numpy(weights).to(both)[:, :, None]
        scores: Tensor = a * both[0] + b * both[1]
        return scores

    @torch.inference_mode()
    def learn(self, token_ids: tuple[int, ...]) -> None:
        """Take in the target's tokens at the first depths, as far as they were drafted."""
        if self.both is None:
            return
        both = self.both[:, : len(token_ids)]
        num_chosen = both.shape[1]
        if self.changes_behind is not None:
            changes = self.changes_behind(token_ids[: num_chosen - 1])
            both = torch.stack([both[0] + changes, both[1]])
        chosen = torch.tensor(token_ids[:num_chosen], device=both.device)[:, None]
        columns = torch.arange(both.shape[2], device=both.device)
        at_choice = (columns if self.token_ids is None else self.token_ids) == chosen
        # A banned token has no weight, and -inf times 0 would be NaN.
        known = both.clamp(min=-_HIGHEST_TEMPERATURE)
        p = self._scores(both).softmax(dim=-1)
        apart = known - (known * p).sum(dim=-1, keepdim=True)
        gradient = (apart * at_choice).sum(dim=-1)
        curvature = (apart * p).transpose(0, 1) @ apart.permute(1, 2, 0)
        found = at_choice.any(dim=-1)
        # One copy from the device for all.
        flat = torch.cat([gradient.T, curvature.flatten(1), found[:, None]], dim=1)
        for depth, row in enumerate(flat.to("cpu", torch.float64).numpy()):
            # A choice that cannot be drafted says nothing of how the others rank.
            if row[6]:
                self.weights.learn(depth, row[:2], row[2:6].reshape(2, 2))
