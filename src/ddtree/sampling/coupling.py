"""Coupled drafting: rank tokens by the noise that is going to pick the target's (DESIGN 5).

The noise of a position is fixed by the seed before anything is drafted, so the drafter may use it:

    score of token v at depth i = a_i * logits_i(v) + b_i * T * G_{start+i}(v)

and softmax over v of the score is the probability that the target says v. (DESIGN's form
(logits / T + G) / c is a_i = b_i = 1 / (c_i T); to weigh the two apart fits better, see
docs/decisions/0011.) The text is the same function of seed and context as without.

The weights are learnt from the rounds: the target's choices are a softmax regression on two
numbers per token, whose likelihood has one maximum. Knows no tree and no target.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64
from numpy import ndarray
from torch import Tensor

from ddtree.sampling.noise import Noise
from ddtree.types import Walk

# Given the drafter's logits [L, Vd] and the token of each column (None: the columns are the ids),
# the scores [L, Vd] to rank and normalise instead.
Perturb = Callable[
    [Float[Tensor, "L Vd"], Int64[Tensor, " Vd"] | None],
    Float[Tensor, "L Vd"],
]

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
        # Of the last pass: logits and noise [2, L, Vd], their scores, the columns' tokens.
        self._pass: tuple[Tensor, Tensor, Tensor | None] | None = None

    def perturb(self, position: int, vocab_size: int) -> Perturb:
        """What turns a pass's logits into scores.

        Args:
            position: of the token at depth 1.
            vocab_size: V of the target, over which the rule draws the noise.
        """
        self._noise.forget_before(position)
        return partial(self._scores, position, vocab_size)

    def _scores(
        self,
        position: int,
        vocab_size: int,
        logits_LV: Float[Tensor, "L Vd"],
        token_ids: Int64[Tensor, " Vd"] | None,
    ) -> Float32[Tensor, "L Vd"]:
        num_depths, num_columns = logits_LV.shape
        both = torch.empty((2, num_depths, num_columns), device=logits_LV.device)
        # The shift changes no rank; without it, scores of large logits would lose their last bits.
        torch.sub(logits_LV, logits_LV.amax(dim=1, keepdim=True), out=both[0])
        for depth in range(num_depths):
            row = self._noise.row(position + depth, vocab_size, logits_LV.device)
            noise = row[:num_columns] if token_ids is None else row[token_ids]
            torch.mul(noise, self._temperature, out=both[1, depth])
        a, b = torch.from_numpy(self._weights.values[:num_depths].T.copy()).to(both)[:, :, None]
        scores: Tensor = a * both[0] + b * both[1]
        self._pass = both, scores, token_ids
        return scores

    def observe(self, walk: Walk) -> None:
        """Learn from what the target chose where the walk stood; nothing if nothing was drafted."""
        if self._pass is None:
            return
        both, scores, token_ids = self._pass
        self._pass = None
        chosen = scores.new_tensor(walk.token_ids[: scores.shape[0]], dtype=torch.int64)[:, None]
        num_chosen = chosen.shape[0]
        columns = torch.arange(scores.shape[1], device=scores.device)
        at_choice = (columns if token_ids is None else token_ids) == chosen
        # A banned token has no weight, and -inf times 0 would be NaN.
        known = both[:, :num_chosen].clamp(min=-_HIGHEST_TEMPERATURE)
        p = scores[:num_chosen].softmax(dim=-1)
        apart = known - (known * p).sum(dim=-1, keepdim=True)
        gradient = (apart * at_choice).sum(dim=-1)
        curvature = torch.einsum("ilv,jlv,lv->lij", apart, apart, p)
        found = at_choice.any(dim=-1)
        # One copy from the device for all.
        flat = torch.cat([gradient.T, curvature.flatten(1), found[:, None]], dim=1)
        for depth, row in enumerate(flat.to("cpu", torch.float64).numpy()):
            # A choice that cannot be drafted says nothing of how the others rank.
            if row[6]:
                self._weights.learn(depth, row[:2], row[2:6].reshape(2, 2))
