"""What the transition head and the text's own repetitions give: tau, with and without each.

    python benchmarks/transitions.py [--per-suite 6] [--tokens 96] [--temperature 0]
        [--out benchmarks/results/transitions]

One drafter, its transition head in use or not; greedy, on the packaged suites. All arms of a
prompt say the same text, or the run ends. Everything is counted, nothing is timed: other work
beside it does no harm. tau is tokens by rounds, both summed over a suite, the prefill's token left
out; the mean is over suites, intervals are over prompts drawn anew within each suite. What
repetitions are worth is learnt as it goes, in the order of the prompts. Writes OUT.json and OUT.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import ddtree
from ddtree.config import DecodeConfig
from ddtree.journal import write_whole
from ddtree.models.drafter import DFlashDrafter
from ddtree.models.loading import load_drafter, silence_transformers
from ddtree.provenance import origin
from ddtree.types import Generation

SUITES = ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench")
PROMPTS = Path(ddtree.__file__).parent / "assets" / "prompts"
RESAMPLES = 2000
# Name of a pair, lookup.
KINDS = {"alone": (False, False), "transitions": (True, False), "and lookup": (True, True)}
BUDGETS = {"chain": ("dflash", 16), "B = 8": ("ddtree", 8), "B = 16": ("ddtree", 16)}
Counts = dict[str, np.ndarray]  # by arm, [prompts, 2]: tokens and rounds


@dataclass(frozen=True)
class Arm:
    """A builder and budget with one kind of draft."""

    budget: str
    kind: str

    @property
    def name(self) -> str:
        """For tables and files."""
        return f"{self.budget}, {self.kind}"


ARMS = [Arm(b, k) for b in BUDGETS for k in KINDS if not (k == "and lookup" and b == "chain")]


def load_pairs() -> dict[bool, ddtree.Pair]:
    """The embedded default, with its transition head and without."""
    pair = ddtree.load("smollm2-135m")
    plain = load_drafter("smollm2-135m", pair.target)
    assert isinstance(plain, DFlashDrafter)
    plain.network.candidate_selector = None
    return {True: pair, False: ddtree.Pair(pair.target, plain)}


def count(pairs: dict[bool, ddtree.Pair], options: argparse.Namespace) -> dict[str, Counts]:
    """Tokens and rounds of every prompt, by suite and arm."""
    found: dict[str, Counts] = {}
    for suite in SUITES:
        lines = (PROMPTS / f"{suite}.jsonl").read_text(encoding="utf-8").split("\n")
        rows: dict[str, list[tuple[int, int]]] = {arm.name: [] for arm in ARMS}
        for line in [line for line in lines if line][: options.per_suite]:
            said = set()
            for arm in ARMS:
                done = generate(pairs, json.loads(line)["turns"][0], arm, options)
                said.add(done.token_ids)
                rows[arm.name].append((done.num_tokens - 1, done.num_rounds))
            if len(said) > 1:
                sys.exit(f"{suite}: the arms say {len(said)} texts to {line}")
        found[suite] = {name: np.array(pairs_) for name, pairs_ in rows.items()}
        print(f"{suite}: done", file=sys.stderr, flush=True)
    return found


def generate(
    pairs: dict[bool, ddtree.Pair], prompt: str, arm: Arm, options: argparse.Namespace
) -> Generation:
    has_head, lookup = KINDS[arm.kind]
    method, budget = BUDGETS[arm.budget]
    config = DecodeConfig(
        method=method,
        budget=budget,
        lookup=lookup,
        temperature=options.temperature,
        max_new_tokens=options.tokens,
    )
    *_, done = pairs[has_head].run(prompt, config)
    assert isinstance(done, Generation)
    return done


def tau(counts: np.ndarray) -> np.ndarray:
    """Tokens by rounds, both summed over prompts, the last axis but one."""
    sums = counts.sum(axis=-2)
    return sums[..., 0] / sums[..., 1]


def with_interval(found: dict[str, Counts], arm: Arm, base: Arm | None = None) -> str:
    """Mean over suites of an arm's tau, or of its ratio to another's."""
    rng = np.random.default_rng(0)
    means, drawn = [], []
    for counts in found.values():
        own = counts[arm.name]
        places = rng.integers(0, len(own), (RESAMPLES, len(own)))
        value, values = tau(own), tau(own[places])
        if base is not None:
            other = counts[base.name]
            value, values = value / tau(other), values / tau(other[places])
        means.append(value)
        drawn.append(values)
    low, high = np.quantile(np.mean(drawn, axis=0), [0.025, 0.975])
    return f"{np.mean(means):.2f} [{low:.2f}, {high:.2f}]"


def markdown(found: dict[str, Counts], card: dict[str, object]) -> str:
    lines = ["# Transition head and lookup: tokens per round, embedded default", ""]
    body = [[suite, *(f"{tau(c[a.name]):.2f}" for a in ARMS)] for suite, c in found.items()]
    body.append(["mean", *(with_interval(found, arm) for arm in ARMS)])
    lines += table(["suite", *(arm.name for arm in ARMS)], body)
    lines += ["", "Ratios of tau, mean over suites:", ""]
    for arm in ARMS:
        before = {"transitions": "alone", "and lookup": "transitions"}.get(arm.kind)
        if before is not None:
            ratio = with_interval(found, arm, Arm(arm.budget, before))
            lines.append(f"- {arm.name} over {before}: {ratio}")
    tree, chain = Arm("B = 16", "transitions"), Arm("chain", "transitions")
    lines.append(f"- {tree.name} over {chain.name}: {with_interval(found, tree, chain)}")
    return "\n".join([*lines, "", "## Card", "", *(f"- {k}: {v}" for k, v in card.items())]) + "\n"


def table(head: list[str], body: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *body]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--per-suite", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/transitions"))
    options = parser.parse_args()
    silence_transformers()
    found = count(load_pairs(), options)
    card = {
        **origin(),
        "prompts": f"the first {options.per_suite} of each suite, first turns",
        "decoding": f"T = {options.temperature:g}, at most {options.tokens} new tokens",
    }
    kept = {s: {name: c.tolist() for name, c in counts.items()} for s, counts in found.items()}
    write_whole(options.out.with_suffix(".json"), json.dumps({"card": card, "counts": kept}) + "\n")
    write_whole(options.out.with_suffix(".md"), markdown(found, card))


if __name__ == "__main__":
    main()
