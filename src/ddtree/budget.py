"""How many nodes a round gets: a fixed number, or as many as pay on this machine, now (DESIGN 7).

A round that drafts earns 1 + the sum of its nodes' probabilities, and costs a drafter pass and a
verify forward of its rows. With lambda, the tokens per second that we make anyway, the best size is
the one with the highest earnings - lambda x cost: that maximises tokens per second over many
rounds, where the best ratio of each single round would not.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

from ddtree.costs import CostProfile
from ddtree.sampling.calibration import Calibration
from ddtree.types import DraftTree, Marginals, Walk

Builder = Callable[[Marginals, int, int], DraftTree]

# Of the last rounds, so many weigh on what speculation is thought to earn.
_MEMORY_ROUNDS = 24
_KEPT = 1.0 - 1.0 / _MEMORY_ROUNDS  # of what was learnt, when another round is
# A measured cost counts as so many rounds at that size; rounds without a draft are few.
_PRIOR_ROUNDS, _PRIOR_PLAIN_ROUNDS = 3, 0.5
# Rounds without a draft after one that was not worth it, doubled each time.
_FIRST_PAUSE, _LONGEST_PAUSE = 4, 64
# After so many rounds with a draft one goes without though it would pay: else nobody knew what that
# costs by now. The first number, doubled each time, is for when it matters.
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
        self._sums = [(0.0, 0.0)] * (1 + len(profile.rows))
        self._corrections = [1.0] * (1 + len(profile.rows))
        self._midpoints = [(m + n) / 2 for m, n in pairwise(profile.rows)]
        self._tokens, self._seconds = 0.0, 0.0  # of drafted rounds, fading
        self.pause = _FIRST_PAUSE
        self.rounds_to_wait = 0
        self.drafted_in_a_row, self.patience = 0, _FIRST_PLAIN

    def plain_s(self, context_length: int) -> float:
        """Seconds of a round that drafts nothing, as the profile counts them."""
        return self.profile.verify_s(1, context_length) * self._corrections[0]

    def drafted_s(self, context_length: int) -> list[float]:
        """Seconds of a round that drafts, by its nodes: from 0 to as many as are measured."""
        verify = self.profile.verify_by_size(context_length)
        corrected = zip(verify, self._corrections[1:], strict=True)
        rising = list(accumulate(((self.profile.draft + s) * c for s, c in corrected), max))
        costs = [rising[0]] * self.profile.rows[0]
        for (x0, y0), (x1, y1) in pairwise(zip(self.profile.rows, rising, strict=True)):
            step = (y1 - y0) / (x1 - x0)
            costs += [y0 + step * i for i in range(1, x1 - x0 + 1)]
        return costs

    def earning_rate(self, plain_s: float) -> float:
        """lambda: tokens per second, as lately made, and never less than without drafting."""
        return max(1.0 / plain_s, self._tokens / self._seconds if self._seconds > 0 else 0.0)

    def plain_after(self, plain_s: float) -> int:
        """After how many rounds with a draft one without teaches something.

        Rounds that take longer than measured do so all alike, or only those that draft: nobody
        knows, as long as all draft. It matters where drafting would not pay if it were the latter.
        """
        doubtful = self.earning_rate(plain_s) * plain_s < self._ratio
        return self.patience if doubtful else _LAST_PLAIN

    def learn_cost(self, num_rows: int, drafted: bool, context_length: int, seconds: float) -> None:
        """A round took so long."""
        predicted = self.profile.verify_s(num_rows, context_length)
        predicted += self.profile.draft if drafted else 0.0
        ratio = seconds / predicted
        self._num_rounds += 1
        if self._num_rounds > 1:
            # One slow round, of a busy machine, must not weigh like ten.
            ratio = min(ratio, 2.0 * self._ratio)
        self._ratio += (ratio - self._ratio) / min(self._num_rounds, _MEMORY_ROUNDS)
        size = 1 + bisect_left(self._midpoints, num_rows) if drafted else 0
        weight, total = self._sums[size]
        weight, total = 1.0 + _KEPT * weight, ratio / self._ratio + _KEPT * total
        self._sums[size] = weight, total
        prior = _PRIOR_ROUNDS if drafted else _PRIOR_PLAIN_ROUNDS
        self._corrections[size] = (prior + total) / (prior + weight)

    def learn_gain(self, tokens: float, seconds: float) -> None:
        """A drafted round earned so many tokens, by the mean of promise and outcome."""
        self._tokens = tokens + _KEPT * self._tokens
        self._seconds = seconds + _KEPT * self._seconds


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
        if experience.drafted_in_a_row >= experience.plain_after(self._round.plain_s):
            experience.drafted_in_a_row = 0
            experience.patience = min(2 * experience.patience, _LAST_PLAIN)
            return False
        experience.drafted_in_a_row += 1
        return True

    def build(self, marginals: Marginals, root_id: int, builder: Builder) -> DraftTree:
        """The tree of calibrated probabilities, cut where another node stops paying."""
        experience, now = self._experience, self._round
        said = marginals.cpu()
        tree = builder(experience.calibration.apply(said), root_id, self.max_nodes)
        earned = list(accumulate(map(math.exp, tree.log_probs.tolist())))
        costs = experience.drafted_s(now.context_length)
        rate = experience.earning_rate(now.plain_s)
        surplus = [e - rate * c for e, c in zip(earned, costs, strict=False)]
        num_nodes = surplus.index(max(surplus))
        now.marginals, now.num_rows = said, num_nodes + 1
        now.promised, now.predicted_s = earned[num_nodes], costs[num_nodes]
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
