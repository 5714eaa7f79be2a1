"""Workers for tests: scripted drafts, a record of what the trees did, and one fault each.

    --worker-cls tests.serving.oracle.OracleWorker

The oracle reads true continuations and scripts from the JSON file that `DDTREE_TEST_ORACLE` names
(`tiny.write_oracle`) and answers in the drafter's place. A request it has no script for gets the
drafter's own answer.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ddtree.serving.cpu import TreeCPUWorker
from ddtree.serving.requests import RequestState
from ddtree.serving.step import Step
from ddtree.types import Marginals

NUM_RANKS = 16

# Given a random source for this place in the text and one for this depth behind it, and the depth
# (from 1): the rank of the truth (None for nowhere) and each rank's weight, falling.
Said = tuple[int | None, list[float]]
Script = Callable[[random.Random, random.Random, int], Said]


def _falling(factor: float) -> list[float]:
    return [factor**rank for rank in range(NUM_RANKS)]


def _perfect(text: random.Random, chooser: random.Random, depth: int) -> Said:
    return 0, _falling(0.1)


def _hostile(text: random.Random, chooser: random.Random, depth: int) -> Said:
    return None, _falling(0.3)


def _interleaved(text: random.Random, chooser: random.Random, depth: int) -> Said:
    """Two branches of one weight at every depth; the truth is in either."""
    return chooser.randrange(2), [1.0, 0.99, *[1e-4] * (NUM_RANKS - 2)]


def _high_rank(text: random.Random, chooser: random.Random, depth: int) -> Said:
    """The truth is among the last of many children, then first."""
    return (chooser.randint(2, 5), [1.0] * 6 + [1e-5] * 10) if depth == 1 else (0, _falling(0.05))


def _mixed(text: random.Random, chooser: random.Random, depth: int) -> Said:
    """Anything: sharp and flat, right, late and wrong; in some places nearly all is banned."""
    kept, last = text.choice([1, 2, NUM_RANKS]), text.choice([0, 1, 2, 3, 7, 7, 7])
    kept = 0 if depth > last else kept
    rank = min(int(chooser.expovariate(1.2)), NUM_RANKS - 1)
    factor = chooser.uniform(0.2, 0.95)
    weights = [factor**r if r < kept else 0.0 for r in range(NUM_RANKS)]
    return (None if chooser.random() < 0.1 else rank), weights


SCRIPTS: dict[str, Script] = {
    "perfect": _perfect,
    "hostile": _hostile,
    "interleaved": _interleaved,
    "high_rank": _high_rank,
    "mixed": _mixed,
}


class Oracle:
    """Answers for requests whose text begins one of the sequences of the file."""

    def __init__(self, path: Path) -> None:
        known = json.loads(path.read_text())
        self._vocab_size = int(known["vocab_size"])
        self._sequences = [(entry["script"], entry["token_ids"]) for entry in known["sequences"]]

    def marginals(self, token_ids: Sequence[int], num_depths: int) -> Marginals | None:
        """What may follow the tokens, by the script of the sequence that they begin."""
        size = len(token_ids)
        for script, sequence in self._sequences:
            if sequence[:size] == list(token_ids):
                return self._said(
                    SCRIPTS[script], sequence[size : size + num_depths], size, num_depths
                )
        return None

    def _said(self, script: Script, truth: list[int], place: int, num_depths: int) -> Marginals:
        log_probs, token_ids = [], []
        for depth in range(1, num_depths + 1):
            chooser = random.Random(place * 100 + depth)
            rank, weights = script(random.Random(place), chooser, depth)
            wrong = chooser.sample(range(self._vocab_size), NUM_RANKS + 1)
            row = wrong[:NUM_RANKS]
            if depth <= len(truth):
                token = truth[depth - 1]
                row = [w for w in wrong if w != token][:NUM_RANKS]
                if rank is not None:
                    row[rank] = token
            total = sum(weights) or 1.0
            log_probs.append([math.log(w / total) if w else -math.inf for w in weights])
            token_ids.append(row)
        return Marginals(torch.tensor(log_probs), torch.tensor(token_ids))


@dataclass
class Record:
    """What the steps did; counts over all requests."""

    steps: int = 0
    trees: int = 0
    branching: int = 0
    accepted: int = 0
    accepted_off_place: int = 0
    most_rows: int = 0
    sizes: tuple[int, ...] = ()

    def add(self, step: Step, walks: Sequence[Any]) -> None:
        self.steps += 1
        drafted = [tree for tree in step.trees if tree.num_nodes > 0]
        self.trees += len(drafted)
        self.branching += len(step.branching)
        self.sizes = tuple(sorted({*self.sizes, *(tree.num_nodes for tree in drafted)}))
        self.most_rows = max([self.most_rows, *(tree.num_rows for tree in drafted)])
        for i, walk in enumerate(walks):
            self.accepted += len(walk.path)
            if i in step.branching:
                off = [node for place, node in enumerate(walk.path, 1) if node != place]
                self.accepted_off_place += len(off)


class OracleWorker(TreeCPUWorker):
    """Scripted drafts, and a record."""

    def init_device(self) -> None:
        super().init_device()
        self._record = Record()
        self._drafted: list[dict[str, Any]] = []
        self._watch_walks()
        self._script_drafts()

    def tree_record(self) -> dict[str, Any]:
        """What happened since the last call."""
        said, self._record = dict(vars(self._record)), Record()
        return said

    def drafts_seen(self) -> list[dict[str, Any]]:
        """What the drafter itself said, where `DDTREE_TEST_LISTEN` is set; since the last call."""
        said, self._drafted = self._drafted, []
        return said

    def _watch_walks(self) -> None:
        walk, worker = Step.walk, self

        def watched(step: Step, chosen: Sequence[int]) -> Any:
            walks = walk(step, chosen)
            worker._record.add(step, walks)
            return walks

        Step.walk = watched  # type: ignore[method-assign]

    def _script_drafts(self) -> None:
        drafter = self.model_runner.drafter
        path, listens = os.environ.get("DDTREE_TEST_ORACLE"), "DDTREE_TEST_LISTEN" in os.environ
        oracle = None if path is None else Oracle(Path(path))
        ask = drafter.marginals

        def marginals(hidden: Any, requests: Sequence[RequestState]) -> list[Marginals]:
            said = ask(hidden, requests)
            if listens:
                self._listen(said, requests)
            if oracle is None:
                return said
            scripted = [oracle.marginals(r.token_ids, drafter.num_depths) for r in requests]
            return [own if s is None else s for own, s in zip(said, scripted, strict=True)]

        drafter.marginals = marginals

    def _listen(self, said: Sequence[Marginals], requests: Sequence[RequestState]) -> None:
        for marginals, request in zip(said, requests, strict=True):
            self._drafted.append(
                {
                    "token_ids": list(request.token_ids),
                    "log_probs": marginals.log_probs[:, :4].tolist(),
                    "ranked_ids": marginals.token_ids[:, :4].tolist(),
                }
            )


class MasklessWorker(OracleWorker):
    """A fault: each row of a tree sees all rows before it."""

    def init_device(self) -> None:
        super().init_device()
        tree_rows = Step.tree_rows

        def maskless(step: Step, *args: Any) -> Any:
            rows = tree_rows(step, *args)
            if rows is None:
                return None
            seen = [(1 << (row + 1)) - 1 for n in rows.num_rows.tolist() for row in range(n)]
            words = torch.tensor(seen, dtype=torch.int64)[:, None]
            return replace(rows, ancestor_words=words.to(rows.ancestor_words.device))

        Step.tree_rows = maskless  # type: ignore[method-assign]


class UnmovedWorker(OracleWorker):
    """A fault: accepted keys and values stay where the tree's rows wrote them."""

    def init_device(self) -> None:
        super().init_device()
        Step.moves = lambda step, walks: None  # type: ignore[method-assign]


class UnorderedWorker(OracleWorker):
    """A fault: the drafter reads the step's rows as if the tree had been a chain."""

    def init_device(self) -> None:
        super().init_device()
        self.model_runner._permutes_context = lambda step: False
