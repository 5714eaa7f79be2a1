"""Drafters whose behaviour is known: they read the continuation from a script.

A drafter cannot change the text, only the number of rounds; so each of these must give the same
tokens, and scripted ones must give the number of rounds that their script implies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ddtree.draft import DraftSession
from ddtree.models.drafter import top_marginals
from ddtree.sampling.coupling import Perturb
from ddtree.types import Marginals


def feed(session: DraftSession, features: Tensor) -> None:
    """Extend a session that reads features alone: the tokens mean nothing."""
    session.extend(features, torch.zeros(features.shape[0], dtype=torch.int64))


# Given a position, the tokens of the ranks there, best first.
Ranks = Callable[[int], list[int]]


@dataclass
class ScriptedSession:
    """Counts the context and remembers its features and tokens."""

    drafter: ScriptedDrafter
    features: list[Tensor] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    length: int = 0

    def extend(self, features: Tensor, token_ids: Tensor) -> None:
        self.features.append(features.clone())
        self.token_ids.extend(token_ids.tolist())
        self.length += features.shape[0]

    def propose(
        self, root_id: int, *, num_depths: int, num_ranks: int, perturb: Perturb | None = None
    ) -> Marginals:
        # Who knows the text knows what the noise picks: `perturb` would only blur the script.
        self.drafter.roots.append((self.length, root_id))
        rows = []
        for depth in range(1, num_depths + 1):
            rows.append(self.drafter.ranks(self.length + depth))
        # A wrong script lacks the true token, so rows may differ in length by one.
        num_ranks = min(num_ranks, *map(len, rows))
        token_ids = torch.tensor([row[:num_ranks] for row in rows])
        weights = torch.tensor([[0.6 * 0.5**r for r in range(token_ids.shape[1])]])
        return Marginals(weights.log().expand(num_depths, -1).contiguous(), token_ids)


@dataclass
class ScriptedDrafter:
    """Proposes what `ranks` says for each position."""

    ranks: Ranks
    num_depths: int = 7
    layer_ids: Sequence[int] = (1, 2)
    sessions: list[ScriptedSession] = field(default_factory=list)
    roots: list[tuple[int, int]] = field(default_factory=list)

    def start(self, capacity: int) -> ScriptedSession:
        self.sessions.append(ScriptedSession(self))
        return self.sessions[-1]


def _others(truth: int, vocab_size: int, count: int) -> list[int]:
    """`count` wrong tokens."""
    return [(truth + 1 + i) % vocab_size for i in range(count)]


def perfect(script: Sequence[int], vocab_size: int, **options: int) -> ScriptedDrafter:
    """Always right, at rank 0. `script` is the whole sequence, prompt included."""
    return right_at_rank(lambda position: 0, script, vocab_size, **options)


def hostile(script: Sequence[int], vocab_size: int, **options: int) -> ScriptedDrafter:
    """Never right at any rank, and confident."""
    return right_at_rank(lambda position: None, script, vocab_size, **options)


def right_at_rank(
    rank_at: Callable[[int], int | None], script: Sequence[int], vocab_size: int, **options: int
) -> ScriptedDrafter:
    """Right at the rank that `rank_at(position)` says; nowhere if it says None."""

    def ranks(position: int) -> list[int]:
        truth = script[position] if position < len(script) else 0
        rank = rank_at(position)
        if rank is None:
            return _others(truth, vocab_size, vocab_size - 1)
        wrong = _others(truth, vocab_size, vocab_size - 1)
        return [*wrong[:rank], truth, *wrong[rank:]]

    return ScriptedDrafter(ranks, **options)


def right_for(
    k: int, script: Sequence[int], vocab_size: int, num_prompt: int, **options: int
) -> ScriptedDrafter:
    """Right for exactly k tokens per round: of every k + 1 positions, the last is wrong.

    Rounds start where the round before ended, so the wrong position is always at depth k + 1.
    """

    def rank_at(position: int) -> int | None:
        # The prefill delivers position num_prompt; the first round drafts from the next one.
        return None if (position - num_prompt) % (k + 1) == 0 else 0

    return right_at_rank(rank_at, script, vocab_size, **options)


def random_drafter(seed: int, vocab_size: int, **options: int) -> ScriptedDrafter:
    """Random tokens in random order, the same for a position every time."""

    def ranks(position: int) -> list[int]:
        return np.random.default_rng([seed, position]).permutation(vocab_size).tolist()

    return ScriptedDrafter(ranks, **options)


# Given the context's length, the root and the number of depths, logits [L, Vd].
Logits = Callable[[int, int, int], Tensor]


@dataclass
class LogitsSession:
    """Follows the contract to the letter: logits through `perturb`, then normalised and ranked."""

    drafter: LogitsDrafter
    length: int = 0

    def extend(self, features: Tensor, token_ids: Tensor) -> None:
        self.length += features.shape[0]

    def propose(
        self, root_id: int, *, num_depths: int, num_ranks: int, perturb: Perturb | None = None
    ) -> Marginals:
        logits, token_ids = self.drafter.logits(self.length, root_id, num_depths), None
        if self.drafter.draft_token_ids is not None:
            token_ids = self.drafter.draft_token_ids
        if perturb is not None:
            self.drafter.num_perturbed += 1
            logits = perturb(logits, token_ids)
        return top_marginals(logits, num_ranks, token_ids)


@dataclass
class LogitsDrafter:
    """Proposes by logits that depend on the place alone; counts how often it was coupled."""

    logits: Logits
    num_depths: int = 7
    layer_ids: Sequence[int] = (1, 2)
    draft_token_ids: Tensor | None = None
    num_perturbed: int = 0

    def start(self, capacity: int) -> LogitsSession:
        return LogitsSession(self)
