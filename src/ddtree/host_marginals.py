"""Marginals as the host's builders read them: numpy arrays, checked once, and what follows what.

Letters in shapes: L drafted depths, M = L - 1, K ranks kept per depth. Knows no tree and no model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float32, Int64
from numpy import ndarray

from ddtree.errors import MarginalsError
from ddtree.types import Marginals, Transitions


@dataclass(frozen=True)
class HostTransitions:
    """`Transitions` as numpy arrays on the host, checked."""

    log_probs: Float32[ndarray, "M K K"]
    ranks: Int64[ndarray, "M K K"]

    @classmethod
    def of(cls, transitions: Transitions, num_depths: int, num_ranks: int) -> HostTransitions:
        """Copy to the host and check.

        Raises:
            MarginalsError: shapes other than [num_depths - 1, num_ranks, num_ranks], or a row that
                is not legal or names a rank that there is none of (names the depth).
        """
        shape = (max(num_depths - 1, 0), num_ranks, num_ranks)
        given = tuple(transitions.log_probs.shape), tuple(transitions.ranks.shape)
        if given != (shape, shape):
            raise MarginalsError(
                "transitions",
                expected=f"log_probs and ranks of shape [L - 1, K, K], here {shape}",
                got=f"{given[0]} and {given[1]}",
                remedy="Score all K ranks of each depth but the first behind all K before it.",
            )
        log_probs = transitions.log_probs.to("cpu", torch.float32).numpy()
        ranks = transitions.ranks.to("cpu", torch.int64).numpy()
        if not _is_legal(log_probs):
            for depth, parent in np.ndindex(log_probs.shape[:2]):
                _refuse(log_probs[depth, parent], f"depth {depth + 2} behind rank {parent}")
        outside = (ranks < 0) | (ranks >= num_ranks)
        if outside.any():
            depth, parent, place = np.argwhere(outside)[0]
            raise MarginalsError(
                "transitions",
                expected=f"ranks from 0 to {num_ranks - 1}, columns of the depth's token_ids",
                got=f"{ranks[depth, parent, place]} at depth {depth + 2} behind rank {parent}",
                remedy="Rank the K tokens of each depth, not the vocabulary.",
            )
        return cls(log_probs, ranks)


@dataclass(frozen=True)
class HostMarginals:
    """`Marginals` as numpy arrays on the host, checked: what the host builders read.

    Args:
        log_probs: [L, K] float32, free of NaN, <= 0, sorted from high to low.
        token_ids: [L, K] int64.
        transitions: likewise, each row for itself; None where there are none.
    """

    log_probs: Float32[ndarray, "L K"]
    token_ids: Int64[ndarray, "L K"]
    transitions: HostTransitions | None = None

    @classmethod
    def of(cls, marginals: Marginals) -> HostMarginals:
        """Copy to the host and check.

        Raises:
            MarginalsError: NaN or a positive log-prob (names the depth), a row out of order, or
                shapes that differ; see also `HostTransitions.of`.
        """
        if marginals.log_probs.shape != marginals.token_ids.shape:
            raise MarginalsError(
                "marginals",
                expected="log_probs and token_ids of one shape [L, K]",
                got=f"{tuple(marginals.log_probs.shape)} and {tuple(marginals.token_ids.shape)}",
                remedy="Gather the token ids with the same top-k as the log-probs.",
            )
        log_probs = marginals.log_probs.to("cpu", torch.float32).numpy()
        if not _is_legal(log_probs):
            for depth, row in enumerate(log_probs, start=1):
                _refuse(row, f"depth {depth}")
        transitions = marginals.transitions
        return cls(
            log_probs,
            marginals.token_ids.to("cpu", torch.int64).numpy(),
            None if transitions is None else HostTransitions.of(transitions, *log_probs.shape),
        )

    def behind(self, depth: int, rank: int) -> tuple[Float32[ndarray, " K"], Int64[ndarray, " K"]]:
        """What follows a token: log-probs from high to low, and the rank at the next depth of each.

        Args:
            depth: of the token, from 0 (the root) to L - 1.
            rank: of the token at its depth; of the root's, nothing depends.
        """
        if depth == 0 or self.transitions is None:
            return self.log_probs[depth], np.arange(self.log_probs.shape[1])
        return self.transitions.log_probs[depth - 1, rank], self.transitions.ranks[depth - 1, rank]


def _is_legal(log_probs: Float32[ndarray, "*rows K"]) -> bool:
    # With the first rank at most 0, order alone keeps the others there; NaN fails either.
    is_sorted = (log_probs[..., 1:] <= log_probs[..., :-1]).all()
    return bool(is_sorted and (log_probs[..., :1] <= 0).all())


def _refuse(row: Float32[ndarray, " K"], place: str) -> None:
    """Say what is wrong with a row, if anything is."""
    if np.isnan(row).any():
        raise MarginalsError(
            "marginals",
            expected="log-probs without NaN",
            got=f"NaN at {place}",
            remedy="Look for inf - inf in the drafter's logits or its normaliser.",
        )
    if (row > 0).any():
        raise MarginalsError(
            "marginals",
            expected="log-probs <= 0",
            got=f"{row.max()} at {place}",
            remedy="Normalise with log_softmax and clamp rounding above 0.",
        )
    if (row[1:] > row[:-1]).any():
        raise MarginalsError(
            "marginals",
            expected="each row sorted from high to low",
            got=f"an increasing pair at {place}",
            remedy="Use torch.topk(..., sorted=True).",
        )
