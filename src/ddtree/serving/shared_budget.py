"""How many nodes each request's tree gets in a step: one budget for the whole batch.

All requests of a step share one forward, so a node costs what the forward's last row costs, whoever
gets it. With lambda, the tokens per second that the batch makes anyway, the best step has the
highest tokens - lambda x seconds: all requests' nodes in one row from the most probable to the
least, and of these the first n (`ddtree.budget` for one request). Knows no engine and no clock.

Tensor-parallel ranks must choose alike, or their forwards differ in shape. What is decided here
depends on the arguments of the calls and on nothing else, and times are in two of these alone. So
the owner measures `StepCosts` on rank 0 and sends it to all ranks, and gives `observe_seconds` rank
0's number on every rank; to save messages, of every eighth step, say, and on no rank of the others.
Marginals and walks must be equal too: from logits that all ranks have, with the same seeds.

Letters in shapes: R requests of a step, M nodes of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, Int64
from numpy import ndarray

from ddtree.errors import OptionError
from ddtree.sampling.calibration import Calibration
from ddtree.serving.step_costs import StepCosts
from ddtree.types import Marginals, Walk

# Of the last drafted steps, so many weigh on what speculation is thought to earn.
_MEMORY_STEPS = 24
_KEPT = 1.0 - 1.0 / _MEMORY_STEPS  # of what was learnt, when another step is
# Steps without a draft after one that was not worth it, doubled each time.
_FIRST_PAUSE, _LONGEST_PAUSE = 4, 64
# After so many steps with a draft one goes without though it would pay: else nobody knew what that
# costs by now. The first number, doubled each time, is for when it matters.
_FIRST_PLAIN, _LAST_PLAIN = 8, 128


@runtime_checkable
class SharedBudget(Protocol):
    """Decides the trees' sizes in each step.

    In turn: `wants_drafts`; if so a drafter pass, and `share`; the forward; `observe_walks`. And
    `observe_seconds`, whenever a step's time is known.

    Attributes:
        max_nodes: B, the most nodes that a request can get besides its root.
    """

    @property
    def max_nodes(self) -> int:
        """See above."""
        ...

    def wants_drafts(self, num_requests: int, other_rows: int) -> bool:
        """Whether to run the drafter for the next step; called once for each step.

        Args:
            num_requests: R, decoding requests, those included that get no draft.
            other_rows: rows of prompt chunks that the step is thought to have besides.
        """
        ...

    def calibrate(self, marginals: Marginals) -> Marginals:
        """What a request's tree is built from; on the host."""
        ...

    def share(self, gains: Sequence[Float32[ndarray, " _"]], num_other_rows: int) -> list[int]:
        """How many nodes each request gets: the first ones of its tree.

        Args:
            gains: for each decoding request the probabilities of its tree's nodes in score order,
                root left out, from calibrated marginals; empty where nothing was drafted.
            num_other_rows: rows of prompt chunks in the same step.
        """
        ...

    def observe_walks(
        self, walks: Sequence[tuple[Marginals, Walk]], *, num_requests: int, num_tokens: int
    ) -> None:
        """The forward is over and its trees are walked; called before the next `wants_drafts`.

        Args:
            walks: of every request that was drafted for, also where its tree got no node: the
                marginals as the drafter gave them, before `calibrate`, and where the target went.
            num_requests: R, decoding requests: those that had a root row.
            num_tokens: what these delivered, bonus tokens included. The first token behind a
                prompt is none of them.
        """
        ...

    def observe_seconds(self, seconds: float, *, num_rows: int, num_drafted: int) -> None:
        """A stretch of time with one forward took so long; for steps without drafts too.

        Args:
            seconds: above 0, the same number on every rank. Left out where they say nothing: the
                engine was idle in between, or compiled a model.
            num_rows: of the forward: roots, nodes and prompt chunks.
            num_drafted: requests of the drafter pass in the same stretch, whichever step's trees it
                made; 0 without a pass.
        """
        ...


@dataclass(frozen=True)
class FixedShare:
    """The same number of nodes for every request, as far as the step has room.

    Args:
        nodes: of each request; fewer where its tree is smaller, as a chain is.
        max_batch_rows: of a step, prompt chunks included. Where all nodes together have no room,
            the most probable ones get it. None: no limit.

    Raises:
        OptionError: `nodes` below 0, `max_batch_rows` below 1.

    >>> gains = [np.array([0.9, 0.8], np.float32), np.array([0.3], np.float32)]
    >>> FixedShare(2).share(gains, 0), FixedShare(2, max_batch_rows=4).share(gains, 0)
    ([2, 1], [2, 0])
    """

    nodes: int
    max_batch_rows: int | None = None

    def __post_init__(self) -> None:
        _check("nodes", self.nodes, self.max_batch_rows)

    @property
    def max_nodes(self) -> int:
        """B, as given."""
        return self.nodes

    def wants_drafts(self, num_requests: int, other_rows: int) -> bool:
        """Always, where there is a request and room for a node."""
        room = _room(self.max_batch_rows, num_requests, other_rows)
        return num_requests > 0 and self.nodes > 0 and room != 0

    def calibrate(self, marginals: Marginals) -> Marginals:
        """The drafter's own probabilities."""
        return marginals

    def share(self, gains: Sequence[Float32[ndarray, " _"]], num_other_rows: int) -> list[int]:
        """See `SharedBudget`."""
        sizes = [min(len(of_one), self.nodes) for of_one in gains]
        room = _room(self.max_batch_rows, len(gains), num_other_rows)
        if room is None or sum(sizes) <= room:
            return sizes
        return _Pool.of(gains, self.nodes).first(room)

    def observe_walks(
        self, walks: Sequence[tuple[Marginals, Walk]], *, num_requests: int, num_tokens: int
    ) -> None:
        """Nothing is learnt."""

    def observe_seconds(self, seconds: float, *, num_rows: int, num_drafted: int) -> None:
        """Nothing is learnt."""


@dataclass
class _Earned:
    """What drafts lately earned and cost beyond plain decoding, in tokens; fading.

    Args:
        plain: tokens that plain decoding would have made.
        extra: tokens made beyond that.
        price: tokens that plain decoding would have made in the seconds that it took longer.
    """

    plain: float = 0.0
    extra: float = 0.0
    price: float = 0.0

    def learn(self, plain: float, extra: float, price: float) -> None:
        self.plain = plain + _KEPT * self.plain
        self.extra = extra + _KEPT * self.extra
        self.price = price + _KEPT * self.price

    @property
    def speedup(self) -> float:
        """Over plain decoding; never less, since plain decoding is always to be had."""
        if self.plain == 0.0:
            return 1.0
        return max(1.0, (self.plain + self.extra) / (self.plain + self.price))


@dataclass
class _Situation:
    """Steps of about as many requests and prompt rows: whether drafts pay there."""

    earned: _Earned = field(default_factory=_Earned)
    pause: int = _FIRST_PAUSE
    steps_to_wait: int = 0
    drafted_in_a_row: int = 0
    patience: int = _FIRST_PLAIN

    def wants_drafts(self, doubtful: bool) -> bool:
        if self.steps_to_wait > 0:
            self.steps_to_wait -= 1
            return False
        if self.drafted_in_a_row >= (self.patience if doubtful else _LAST_PLAIN):
            self.drafted_in_a_row = 0
            self.patience = min(2 * self.patience, _LAST_PLAIN)
            return False
        self.drafted_in_a_row += 1
        return True

    def judge(self, pays: bool) -> None:
        if pays:
            self.pause = _FIRST_PAUSE
            return
        self.steps_to_wait = self.pause
        self.pause = min(2 * self.pause, _LONGEST_PAUSE)


@dataclass(frozen=True)
class _Promise:
    """What a shared step is expected to make.

    Args:
        situation: where it was made.
        num_requests: R.
        tokens: expected.
        price: see `_Earned`.
    """

    situation: _Situation
    num_requests: int
    tokens: float
    price: float


class AutoShare:
    """As many nodes as pay in this batch, for the requests where they are likeliest; or none.

    With one request it decides as `AutoBudget` does. As the batch grows its plain decoding fills
    the machine, further rows get dearer in tokens, and trees shrink to short chains and to nothing;
    then drafts pause, and are tried again after 4, 8, ... 64 steps of that kind.

    Args:
        costs: of a step; corrected by what is observed.
        num_depths: L of the drafter.
        max_nodes: B, the most nodes of one request.
        max_batch_rows: of a step, prompt chunks included; None: no limit.

    Raises:
        OptionError: `max_nodes` below 0, `max_batch_rows` below 1.
    """

    def __init__(
        self,
        costs: StepCosts,
        *,
        num_depths: int,
        max_nodes: int,
        max_batch_rows: int | None = None,
    ) -> None:
        _check("max_nodes", max_nodes, max_batch_rows)
        self.max_nodes = max_nodes
        self._max_batch_rows = max_batch_rows
        self._costs = costs
        self._calibration = Calibration(num_depths)
        # By about how many requests; and by that and about how many rows of prompts.
        self._earned: dict[int, _Earned] = {}
        self._situations: dict[tuple[int, int], _Situation] = {}
        self._situation: _Situation | None = None
        self._promise: _Promise | None = None

    def wants_drafts(self, num_requests: int, other_rows: int) -> bool:
        """Not while drafts have not been worth their time in steps like this one."""
        self._situation = self._promise = None
        room = _room(self._max_batch_rows, num_requests, other_rows)
        if num_requests == 0 or self.max_nodes == 0 or room == 0:
            return False
        key = _about(num_requests), (other_rows.bit_length() + 1) // 2
        situation = self._situations.setdefault(key, _Situation())
        # Steps that take longer than measured do so all alike, or only those that draft: nobody
        # knows, as long as all draft. It matters where drafts would not pay if it were the latter.
        doubtful = self._earned_with(num_requests).speedup < self._costs.slowness
        if not situation.wants_drafts(doubtful):
            return False
        self._situation = situation
        return True

    def calibrate(self, marginals: Marginals) -> Marginals:
        """What the drafter's probabilities have been worth so far."""
        return self._calibration.apply(marginals.cpu())

    def share(self, gains: Sequence[Float32[ndarray, " _"]], num_other_rows: int) -> list[int]:
        """See `SharedBudget`; after a `wants_drafts` that was answered with True."""
        situation, self._situation = self._situation, None
        assert situation is not None, "drafts that were not wanted"
        num_requests = len(gains)
        if num_requests == 0:
            return []
        pool = _Pool.of(gains, self.max_nodes)
        room = _room(self._max_batch_rows, num_requests, num_other_rows)
        likeliest = pool.ranked[:room].astype(np.float64)
        tokens = num_requests + np.concatenate(([0.0], likeliest.cumsum()))
        assert not np.isnan(tokens[-1]), "a probability that is no number"

        costs, plain_rows = self._costs, num_requests + num_other_rows
        drafting_s = costs.draft_s(sum(len(of_one) > 0 for of_one in gains))
        seconds = drafting_s + costs.verify_by_rows(plain_rows, len(tokens))
        # Prompts must be worked on anyway: what a second is worth, decoding alone says.
        plain_rate = num_requests / costs.verify_s(num_requests)
        rate = plain_rate * self._earned_with(num_requests).speedup
        num_nodes = int(np.argmax(tokens - rate * seconds))
        longer_s = float(seconds[num_nodes]) - costs.verify_s(plain_rows)
        price = plain_rate * max(longer_s, 0.0)
        self._promise = _Promise(situation, num_requests, float(tokens[num_nodes]), price)
        return pool.first(num_nodes)

    def observe_walks(
        self, walks: Sequence[tuple[Marginals, Walk]], *, num_requests: int, num_tokens: int
    ) -> None:
        """Learn from the target's choices, and decide whether to go on drafting.

        Some requests that nodes were shared among may have ended before the step: the others are
        held to their part of what was promised.
        """
        for marginals, walk in walks:
            self._calibration.observe(marginals, walk)
        promise, self._promise = self._promise, None
        if promise is None or num_requests == 0:
            return
        plain, part = float(num_requests), num_requests / promise.num_requests
        promised, price = part * promise.tokens - plain, part * promise.price
        extra = (promised + num_tokens - plain) / 2
        everywhere, here = self._earned_with(promise.num_requests), promise.situation.earned
        everywhere.learn(plain, extra, price)
        here.learn(plain, extra, price)
        pays = here.extra > here.price * everywhere.speedup
        promise.situation.judge(pays or promised > price)

    def observe_seconds(self, seconds: float, *, num_rows: int, num_drafted: int) -> None:
        """Correct the costs."""
        self._costs.observe(num_rows=num_rows, num_drafted=num_drafted, seconds=seconds)

    def _earned_with(self, num_requests: int) -> _Earned:
        return self._earned.setdefault(_about(num_requests), _Earned())


@dataclass(frozen=True)
class _Pool:
    """The nodes of all requests in one row.

    Args:
        gains: [M], request after request, each in score order.
        owners: whose each is.
        starts: where each request's begin.
        ranked: the gains from high to low.
    """

    gains: Float32[ndarray, " M"]
    owners: Int64[ndarray, " M"]
    starts: Int64[ndarray, " R"]
    ranked: Float32[ndarray, " M"]

    @classmethod
    def of(cls, gains: Sequence[Float32[ndarray, " _"]], max_nodes: int) -> _Pool:
        """At most `max_nodes` of each request; R > 0."""
        kept = [of_one[:max_nodes] for of_one in gains]
        sizes = np.array([len(of_one) for of_one in kept], np.int64)
        pooled = np.concatenate(kept, dtype=np.float32)
        owners = np.repeat(np.arange(len(kept)), sizes)
        return cls(pooled, owners, sizes.cumsum() - sizes, np.sort(pooled)[::-1])

    def first(self, num_nodes: int) -> list[int]:
        """How many of the `num_nodes` likeliest are each request's; at a tie those higher up."""
        num_requests = len(self.starts)
        num_nodes = min(num_nodes, len(self.ranked))
        if num_nodes == 0:
            return [0] * num_requests
        last = self.ranked[num_nodes - 1]
        taken = np.bincount(self.owners[self.gains > last], minlength=num_requests)
        tied = np.flatnonzero(self.gains == last)
        places = tied - self.starts[self.owners[tied]]
        tied = tied[np.argsort(places, kind="stable")[: num_nodes - int(taken.sum())]]
        taken += np.bincount(self.owners[tied], minlength=num_requests)
        counts: list[int] = taken.tolist()
        return counts


def _about(num_requests: int) -> int:
    """1, 2, up to 4, up to 8, ... requests: what drafts earn is much alike within each of these."""
    return (num_requests - 1).bit_length()


def _room(max_batch_rows: int | None, num_requests: int, other_rows: int) -> int | None:
    """How many nodes a step has room for."""
    if max_batch_rows is None:
        return None
    return max(0, max_batch_rows - num_requests - other_rows)


def _check(name: str, nodes: int, max_batch_rows: int | None) -> None:
    if nodes < 0:
        raise OptionError(
            name,
            expected="a whole number >= 0",
            got=nodes,
            remedy="Say how many nodes a request may get; 0 means no speculation.",
        )
    if max_batch_rows is not None and max_batch_rows < 1:
        raise OptionError(
            "max_batch_rows",
            expected="a whole number >= 1",
            got=max_batch_rows,
            remedy="Say how many rows a step may have, or leave it out.",
        )
