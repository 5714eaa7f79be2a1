"""How many nodes a round gets: a fixed number, or as many as pay on this machine, now (DESIGN 7).

A round that drafts earns 1 + the sum of its nodes' probabilities, and costs a drafter pass and a
verify forward of its rows. With lambda, the tokens per second that we make anyway, the best size is
the one with the highest earnings - lambda x cost: that maximises tokens per second over many
rounds, where the best ratio of each single round would not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ddtree.costs import CostProfile
from ddtree.sampling.calibration import Calibration
from ddtree.types import DraftTree, Marginals, Walk

Builder = Callable[[Marginals, int, int], DraftTree]

# Of the last rounds, so many weigh on what speculation is thought to earn.
_MEMORY_ROUNDS = 24
# A measured cost counts as so many rounds at that size.
_PRIOR_ROUNDS = 3
# Rounds without a draft after one that was not worth it, doubled each time.
_FIRST_PAUSE, _LONGEST_PAUSE = 4, 64
# After so many rounds with a draft, doubled each time, one goes without though it would pay: else
# nobody knew what that costs by now.
_FIRST_PLAIN, _LAST_PLAIN = 8, 128


class Budget(Protocol):
    """Decides the size of each round's tree.

    Attributes:
        max_nodes: B, the most nodes that a round can get besides the root.
    """

    @property
    def max_nodes(self) -> int:
        """See above."""
        ...

    def wants_draft(self, context_length: int) -> bool:
        """Whether to ask the drafter this round; called once, when the round begins."""
        ...

    def build(self, marginals: Marginals, root_id: int, builder: Builder) -> DraftTree:
        """The tree to verify."""
        ...

    def observe(self, walk: Walk) -> None:
        """The round is over."""
        ...


@dataclass(frozen=True)
class FixedBudget:
    """The same number of nodes in every round."""

    max_nodes: int

    def wants_draft(self, context_length: int) -> bool:
        """Always, unless there is nothing to spend."""
        return self.max_nodes > 0

    def build(self, marginals: Marginals, root_id: int, builder: Builder) -> DraftTree:
        """The best tree of the drafter's own probabilities."""
        return builder(marginals, root_id, self.max_nodes)

    def observe(self, walk: Walk) -> None:
        """Nothing is learnt."""


class Experience:
    """What rounds have taught about one pair on one machine; outlives a generation.

    Args:
        profile: the costs as measured.
        num_depths: L of the drafter.
    """

    def __init__(self, profile: CostProfile, num_depths: int) -> None:
        self.profile = profile
        self.calibration = Calibration(num_depths)
        # Seconds of a round over those of the profile: lately, and per size relative to that, as
        # weight and weighted sum. The first entry is of rounds that do not draft.
        self._ratio, self._num_rounds = 1.0, 0
        self._sums = np.zeros((1 + len(profile.rows), 2))
        self._earned = np.zeros(2)  # tokens and seconds of drafted rounds, fading
        self.pause = _FIRST_PAUSE
        self.rounds_to_wait = 0
        self.drafted_in_a_row, self.plain_after = 0, _FIRST_PLAIN

    def plain_s(self, context_length: int) -> float:
        """Seconds of a round that drafts nothing, as the profile counts them."""
        return self.profile.verify_s(1, context_length) * float(self._corrections()[0])

    def drafted_s(self, context_length: int, max_nodes: int) -> np.ndarray:
        """[max_nodes + 1] seconds of a round that drafts, by the nodes it verifies."""
        measured = self.profile.draft + self.profile.verify_by_size(context_length)
        rising = np.maximum.accumulate(measured * self._corrections()[1:])
        return np.interp(np.arange(1, max_nodes + 2), self.profile.rows, rising)

    def earning_rate(self, plain_s: float) -> float:
        """lambda: tokens per second, as lately made, and never less than without drafting."""
        tokens, seconds = self._earned
        return max(1.0 / plain_s, tokens / seconds if seconds > 0 else 0.0)

    def learn_cost(self, num_rows: int, drafted: bool, context_length: int, seconds: float) -> None:
        """A round took so long."""
        predicted = self.profile.verify_s(num_rows, context_length)
        predicted += self.profile.draft if drafted else 0.0
        ratio = seconds / predicted
        self._num_rounds += 1
        if self._num_rounds > 1:
            # One slow round, of a busy machine, must not weigh like ten.
            ratio = float(np.clip(ratio, 0.5 * self._ratio, 2.0 * self._ratio))
        self._ratio += (ratio - self._ratio) / min(self._num_rounds, _MEMORY_ROUNDS)
        nearest = 1 + int(np.abs(np.array(self.profile.rows) - num_rows).argmin())
        size = nearest if drafted else 0
        self._sums[size] *= 1.0 - 1.0 / _MEMORY_ROUNDS
        self._sums[size] += (1.0, ratio / self._ratio)

    def learn_gain(self, tokens: float, seconds: float) -> None:
        """A drafted round earned so many tokens, by the mean of promise and outcome."""
        self._earned *= 1.0 - 1.0 / _MEMORY_ROUNDS
        self._earned += (tokens, seconds)

    def _corrections(self) -> np.ndarray:
        weights, totals = self._sums.T
        return (_PRIOR_ROUNDS + totals) / (_PRIOR_ROUNDS + weights)


@dataclass
class _Round:
    began: float
    context_length: int
    plain_s: float
    marginals: Marginals | None = None
    num_rows: int = 1
    promised: float = 1.0
    predicted_s: float = 0.0


class AutoBudget:
    """As many nodes as pay, none where speculation does not.

    Args:
        experience: of this pair; mutated. Its profile's most rows bound the tree.
        clock: seconds; for tests.
    """

    def __init__(
        self, experience: Experience, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.max_nodes = experience.profile.rows[-1] - 1
        self._experience = experience
        self._clock = clock
        self._round = _Round(clock(), 0, 1.0)

    def wants_draft(self, context_length: int) -> bool:
        """Whether the drafter is asked: not while it has not been worth its time."""
        experience = self._experience
        self._round = _Round(self._clock(), context_length, experience.plain_s(context_length))
        if experience.rounds_to_wait > 0:
            experience.rounds_to_wait -= 1
            return False
        if experience.drafted_in_a_row >= experience.plain_after:
            experience.drafted_in_a_row = 0
            experience.plain_after = min(2 * experience.plain_after, _LAST_PLAIN)
            return False
        experience.drafted_in_a_row += 1
        return True

    def build(self, marginals: Marginals, root_id: int, builder: Builder) -> DraftTree:
        """The tree of calibrated probabilities, cut where another node stops paying."""
        experience, now = self._experience, self._round
        tree = builder(experience.calibration.apply(marginals), root_id, self.max_nodes)
        earned = np.cumsum(np.exp(tree.log_probs.astype(np.float64)))
        costs = experience.drafted_s(now.context_length, self.max_nodes)[: earned.shape[0]]
        rate = experience.earning_rate(now.plain_s)
        num_nodes = int(np.argmax(earned - rate * costs))
        now.marginals, now.num_rows = marginals, num_nodes + 1
        now.promised, now.predicted_s = float(earned[num_nodes]), float(costs[num_nodes])
        return tree.first(num_nodes)

    def observe(self, walk: Walk) -> None:
        """Learn from the round's choices and time, and decide whether to go on drafting."""
        experience, now = self._experience, self._round
        seconds = self._clock() - now.began
        experience.learn_cost(now.num_rows, now.marginals is not None, now.context_length, seconds)
        if now.marginals is None:
            return
        experience.calibration.observe(now.marginals, walk)
        gain = (now.promised + len(walk.token_ids)) / 2
        experience.learn_gain(gain, now.predicted_s)
        pays = experience.earning_rate(now.plain_s) * now.plain_s > 1.0
        if pays or now.promised / now.predicted_s > 1.0 / now.plain_s:
            experience.pause = _FIRST_PAUSE
            return
        experience.rounds_to_wait = experience.pause
        experience.pause = min(2 * experience.pause, _LONGEST_PAUSE)
