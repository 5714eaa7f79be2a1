"""What the drafter's probabilities are worth, learnt from the rounds themselves.

A drafter that says 0.9 may be right half of the time, and more so at some depths than at others.
Per depth we learn a monotone map from its probability of a token to how often the target chose that
token, given that the walk stood at the token's parent: that is what a node's worth multiplies. In a
first-order draft the probability is that behind the parent.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float32, Float64, Int64
from numpy import ndarray
from torch import Tensor

from ddtree.sampling import worth
from ddtree.tree import native
from ddtree.types import Marginals, Transitions, Walk

# What a bin is thought to be worth before it has been seen counts as so many observations.
_PRIOR_WEIGHT = 3.0
# The same for the whole depth, in tokens expected to be chosen: a few rounds tell how good it is.
_PRIOR_TOKENS = 1.5
# Older rounds fade, with this many rounds to half their weight.
_HALF_LIFE_ROUNDS = 200.0

# The compiled core takes a tenth of the time, which is most of what a round of budget "auto" adds.
_count = native.count if native.AVAILABLE else worth.count
_worth = native.worth if native.AVAILABLE else worth.worth


class Calibration:
    """Monotone maps of probabilities, one per depth; starts as the identity.

    Args:
        num_depths: L, the most depths of a drafter pass.
    """

    def __init__(self, num_depths: int) -> None:
        self._bins = _bins()
        self._counts: Float64[ndarray, "L width"]
        self._counts = np.zeros((num_depths, 2 * self._bins.shape[1] + 2))
        self._fade = 0.5 ** (1.0 / _HALF_LIFE_ROUNDS)

    def observe(self, marginals: Marginals, walk: Walk) -> None:
        """Learn from one round: what the target chose at every row where the walk stood.

        The tokens in front of a row are the drafted ones, or the walk would not have come there,
        so each choice speaks of all ranks of its depth, those outside the tree included.

        Args:
            marginals: as the drafter gave them, before `apply`; on the host.
            walk: where the target went.
        """
        log_probs, token_ids = marginals.log_probs.numpy(), marginals.token_ids.numpy()
        if marginals.transitions is not None:
            log_probs, token_ids = _rows_along(marginals, marginals.transitions, walk.token_ids)
        _count(self._counts, self._bins, log_probs, token_ids, walk.token_ids, self._fade)

    def apply(self, marginals: Marginals) -> Marginals:
        """The same tokens in the same order, with what their probabilities are worth.

        Args:
            marginals: on the host.
        """
        behind = marginals.transitions
        if behind is not None:
            behind = Transitions(self._worth(behind.log_probs, 1), behind.ranks)
        return Marginals(self._worth(marginals.log_probs, 0), marginals.token_ids, behind)

    def _worth(
        self, log_probs: Float32[Tensor, "D *M K"], first_depth: int
    ) -> Float32[Tensor, "D *M K"]:
        counts, said = self._counts[first_depth:], log_probs.numpy()
        return torch.from_numpy(_worth(counts, self._bins, said, _PRIOR_WEIGHT, _PRIOR_TOKENS))


def _rows_along(
    marginals: Marginals, behind: Transitions, path: Sequence[int]
) -> tuple[Float32[ndarray, "D K"], Int64[ndarray, "D K"]]:
    """The rows behind each token of a path, and whose they are, up to one that was no candidate."""
    token_ids = marginals.token_ids.numpy()
    log_probs, followers = behind.log_probs.numpy(), behind.ranks.numpy()
    rows, ids = [marginals.log_probs.numpy()[0]], [token_ids[0]]
    for depth, token in enumerate(path[: len(log_probs)]):
        columns = np.flatnonzero(token_ids[depth] == token)
        if len(columns) == 0:
            break
        rows.append(log_probs[depth, columns[0]])
        ids.append(token_ids[depth + 1, followers[depth, columns[0]]])
    return np.stack(rows), np.stack(ids)


def _bins() -> Float64[ndarray, "2 J"]:
    """Log-probs: centres, and upper edges. Even in log-odds: most tokens are near 0, and those near
    1 matter most."""
    odds = np.linspace(-7.0, 5.0, 13)
    bins: Float64[ndarray, "2 J"] = -np.log1p(np.exp(-np.stack([odds, odds + 0.5])))
    return bins
