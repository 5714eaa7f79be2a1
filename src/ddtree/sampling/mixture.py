"""A second opinion in the draft: one guessed continuation, mixed into the drafter's distributions.

    p(token behind the guess so far) = w * [token is the next guess] + (1 - w) * p_drafter(token)

At depth 1 and behind every guessed token; behind other tokens the drafter alone speaks. That is a
first-order draft again, so every tree builder serves it. The weights w are learnt from the rounds,
as the likeliest share of the choices that came from the guess (online EM). Knows neither where a
guess comes from nor any model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float32, Float64, Int64
from numpy import ndarray
from torch import Tensor

from ddtree.types import Marginals

# Before anything was seen: this weight, as if so many choices had shown it.
_PRIOR, _PRIOR_CHOICES = 0.3, 4.0
# Older choices fade, with so many of their kind to half their weight.
_HALF_LIFE = 200.0
# Beyond these nothing could be learnt any more.
_LEAST, _MOST = 0.001, 0.98


class MixtureWeights:
    """w for each kind of guess and depth; outlives a generation.

    Args:
        num_kinds: kinds of guess that are told apart.
        num_depths: depths that are told apart; deeper ones count as the last.
    """

    def __init__(self, num_kinds: int, num_depths: int) -> None:
        self._right = np.full((num_kinds, num_depths), _PRIOR * _PRIOR_CHOICES)
        self._seen = np.full((num_kinds, num_depths), _PRIOR_CHOICES)
        self._keep = 0.5 ** (1.0 / _HALF_LIFE)

    @property
    def counts(self) -> tuple[list[list[float]], list[list[float]]]:
        """All that was learnt, [kinds][depths] each: choices that came from the guess, and all."""
        return self._right.tolist(), self._seen.tolist()

    @classmethod
    def of_counts(
        cls, right: Sequence[Sequence[float]], seen: Sequence[Sequence[float]]
    ) -> MixtureWeights:
        """Weights that have learnt `counts`.

        Raises:
            ValueError: tables that are no numbers, of two shapes, or that no rounds could count.
        """
        tables = np.array([right, seen], np.float64)
        if tables.ndim != 3 or not (tables[1] > 0).all() or not (tables[0] >= 0).all():
            raise ValueError("counts of guesses that are no tables of numbers above 0")
        weights = cls(*tables.shape[1:])
        weights._right, weights._seen = tables
        return weights

    def of(self, kind: int, num_depths: int) -> Float64[ndarray, " L"]:
        """w at the first `num_depths` depths."""
        depths = np.minimum(np.arange(num_depths), self._seen.shape[1] - 1)
        weights: Float64[ndarray, " L"] = self._right[kind, depths] / self._seen[kind, depths]
        return weights.clip(_LEAST, _MOST)

    def learn(self, kind: int, depth: int, said: float, hit: bool) -> None:
        """What the target chose where the guess was asked.

        Args:
            kind: of the guess.
            depth: from 0 for the first position.
            said: probability that the drafter alone gave the guessed token.
            hit: the target chose it.
        """
        place = kind, min(depth, self._seen.shape[1] - 1)
        weight = float(self.of(kind, place[1] + 1)[-1])
        self._right[place] *= self._keep
        self._seen[place] = self._keep * self._seen[place] + 1.0
        if hit:
            self._right[place] += weight / (weight + (1.0 - weight) * said)


@dataclass(frozen=True, kw_only=True)
class Mixed:
    """A draft with a guess in it.

    Args:
        marginals: on the host.
        said: [G], the probability that the drafter alone gave each guessed token behind the guess
            so far.
    """

    marginals: Marginals
    said: Float64[ndarray, " G"]


def mix(
    marginals: Marginals, guess: Sequence[int], weights: Float64[ndarray, " G"], num_ranks: int
) -> Mixed:
    """Mix a guessed continuation into a draft.

    Args:
        marginals: of the drafter, L depths.
        guess: from 1 to L tokens, from depth 1 on.
        weights: w of each.
        num_ranks: most candidates per depth in the result; the guess takes the place of the last
            one where it is not among them.

    >>> said = torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log()
    >>> drafted = Marginals(said, torch.tensor([[1, 2], [3, 4]]))
    >>> mixed = mix(drafted, [2, 9], np.array([0.5, 0.5]), 2).marginals
    >>> mixed.token_ids.tolist(), mixed.log_probs[0].exp().tolist()
    ([[2, 1], [3, 9]], [0.75, 0.25])
    """
    table = _Table(marginals, num_ranks)
    said = np.array([table.add(depth, token) for depth, token in enumerate(guess)])
    for depth, weight in enumerate(weights[: len(guess)].tolist()):
        table.weigh(depth, weight)
    return Mixed(marginals=table.marginals(), said=said)


class _Table:
    """A first-order draft by columns, not yet sorted: `behind[d, p, j]` is the log-prob of column j
    at depth d + 1 behind column p of the depth before; all p are alike at depth 1."""

    def __init__(self, marginals: Marginals, num_ranks: int) -> None:
        num_ranks = min(num_ranks, marginals.num_ranks)
        self.alone: Float32[ndarray, "L K"] = _host(marginals.log_probs[:, :num_ranks], np.float32)
        self.token_ids: Int64[ndarray, "L K"] = _host(marginals.token_ids[:, :num_ranks], np.int64)
        self.behind: Float32[ndarray, "L K K"]
        self.behind = np.repeat(self.alone[:, None], num_ranks, axis=1)
        if marginals.transitions is not None:
            ranks = _host(marginals.transitions.ranks, np.int64)
            log_probs = _host(marginals.transitions.log_probs, np.float32)
            by_column = np.empty_like(log_probs)
            np.put_along_axis(by_column, ranks, log_probs, axis=2)
            self.behind[1:] = by_column[:, :num_ranks, :num_ranks]
        self.columns: list[int] = []  # of the guess

    def add(self, depth: int, token: int) -> float:
        """Make room for a guessed token; returns its probability behind the guess before it."""
        found = np.flatnonzero(self.token_ids[depth] == token)
        column = int(found[0]) if found.size else self.alone.shape[1] - 1
        if not found.size:
            self.token_ids[depth, column] = token
            self.alone[depth, column] = -np.inf
            self.behind[depth, :, column] = -np.inf
            if depth + 1 < len(self.behind):
                # Nobody scored what follows a token that was not drafted.
                self.behind[depth + 1, column] = self.alone[depth + 1]
        parent = self.columns[-1] if self.columns else 0
        self.columns.append(column)
        return float(np.exp(self.behind[depth, parent, column]))

    def weigh(self, depth: int, weight: float) -> None:
        """Give the guess at a depth its weight, and leave the drafter the rest."""
        # At depth 1 every parent is the root.
        parent: int | slice = self.columns[depth - 1] if depth else slice(None)
        rows = self.behind[depth, parent] + np.float32(np.log1p(-weight))
        column = self.columns[depth]
        rows[..., column] = np.logaddexp(rows[..., column], np.float32(np.log(weight)))
        self.behind[depth, parent] = np.minimum(rows, 0.0)

    def marginals(self) -> Marginals:
        """Sorted, as builders want it."""
        alone, token_ids, behind = map(torch.from_numpy, (self.alone, self.token_ids, self.behind))
        return Marginals.first_order(alone, token_ids, behind)


def _host(values: Tensor, dtype: type) -> ndarray:
    """A copy that may be written to."""
    return np.array(values.cpu().numpy(), dtype=dtype)
