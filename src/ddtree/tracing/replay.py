"""Other builders and budgets on recorded generations, without a model.

The text is the target's own choice at every position, so a round can begin anywhere in it: a
replay asks the trace what the drafter proposes there, builds a tree, and walks it along the text as
decoding would. Knows nothing of time: how long the rounds would take is not replayed.

from ddtree.tracing.replay import replay
from ddtree.tracing.trace_file import read_trace
generation = read_trace(Path("t.jsonl")).generations[0]
print(replay(generation, ddtree.build_tree, 32).acceptance_length)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ddtree.budget import Builder
from ddtree.errors import BuilderError, TraceError
from ddtree.host_marginals import HostMarginals
from ddtree.sampling.lookup import Guessing
from ddtree.sampling.mixture import MixtureWeights
from ddtree.tracing.trace import TracedGeneration
from ddtree.types import DraftTree, FinishReason, Marginals, Round, Transitions
from ddtree.walk import walk


@dataclass(frozen=True, kw_only=True)
class Replay:
    """One generation as another builder or budget would have drafted it.

    Args:
        rounds: without the prefill.
    """

    rounds: tuple[Round, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that the rounds delivered; the prefill's is not among them."""
        return sum(r.num_tokens for r in self.rounds)

    @property
    def num_nodes(self) -> int:
        """Nodes of all trees, their roots not counted."""
        return sum(r.tree.num_nodes for r in self.rounds if r.tree is not None)

    @property
    def acceptance_length(self) -> float:
        """tau: tokens per round, bonus token included; NaN without rounds."""
        return self.num_tokens / len(self.rounds) if self.rounds else float("nan")


def replay(
    traced: TracedGeneration, builder: Builder, budget: int, *, lookup: bool = True
) -> Replay:
    """Go through a recorded text again with another builder or budget.

    Args:
        traced: see `trace_file.read_trace`.
        builder: takes marginals [L, K], the root's token and the budget, gives a tree. As in
            decoding, L ends where the length limit does, and K is at most the budget, unless there
            are transitions.
        budget: B >= 0, the most nodes of a round besides the root; 0 drafts nothing.
        lookup: draft what the text repeats too, if the recorded run did.

    Raises:
        TraceError: a round begins where the trace has no marginals.
        BuilderError: a tree that could not be verified.
    """
    text = [*traced.prompt_ids, *traced.token_ids]
    token_ids = text[: len(traced.prompt_ids) + 1]  # the prefill delivers the first new one
    script = _Script(text, len(token_ids), traced.max_new_tokens - 1, traced.finish_reason)
    recorded = {r.start: r.marginals for r in traced.rounds if r.marginals is not None}
    guessing = None
    if lookup and traced.lookup is not None:
        guessing = Guessing(MixtureWeights.of_counts(*traced.lookup))
    rounds: list[Round] = []
    while len(token_ids) < len(text):
        start, root_id = len(token_ids) - 1, token_ids[-1]
        tree = DraftTree.root_only(root_id)
        if budget > 0 and script.room > 1:
            marginals = _marginals_at(traced, recorded, start, budget)
            if guessing is not None:
                marginals = guessing.into(marginals, token_ids)
            tree = builder(marginals, root_id, budget)
            check_tree(tree, marginals, root_id, budget)
        walked = walk(tree, torch.empty((tree.num_rows, 0)), script, script, token_ids)
        if guessing is not None:
            guessing.learn(walked.token_ids)
        rounds.append(
            Round(
                tree=tree,
                path=walked.path,
                token_ids=walked.token_ids,
                finish_reason=walked.finish_reason,
            )
        )
    return Replay(rounds=tuple(rounds))


def first_difference(ours: Sequence[Round], theirs: Sequence[Round]) -> int | None:
    """Index of the first round that differs in its tree, path or tokens; None where all agree."""
    for index, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        same = (a.path, a.token_ids, a.finish_reason) == (b.path, b.token_ids, b.finish_reason)
        if not same or not _same_tree(a.tree, b.tree):
            return index
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def check_tree(tree: object, marginals: Marginals, root_id: int, budget: int) -> None:
    """A builder's result must be a tree that can be verified: for builders of others.

    Raises:
        BuilderError: says what is wrong with it.
    """
    wrong = _fault(tree, marginals.num_depths, root_id, budget)
    if wrong is not None:
        raise BuilderError(
            "builder",
            expected=f"a ddtree.DraftTree of at most {budget} nodes behind the root",
            got=wrong,
            remedy="See ddtree.build_chain for a short builder, and DraftTree for the fields.",
        )


def _fault(tree: object, num_depths: int, root_id: int, budget: int) -> str | None:
    if not isinstance(tree, DraftTree):
        return type(tree).__name__
    columns = {
        "token_ids": np.int64,
        "parents": np.int32,
        "depths": np.int32,
        "ranks": np.int32,
        "log_probs": np.float32,
    }
    for name, dtype in columns.items():
        column = getattr(tree, name)
        if not isinstance(column, np.ndarray) or column.dtype != dtype or column.ndim != 1:
            return f"{name} that are no {np.dtype(dtype)} array [N]"
        if len(column) != len(tree.token_ids) or len(column) == 0:
            return f"{len(column)} {name} for {len(tree.token_ids)} rows"
    if tree.num_nodes > budget:
        return f"one of {tree.num_nodes} nodes"
    parents, depths = tree.parents[1:], tree.depths[1:]
    if tree.token_ids[0] != root_id or tree.parents[0] != -1 or tree.depths[0] != 0:
        return f"one whose row 0 is not the root: token {root_id}, parent -1, depth 0"
    early = np.flatnonzero((parents < 0) | (parents > np.arange(len(parents))))
    if early.size:
        return f"one whose node {early[0] + 1} does not come after its parent"
    if (depths != tree.depths[parents] + 1).any() or (depths > num_depths).any():
        return f"one whose depths are not its parents' plus 1, up to {num_depths}"
    if len(set(zip(parents.tolist(), tree.token_ids[1:].tolist(), strict=True))) < len(parents):
        return "one with the same token twice behind one node"
    return None


class _Script:
    """Decides tokens as a text has them and ends where it ends: rule and stopping of a replay.

    Args:
        text: prompt and response.
        num_known: tokens of it that have been delivered.
        room: tokens that the length limit still allows.
        finish_reason: why the text ended.
    """

    def __init__(
        self, text: Sequence[int], num_known: int, room: int, finish_reason: FinishReason
    ) -> None:
        self.room = room
        self._text = text
        self._num_known = num_known
        self._finish_reason = finish_reason

    def chooser(self, logits_NV: Tensor) -> Callable[[int, Sequence[int]], int]:
        """See `sampling.rule.DecodingRule`; there are no logits to look at."""
        return lambda row, token_ids: self._text[len(token_ids)]

    def push(self, token: int) -> FinishReason | None:
        """See `stopping.Stopping`."""
        self.room -= 1
        self._num_known += 1
        return self._finish_reason if self._num_known == len(self._text) else None


def _marginals_at(
    traced: TracedGeneration, recorded: dict[int, HostMarginals], start: int, budget: int
) -> Marginals:
    """What the drafter proposes at a root, as many ranks as a round of this budget asks for.

    A first-order draft is not cut: its candidates share out one probability between them, and fewer
    would have got other shares.
    """
    along, own = traced.along.get(start), recorded.get(start)
    # The round's own come first: those along the text may differ from them in the last bits.
    chosen = own if along is None else along
    if along is not None and own is not None:
        chosen = own if _num_ranks(own) >= min(budget, _num_ranks(along)) else along
    if chosen is None:
        raise TraceError(
            f"generation {traced.id}",
            expected="the drafter's marginals at every position of the text",
            got=f"none at position {start}",
            remedy="Record it with a drafter and a budget > 0: `ddtree generate --trace FILE`.",
        )
    log_probs, token_ids = map(torch.from_numpy, (chosen.log_probs, chosen.token_ids))
    behind = chosen.transitions
    if behind is None:
        return Marginals(log_probs[:, :budget], token_ids[:, :budget])
    transitions = Transitions(torch.from_numpy(behind.log_probs), torch.from_numpy(behind.ranks))
    return Marginals(log_probs, token_ids, transitions)


def _num_ranks(marginals: HostMarginals) -> int:
    return int(marginals.log_probs.shape[1])


def _same_tree(a: DraftTree | None, b: DraftTree | None) -> bool:
    if a is None or b is None:
        return a is b
    return all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for name in ("token_ids", "parents", "depths", "ranks", "log_probs")
    )
