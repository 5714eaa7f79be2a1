"""What was counted of a drafter's words, and what its probabilities are worth by that.

The readable twin that defines `native/calibration.c`; equal but for rounding, so the two may differ
where two nodes are worth the same. Letters in shapes: L depths counted, D <= L depths at hand,
M rows of each, K ranks, J bins.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32, Float64, Int64
from numpy import ndarray


def count(
    counts: Float64[ndarray, "L width"],
    bins: Float64[ndarray, "2 J"],
    log_probs: Float32[ndarray, "D K"],
    token_ids: Int64[ndarray, "D K"],
    chosen: tuple[int, ...],
    fade: float,
) -> None:
    """Take in what the target chose at the first depths of one round.

    Args:
        counts: mutated. Per depth 2 J + 2 numbers: tokens seen in each bin, those of them that were
            chosen, then of all bins the chosen ones, and how many the drafter's words promise.
        bins: log-probs, rising: the bins' centres, and the edges up to which they go.
        log_probs: what the drafter said.
        token_ids: of what.
        chosen: a token of each depth, as far as the walk came; more than D are not read.
        fade: what the earlier rounds' counts are multiplied by.
    """
    num_bins = bins.shape[1]
    counts *= fade
    for row, said, ids, token in zip(counts, log_probs, token_ids, chosen, strict=False):
        places = np.minimum(np.searchsorted(bins[1], said), num_bins - 1)
        row[:num_bins] += np.bincount(places, minlength=num_bins)
        row[num_bins : 2 * num_bins] += np.bincount(places[ids == token], minlength=num_bins)
        row[-2:] += (np.sum(ids == token), np.exp(said.astype(np.float64)).sum())


def worth(
    counts: Float64[ndarray, "L width"],
    bins: Float64[ndarray, "2 J"],
    log_probs: Float32[ndarray, "D *M K"],
    prior_weight: float,
    prior_tokens: float,
) -> Float32[ndarray, "D *M K"]:
    """Log-probs as the counts have it, in the order of the drafter's.

    Between the centres of two bins the log-odds change evenly, outside the probability keeps its
    ratio to what the drafter says: untouched counts change nothing.

    Args:
        counts, bins: see `count`.
        log_probs: one row or several for each depth, each in the drafter's order.
        prior_weight: a bin is thought to be worth what the drafter says, times the share of
            promised tokens that were chosen at this depth; that counts as so many observations.
        prior_tokens: the share is thought to be 1, which counts as so many promised tokens.
    """
    centres, num_bins = bins[0], bins.shape[1]
    found = np.empty(log_probs.shape, np.float32)
    for depth, (row, said) in enumerate(zip(counts, log_probs.astype(np.float64), strict=False)):
        seen, hits, (chosen, promised) = np.split(row, [num_bins, 2 * num_bins])
        share = min((chosen + prior_tokens) / (promised + prior_tokens), 1.0)
        weights = seen + prior_weight
        rates = _isotonic((hits + prior_weight * share * np.exp(centres)) / weights, weights)
        # Beyond the outermost centres the nearest one's ratio counts.
        inside = np.clip(said, centres[0], centres[-1])
        odds = np.interp(_log_odds(inside), _log_odds(centres), _log_odds(np.log(rates)))
        found[depth] = said - inside - np.log1p(np.exp(-odds))
    # The maps rise and stay below 0 but for rounding, and for the ratio beyond the last centre.
    return np.minimum.accumulate(np.minimum(found, 0.0), axis=-1)


def _log_odds(log_probs: Float64[ndarray, ...]) -> Float64[ndarray, ...]:
    odds: Float64[ndarray, ...] = log_probs - np.log(-np.expm1(log_probs))
    return odds


def _isotonic(values: Float64[ndarray, " J"], weights: Float64[ndarray, " J"]) -> ndarray:
    """The rising sequence nearest to `values` in weighted squares: pool adjacent violators."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        blocks.append((value, weight, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (v1, w1, n1), (v2, w2, n2) = blocks[-2:]
            blocks[-2:] = [((v1 * w1 + v2 * w2) / (w1 + w2), w1 + w2, n1 + n2)]
    return np.concatenate([np.full(n, v) for v, _, n in blocks])
