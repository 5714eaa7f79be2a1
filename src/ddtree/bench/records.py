"""What a benchmark run writes down: every prompt, every arm, every round.

A run is a card (where it comes from), its arms and a record per prompt; as JSON it is results.json.
Knows no model and no clock.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from ddtree.errors import CheckpointError, first_line
from ddtree.journal import tuples_of
from ddtree.types import DraftTree, Generation, StageSeconds

FORMAT = "ddtree-bench"
VERSION = 1
RESULTS_FILE = "results.json"

# Equal steps in log-odds, 20 bins: fine near 0, where most nodes are, and near 1 alike.
BIN_EDGES: Float[ndarray, " 19"] = 1 / (1 + np.exp(-np.arange(-9.0, 10.0)))
NUM_BINS = len(BIN_EDGES) + 1


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way of generating.

    Args:
        name: unique in a run: "ar", "dflash", "ddtree-16", "ddtree-auto", "prompt-lookup", ...
        method: "ar", "dflash", "ddtree", "ddtree-no-lookup", or an outside one: "hf-generate",
            "prompt-lookup", "assistant".
        budget: nodes of a tree; "auto"; None where the method has none.
    """

    name: str
    method: str
    budget: int | Literal["auto"] | None = None


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """One verify forward.

    Args:
        context: T, tokens in the target's cache when it began.
        nodes: of the tree, the root not counted; 0 where nothing was drafted.
        promised: tokens that the tree's own probabilities let expect, bonus token included.
        tokens: delivered, bonus token included.
        ranks: of the accepted nodes, depth by depth; 0 is the drafter's most probable token.
        seconds: per stage.
    """

    context: int
    nodes: int
    promised: float
    tokens: int
    ranks: tuple[int, ...]
    seconds: StageSeconds


@dataclass(frozen=True, kw_only=True)
class ArmRecord:
    """What one arm did with one prompt.

    Args:
        arm: name of the arm.
        token_ids: what it said.
        elapsed_s: from the prompt's token ids to the last token, prefill included.
        prefill_s: of which the prefill and the choice of the first token; None for outside arms.
        rounds: every verify forward; empty for outside arms, whose rounds nobody sees.
        node_bins: [NUM_BINS] of [nodes, sum of their probabilities, nodes accepted]: every node of
            every tree by the probability that the drafter gave its path (`BIN_EDGES`).
    """

    arm: str
    token_ids: tuple[int, ...]
    elapsed_s: float
    prefill_s: float | None
    rounds: tuple[RoundRecord, ...]
    node_bins: tuple[tuple[int, float, int], ...]

    @property
    def tokens_per_s(self) -> float:
        """New tokens by wall time, prefill included."""
        return len(self.token_ids) / self.elapsed_s

    @property
    def round_tokens(self) -> int:
        """Tokens that rounds delivered; the prefill's is not among them."""
        return sum(r.tokens for r in self.rounds)

    @property
    def tau(self) -> float | None:
        """Tokens per round, bonus token included; None where there is no round."""
        return self.round_tokens / len(self.rounds) if self.rounds else None


@dataclass(frozen=True, kw_only=True)
class PromptRecord:
    """One prompt, or one turn of a conversation, at one temperature, by every arm.

    Args:
        suite: name of the suite.
        id: of the prompt, in its suite.
        index: its place among the run's prompts of that suite, from 0.
        turn: from 0; the turns before it were answered by plain decoding.
        temperature: 0 is greedy.
        num_prompt_tokens: chat template included.
        order: names of the arms as they ran.
        arms: in the order of the run's arms.
    """

    suite: str
    id: str
    index: int
    turn: int
    temperature: float
    num_prompt_tokens: int
    order: tuple[str, ...]
    arms: tuple[ArmRecord, ...]

    def arm(self, name: str) -> ArmRecord:
        """The record of an arm, by name."""
        return next(record for record in self.arms if record.arm == name)

    @property
    def disagreeing(self) -> tuple[str, ...]:
        """Arms that did not say what the first arm said."""
        said = self.arms[0].token_ids
        return tuple(record.arm for record in self.arms if record.token_ids != said)

    @classmethod
    def parse(cls, value: str | Mapping[str, Any]) -> PromptRecord:
        """From JSON, or from what `dataclasses.asdict` gives."""
        raw = tuples_of(json.loads(value) if isinstance(value, str) else value)
        arms = tuple(_arm_record(arm) for arm in raw["arms"])
        return cls(**{**raw, "arms": arms})


@dataclass(frozen=True, kw_only=True)
class Run:
    """A whole run.

    Args:
        card: command, commit, versions, machine, date, target, drafter, dtype, options, suites, and
            "cost_profile": `asdict(CostProfile)`, or None where no arm drafts.
        arms: in order; "ar" is first.
        prompts: in the order in which they were measured.
    """

    card: Mapping[str, Any]
    arms: tuple[Arm, ...]
    prompts: tuple[PromptRecord, ...]

    def as_json(self) -> str:
        """What results.json holds."""
        whole = {
            "format": FORMAT,
            "version": VERSION,
            "card": dict(self.card),
            "arms": [asdict(arm) for arm in self.arms],
            "prompts": [asdict(prompt) for prompt in self.prompts],
        }
        return json.dumps(whole, allow_nan=False) + "\n"


def read_run(folder: Path) -> Run:
    """The run whose results.json is in a folder; the file itself will do too.

    Raises:
        CheckpointError: there is none, or it is not one of ours.
    """
    path = folder if folder.is_file() else folder / RESULTS_FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["format"] != FORMAT or raw["version"] != VERSION:
            raise ValueError(f"format {raw['format']!r}, version {raw['version']!r}")
        return Run(
            card=raw["card"],
            arms=tuple(Arm(**arm) for arm in raw["arms"]),
            prompts=tuple(PromptRecord.parse(prompt) for prompt in raw["prompts"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            str(path),
            expected=f"results of a finished `ddtree bench`, {FORMAT} version {VERSION}",
            got=f"{type(error).__name__}: {first_line(error)}",
            remedy="Run `ddtree bench --out FOLDER` first, to its end.",
        ) from error


def record_generation(arm: str, generation: Generation, num_prompt_tokens: int) -> ArmRecord:
    """Write down a generation of our own."""
    rounds: list[RoundRecord] = []
    bins = np.zeros((NUM_BINS, 3))
    context = num_prompt_tokens
    seconds = generation.round_seconds
    for done, spent in zip(generation.rounds, seconds, strict=True):
        if done.tree is None:
            continue
        rounds.append(
            RoundRecord(
                context=context,
                nodes=done.tree.num_nodes,
                promised=done.tree.expected_acceptance_length,
                tokens=done.num_tokens,
                ranks=tuple(int(done.tree.ranks[node]) for node in done.path),
                seconds=spent,
            )
        )
        bins += count_nodes(done.tree, done.path)
        context += done.num_tokens
    return ArmRecord(
        arm=arm,
        token_ids=generation.token_ids,
        elapsed_s=generation.elapsed_s,
        prefill_s=seconds[0].total,
        rounds=tuple(rounds),
        node_bins=tuple((int(n), float(p), int(hits)) for n, p, hits in bins),
    )


def count_nodes(tree: DraftTree, path: Sequence[int]) -> Float[ndarray, "bins 3"]:
    """[NUM_BINS, 3]: nodes, their probabilities and how many were accepted, by probability.

    Args:
        tree: as it was verified.
        path: indices of the accepted nodes.
    """
    probabilities = np.exp(tree.log_probs[1:].astype(np.float64))
    accepted = np.isin(np.arange(1, tree.num_rows), path)
    counts = np.zeros((NUM_BINS, 3))
    rows = np.stack([np.ones_like(probabilities), probabilities, accepted], axis=1)
    np.add.at(counts, np.searchsorted(BIN_EDGES, probabilities, side="right"), rows)
    return counts


def _arm_record(raw: Mapping[str, Any]) -> ArmRecord:
    rounds = tuple(
        RoundRecord(**{**r, "seconds": StageSeconds(**r["seconds"])}) for r in raw["rounds"]
    )
    return ArmRecord(**{**raw, "rounds": rounds})
