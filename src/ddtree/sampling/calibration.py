"""What the drafter's probabilities are worth, learnt from the rounds themselves.

A drafter that says 0.9 may be right half of the time, and more so at some depths than at others.
Per depth we learn a monotone map from its probability of a token to how often the target chose that
token, given that the walk stood at the token's parent: that is what a node's worth multiplies.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

from ddtree.types import Marginals, Walk

# Bins are even in log-odds: most tokens are near 0, and those near 1 matter most.
_CENTRES = np.linspace(-7.0, 5.0, 13)
# What a bin is thought to be worth before it has been seen counts as so many observations.
_PRIOR_WEIGHT = 3.0
# The same for the whole depth, in tokens expected to be chosen: a few rounds tell how good it is.
_PRIOR_TOKENS = 1.5
# A fit takes a tenth of a millisecond: after every round at first, then after every few.
_FRESH_ROUNDS, _REFIT_ROUNDS = 32, 8
# Older rounds fade, with this many rounds to half their weight.
_HALF_LIFE_ROUNDS = 200.0


class Calibration:
    """Monotone maps of probabilities, one per depth; starts as the identity.

    Args:
        num_depths: L, the most depths of a drafter pass.
    """

    def __init__(self, num_depths: int) -> None:
        shape = (num_depths, _CENTRES.shape[0])
        self._seen: Float64[ndarray, "L bins"] = np.zeros(shape)
        self._hits: Float64[ndarray, "L bins"] = np.zeros(shape)
        # Per depth: choices that were among the tokens said, and how many were to be expected.
        self._chosen: Float64[ndarray, " L"] = np.zeros(num_depths)
        self._expected: Float64[ndarray, " L"] = np.zeros(num_depths)
        self._rounds = 0
        self._table: Float64[ndarray, "L bins"] | None = None  # None: to be fitted anew

    def observe(self, marginals: Marginals, walk: Walk) -> None:
        """Learn from one round: what the target chose at every row where the walk stood.

        The tokens in front of a row are the drafted ones, or the walk would not have come there,
        so each choice speaks of all ranks of its depth, those outside the tree included.

        Args:
            marginals: as the drafter gave them, before `apply`.
            walk: where the target went.
        """
        chosen = np.array(walk.token_ids[: marginals.num_depths], np.int64)
        said = marginals.log_probs.to("cpu").numpy()[: chosen.shape[0]]
        hits = marginals.token_ids.to("cpu").numpy()[: chosen.shape[0]] == chosen[:, None]
        nearest = np.rint((_log_odds(said) - _CENTRES[0]) / (_CENTRES[1] - _CENTRES[0]))
        bins = nearest.clip(0, _CENTRES.shape[0] - 1).astype(np.int64)
        depths = np.broadcast_to(np.arange(chosen.shape[0])[:, None], bins.shape)
        fade = 0.5 ** (1.0 / _HALF_LIFE_ROUNDS)
        for sums in (self._seen, self._hits, self._chosen, self._expected):
            sums *= fade
        np.add.at(self._seen, (depths, bins), 1.0)
        np.add.at(self._hits, (depths, bins), hits.astype(np.float64))
        self._chosen[: chosen.shape[0]] += hits.any(axis=1)
        self._expected[: chosen.shape[0]] += np.exp(said.astype(np.float64)).sum(axis=1)
        self._rounds += 1
        if self._rounds < _FRESH_ROUNDS or self._rounds % _REFIT_ROUNDS == 0:
            self._table = None

    def apply(self, marginals: Marginals) -> Marginals:
        """The same tokens in the same order, with what their probabilities are worth."""
        said = marginals.log_probs.to("cpu").numpy()
        table = self._table = self.table() if self._table is None else self._table
        odds = _log_odds(said)
        worth = np.empty(said.shape, np.float32)
        for depth, row in enumerate(odds):
            # A shift in log-odds, so that an untouched calibration changes nothing but rounding.
            worth[depth] = row + np.interp(row, _CENTRES, table[depth] - _CENTRES)
        log_probs = -np.log1p(np.exp(-np.minimum.accumulate(worth, axis=1)))
        log_probs[said == -np.inf] = -np.inf
        return Marginals(marginals.log_probs.new_tensor(log_probs), marginals.token_ids)

    def table(self) -> Float64[ndarray, "L bins"]:
        """Log-odds of being chosen per depth and bin, rising along each row."""
        share = (self._chosen + _PRIOR_TOKENS) / (self._expected + _PRIOR_TOKENS)
        prior = np.minimum(share, 1.0)[:, None] / (1.0 + np.exp(-_CENTRES))
        rate = (self._hits + _PRIOR_WEIGHT * prior) / (self._seen + _PRIOR_WEIGHT)
        weights = self._seen + _PRIOR_WEIGHT
        rising = np.stack([_isotonic(r, w) for r, w in zip(rate, weights, strict=True)])
        worth: Float64[ndarray, "L bins"] = np.log(rising) - np.log1p(-rising)
        return worth


def _log_odds(log_probs: Float64[ndarray, ...]) -> Float64[ndarray, ...]:
    """Log-odds of probabilities, within the bins' range."""
    p = np.clip(np.exp(log_probs.astype(np.float64)), 1e-9, 1 - 1e-6)
    odds: Float64[ndarray, ...] = np.log(p) - np.log1p(-p)
    return odds


def _isotonic(values: Float64[ndarray, " n"], weights: Float64[ndarray, " n"]) -> ndarray:
    """The rising sequence nearest to `values` in weighted squares: pool adjacent violators."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        blocks.append((value, weight, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (v1, w1, n1), (v2, w2, n2) = blocks[-2:]
            blocks[-2:] = [((v1 * w1 + v2 * w2) / (w1 + w2), w1 + w2, n1 + n2)]
    return np.concatenate([np.full(n, v) for v, _, n in blocks])
