"""Agreement, tau and speed of ar, dflash and ddtree, side by side in one process.

    python benchmarks/speed.py --limit 8 --max-new-tokens 64 --out benchmarks/results

Every prompt is run by all arms, one after another in random order, so that a drift of the machine
hits all alike. Greedy, float32. Fixed budgets are those named below; budget "auto" learns from the
rounds it decodes, as in use, and from nothing else. Trees are the drafter's alone, but for the arms
named "lookup", which are the default. Two arms are controls: plain decoding by torch with its
layers as they are, and a drafter of the real cost whose tokens are random. Where the processor
multiplies bfloat16, arms named "mixed" run in that dtype; their texts are compared with each other.
Writes speed.json (every prompt and arm) and speed.md (the summary and its card). What
is measured is kept in speed.unfinished.json after every prompt: a run that was stopped goes
on from there with the same command, and a finished one leaves none, so the next measures anew.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import ddtree
from ddtree.journal import changed_names, write_whole
from ddtree.models import kernels
from ddtree.models.loading import load_target
from ddtree.provenance import origin
from ddtree.report import generation_json

SUITES = ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench")
PROMPTS = Path(ddtree.__file__).parent / "assets" / "prompts"


@dataclass(frozen=True)
class Arm:
    """A method at a budget, with the pair of that name; lookup sets the drafter's trees apart."""

    name: str
    method: str
    budget: int | str
    pair: str = "shipped"
    lookup: bool = False


ARMS = (
    Arm("ar", "ar", 0),
    Arm("ar-torch", "ar", 0, "plain layers"),
    Arm("dflash", "dflash", 16),
    Arm("dflash-auto", "dflash", "auto"),
    Arm("ddtree-4", "ddtree", 4),
    Arm("ddtree-8", "ddtree", 8),
    Arm("ddtree-16", "ddtree", 16),
    Arm("ddtree-32", "ddtree", 32),
    Arm("ddtree-auto", "ddtree", "auto"),
    Arm("ddtree-16-lookup", "ddtree", 16, lookup=True),
    Arm("ddtree-auto-lookup", "ddtree", "auto", lookup=True),
    Arm("hostile-auto", "ddtree", "auto", "random tokens"),
)
if kernels.PAIRS_AVAILABLE:
    ARMS += (
        Arm("ar-mixed", "ar", 0, "mixed"),
        Arm("dflash-mixed", "dflash", 16, "mixed"),
        Arm("ddtree-auto-mixed", "ddtree", "auto", "mixed"),
        Arm("ddtree-auto-lookup-mixed", "ddtree", "auto", "mixed", lookup=True),
    )
FIXED = ("ddtree-4", "ddtree-8", "ddtree-16", "ddtree-32")
Pairs = dict[str, ddtree.Pair]


@dataclass(frozen=True)
class RandomTokens:
    """Costs what the drafter costs, is as sure as it is, and proposes anything."""

    drafter: ddtree.Drafter
    vocab_size: int

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """See `ddtree.Drafter`."""
        return tuple(self.drafter.layer_ids)

    @property
    def num_depths(self) -> int:
        """See `ddtree.Drafter`."""
        return self.drafter.num_depths

    def start(self, capacity: int) -> _RandomSession:
        """See `ddtree.Drafter`."""
        return _RandomSession(self.drafter.start(capacity), self.vocab_size)


@dataclass(frozen=True)
class _RandomSession:
    session: ddtree.DraftSession
    vocab_size: int

    def extend(self, features: torch.Tensor, token_ids: torch.Tensor) -> None:
        """See `ddtree.DraftSession`."""
        self.session.extend(features, token_ids)

    def propose(self, root_id: int, **options: int) -> ddtree.Marginals:
        """See `ddtree.DraftSession`."""
        said = self.session.propose(root_id, **options)
        drawn = torch.randint_like(said.token_ids, self.vocab_size)
        return ddtree.Marginals(said.log_probs, drawn, said.transitions)


def load_pairs() -> Pairs:
    """The pairs that arms name."""
    shipped = ddtree.load("smollm2-135m")
    plain = load_target("smollm2-135m", packed=False)
    mixed = {"mixed": ddtree.load("smollm2-135m", dtype="mixed")} if kernels.PAIRS_AVAILABLE else {}
    return {
        **mixed,
        "shipped": shipped,
        "plain layers": ddtree.Pair(plain, None),
        "random tokens": ddtree.Pair(
            shipped.target, RandomTokens(shipped.drafter, shipped.target.vocab_size)
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=int, default=16, help="prompts per suite")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0, help="of the order of arms")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    measured = options.out / "speed.unfinished.json"
    result = begun(measured, options)
    pairs = load_pairs()
    for arm in ARMS:  # warm-up: allocations and first-call work are not measured
        generate(pairs, "Hello", arm, 16)
    rows = result["rows"]
    done = {(row["suite"], row["id"]) for row in rows}
    for suite, prompt in prompts(options.limit):
        if (suite, prompt["id"]) in done:
            continue
        rng = random.Random(f"{options.seed} {suite} {prompt['id']}")
        rows.append(run_prompt(pairs, suite, prompt, options.max_new_tokens, rng))
        write_whole(measured, as_text(result))
        print(f"{suite} {prompt['id']}: {summary(rows[-1])}", file=sys.stderr, flush=True)
    write_whole(options.out / "speed.json", as_text(result))
    write_whole(options.out / "speed.md", markdown(result))
    measured.unlink(missing_ok=True)


def begun(measured: Path, options: argparse.Namespace) -> dict[str, object]:
    """What an earlier run left, if it was the same run on the same machine; else no rows yet."""
    facts = {**card(options), "prompts": f"the first {options.limit} of each suite"}
    fresh = {"card": facts, "arms": [asdict(arm) for arm in ARMS], "rows": []}
    if not measured.exists():
        measured.parent.mkdir(parents=True, exist_ok=True)
        return fresh
    result = json.loads(measured.read_text(encoding="utf-8"))
    changed = changed_names(decisive(result), decisive(fresh))
    if changed:
        sys.exit(
            f"{measured}: expected a run with the same options, code and machine, got other values "
            f"of {', '.join(changed)}. Delete the file to measure anew, or give another --out."
        )
    print(f"{len(result['rows'])} prompts are there already.", file=sys.stderr)
    return result


def decisive(result: dict[str, object]) -> dict[str, object]:
    """What decides the rows: all that is said of a run but how and when it was called."""
    facts = {k: v for k, v in result["card"].items() if k not in ("command", "date")}
    return {**facts, "arms": result["arms"]}


def prompts(limit: int) -> list[tuple[str, dict[str, object]]]:
    """The first prompts of every suite, with its name."""
    return [
        (suite, json.loads(line))
        for suite in SUITES
        for line in (PROMPTS / f"{suite}.jsonl").read_text(encoding="utf-8").split("\n")[:limit]
        if line
    ]


def as_text(result: dict[str, object]) -> str:
    return json.dumps(result, indent=1) + "\n"


def run_prompt(
    pairs: Pairs,
    suite: str,
    prompt: dict[str, object],
    max_new_tokens: int,
    rng: random.Random,
) -> dict[str, object]:
    """All arms on the first turn of one prompt."""
    order = rng.sample(ARMS, len(ARMS))
    text = prompt["turns"][0]
    done = {arm.name: generate(pairs, text, arm, max_new_tokens) for arm in order}
    mixed = [done[arm.name].token_ids for arm in ARMS if arm.pair == "mixed"]
    others = [done[arm.name].token_ids for arm in ARMS if arm.pair != "mixed"]
    agree = len(set(others)) == 1 and len(set(mixed)) <= 1
    arms = {arm.name: generation_json(done[arm.name]) for arm in ARMS}
    for arm in arms.values():
        del arm["text"], arm["versions"]
    return {"suite": suite, "id": prompt["id"], "agree": agree, "arms": arms}


def generate(pairs: Pairs, prompt: str, arm: Arm, max_new_tokens: int) -> ddtree.Generation:
    return pairs[arm.pair].generate(
        prompt,
        method=arm.method,
        budget=arm.budget,
        max_new_tokens=max_new_tokens,
        lookup=arm.lookup,
    )


def summary(row: dict[str, object]) -> str:
    parts = [f"{name} {a['tokens_per_s']:.1f}/s" for name, a in row["arms"].items()]
    return ("agree, " if row["agree"] else "DIFFER, ") + ", ".join(parts)


def card(options: argparse.Namespace) -> dict[str, object]:
    """What a reader needs to judge or repeat the numbers."""
    return {
        **origin(),
        "target": "smollm2-135m, float32 but for arms named mixed",
        "drafter": "the one shipped with smollm2-135m",
        "decoding": f"greedy, at most {options.max_new_tokens} new tokens",
        "seed": options.seed,
    }


def tau(rows: list[dict[str, object]], arm: str) -> float:
    """Mean over prompts of tokens per round."""
    values = [row["arms"][arm]["acceptance_length"] for row in rows]
    return statistics.mean(v for v in values if v is not None)


def speedups(rows: list[dict[str, object]], arm: str) -> list[float]:
    """tokens/s over that of ar, per prompt."""
    return [row["arms"][arm]["tokens_per_s"] / row["arms"]["ar"]["tokens_per_s"] for row in rows]


def spread(values: list[float]) -> str:
    low, median, high = statistics.quantiles(values, n=4)
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def markdown(result: dict[str, object]) -> str:
    rows, arms = result["rows"], [arm["name"] for arm in result["arms"]]
    lines = ["# Speed: the embedded default, greedy", ""]
    agreeing = sum(row["agree"] for row in rows)
    lines += [f"All methods said the same tokens on {agreeing} of {len(rows)} prompts.", ""]
    lines += ["tau: mean over prompts of tokens per round, bonus token included.", ""]
    lines += table(["suite", *arms], [[s, *taus(group, arms)] for s, group in groups(rows)])
    lines += ["", "tokens/s over ar of the same prompt: median (quartiles).", ""]
    lines += table(
        ["suite", *arms[1:]],
        [[s, *(spread(speedups(group, a)) for a in arms[1:])] for s, group in groups(rows)],
    )
    lines += ["", "Milliseconds per round and stage, median over all prompts.", ""]
    stages = ("draft", "build", "verify", "walk", "commit")
    lines += table(["arm", *stages], [[a, *(stage_ms(rows, a, s) for s in stages)] for a in arms])
    speeds = {a: statistics.median(r["arms"][a]["tokens_per_s"] for r in rows) for a in arms}
    listed = ", ".join(f"{a} {v:.1f}" for a, v in speeds.items())
    lines += ["", "## Ratios", "", *targets(rows)]
    lines += ["", f"Median tokens/s, prefill included: {listed}.", "", "## Card", ""]
    lines += [f"- {key}: {value}" for key, value in result["card"].items()]
    return "\n".join(lines) + "\n"


def targets(rows: list[dict[str, object]]) -> list[str]:
    """Ratios of tokens/s, mean over suites of the mean over prompts of each one's ratio."""

    suites = {name: group for name, group in groups(rows) if name != "all" and group}

    def speed(group: list[dict[str, object]], arm: str) -> float:
        return statistics.mean(row["arms"][arm]["tokens_per_s"] for row in group)

    def ratio(arm: str, base: str) -> str:
        per_suite = [
            statistics.mean(
                row["arms"][arm]["tokens_per_s"] / row["arms"][base]["tokens_per_s"]
                for row in group
            )
            for group in suites.values()
        ]
        return f"{statistics.mean(per_suite):.2f}"

    best = {name: max(FIXED, key=lambda a, g=g: speed(g, a)) for name, g in suites.items()}
    over_best = [speed(g, "ddtree-auto") / speed(g, best[name]) for name, g in suites.items()]
    chosen = ", ".join(f"{suite} {arm}" for suite, arm in best.items())
    stages = [
        2 - sum(a["seconds"].values()) / a["seconds"]["elapsed"]  # of which elapsed is one
        for r in rows
        for name in ("ar", "ddtree-auto")
        for a in [r["arms"][name]]
    ]
    mixed = [
        f"- {arm} over {base}: {ratio(arm, base)}"
        for arm, base in (
            ("ar-mixed", "ar"),
            ("dflash-mixed", "ar-mixed"),
            ("ddtree-auto-mixed", "ar-mixed"),
            ("ddtree-auto-lookup-mixed", "ar-mixed"),
            ("ddtree-auto-lookup-mixed", "ddtree-auto-lookup"),
        )
        if arm in rows[0]["arms"]
    ]
    return [
        f"- ddtree-auto-lookup over ar: {ratio('ddtree-auto-lookup', 'ar')}",
        f"- ddtree-auto-lookup over dflash: {ratio('ddtree-auto-lookup', 'dflash')}",
        f"- ddtree-auto-lookup over ddtree-16-lookup: "
        f"{ratio('ddtree-auto-lookup', 'ddtree-16-lookup')}",
        f"- ddtree-auto over ar: {ratio('ddtree-auto', 'ar')}",
        f"- ddtree-auto over ar-torch: {ratio('ddtree-auto', 'ar-torch')}",
        f"- ar over ar-torch: {ratio('ar', 'ar-torch')}",
        f"- ddtree-auto over dflash: {ratio('ddtree-auto', 'dflash')}",
        f"- ddtree-auto over dflash-auto: {ratio('ddtree-auto', 'dflash-auto')}",
        f"- ddtree-auto over the best fixed budget of each suite, mean: "
        f"{statistics.mean(over_best):.3f} ({chosen})",
        f"- hostile-auto over ar: {ratio('hostile-auto', 'ar')}",
        f"- time outside of all stages: {100 * statistics.median(stages):.1f}% of a generation",
        *mixed,
    ]


def groups(rows: list[dict[str, object]]) -> list[tuple[str, list[dict[str, object]]]]:
    found = [(s, [row for row in rows if row["suite"] == s]) for s in SUITES]
    return [*found, ("all", rows)]


def taus(rows: list[dict[str, object]], arms: list[str]) -> list[str]:
    return [f"{tau(rows, arm):.2f}" for arm in arms]


def stage_ms(rows: list[dict[str, object]], arm: str, stage: str) -> str:
    per_round = [
        1000 * row["arms"][arm]["seconds"][stage] / row["arms"][arm]["num_rounds"]
        for row in rows
        if row["arms"][arm]["num_rounds"]
    ]
    return f"{statistics.median(per_round):.2f}"


def table(head: list[str], body: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *body]]


if __name__ == "__main__":
    main()
