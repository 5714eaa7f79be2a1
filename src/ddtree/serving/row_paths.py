"""The rows that a step's decisions are made at: each one's path, and each request's own rule.

A row stands behind the tokens of its path, and what a request asks of the target may depend on
them. Knows no logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from ddtree.sampling.noise import Noise
from ddtree.types import DraftTree

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


@dataclass(frozen=True)
class StepRows:
    """The M rows with logits of a step: request after request, its root first, then its nodes.

    Args:
        request_of_row: [M], from 0 to R - 1.
        depths: [M], 0 for the roots.
        parents: [M], the row of each one's parent, -1 for the roots; parents come first.
        token_ids: [M], the token that each row was given to.
    """

    request_of_row: Int64[ndarray, " M"]
    depths: Int64[ndarray, " M"]
    parents: Int64[ndarray, " M"]
    token_ids: Int64[ndarray, " M"]

    @staticmethod
    def of(trees: Sequence[DraftTree]) -> StepRows:
        """The rows of R >= 1 requests' trees, one behind the other.

        >>> from ddtree.serving.step import chain_of
        >>> rows = StepRows.of([chain_of(5, [7, 8]), chain_of(4, [])])
        >>> rows.parents.tolist(), rows.path(2), rows.root_rows.tolist()
        ([-1, 0, 1, -1], [7, 8], [0, 3])
        """
        counts = [tree.num_rows for tree in trees]
        starts = np.repeat(np.cumsum([0, *counts[:-1]]), counts)
        parents = np.concatenate([tree.parents for tree in trees]).astype(np.int64)
        return StepRows(
            request_of_row=np.repeat(np.arange(len(trees)), counts),
            depths=np.concatenate([tree.depths for tree in trees]).astype(np.int64),
            parents=np.where(parents < 0, -1, parents + starts),
            token_ids=np.concatenate([tree.token_ids for tree in trees]),
        )

    @property
    def num_rows(self) -> int:
        """M."""
        return int(self.depths.shape[0])

    @cached_property
    def root_rows(self) -> Int64[ndarray, " R"]:
        """[R], the root of each request."""
        return np.flatnonzero(self.depths == 0)

    @cached_property
    def children(self) -> dict[tuple[int, int], int]:
        """The row below another one that was given a token."""
        parents, token_ids = self.parents.tolist(), self.token_ids.tolist()
        below = zip(parents, token_ids, strict=True)
        return {(p, token): row for row, (p, token) in enumerate(below) if p >= 0}

    def path(self, row: int) -> list[int]:
        """The tokens from the root's child to this row; none at a root."""
        path = []
        while (parent := int(self.parents[row])) >= 0:
            path.append(int(self.token_ids[row]))
            row = parent
        return path[::-1]


@dataclass(frozen=True, kw_only=True)
class RequestRule:
    """What decides the tokens of one request of a step.

    Args:
        num_tokens: of its text so far, prompt and output, the root included: the position of the
            token that is chosen at the root.
        noise: of its seed (`seed_of`); not asked where it is greedy.
        sampling_params: what the user asked for.
        output_token_ids: decided behind the prompt.
    """

    num_tokens: int
    noise: Noise
    sampling_params: SamplingParams
    output_token_ids: Sequence[int]


def seed_of(seed: int | None, request_id: str) -> int:
    """The seed of a request's noise, 0 <= seed < 2**64; the same in every process of an engine.

    Args:
        seed: the user's; engines take negative ones and ones beyond 64 bits, which wrap around.
        request_id: the engine's own, which stands in where the user gave none.

    >>> seed_of(7, "a"), seed_of(-2, "a") == 2**64 - 2, seed_of(None, "a") == seed_of(None, "b")
    (7, True, False)
    """
    if seed is None:
        return int.from_bytes(sha256(request_id.encode()).digest()[:8], "little")
    return seed % 2**64
