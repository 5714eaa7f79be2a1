"""Agreement, tau and speed of ar, dflash and ddtree, side by side in one process.

    python benchmarks/first_light.py --limit 16 --max-new-tokens 96 --out benchmarks/results

Every prompt is run by all arms, one after another in random order, so that a drift of the machine
hits all alike. Greedy, float32. Budgets are fixed beforehand; nothing is tuned on these prompts.
Writes first_light.json (every prompt and arm) and first_light.md (the summary and its card). What
is measured is kept in first_light.unfinished.json after every prompt: a run that was stopped goes
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

import ddtree
from ddtree.provenance import origin
from ddtree.report import generation_json
from ddtree.train.journal import changed_names, write_whole

SUITES = ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench")
PROMPTS = Path(__file__).parent / "prompts"


@dataclass(frozen=True)
class Arm:
    """A method at a budget."""

    name: str
    method: str
    budget: int


ARMS = (
    Arm("ar", "ar", 0),
    Arm("dflash", "dflash", 16),
    Arm("ddtree-16", "ddtree", 16),
    Arm("ddtree-32", "ddtree", 32),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=int, default=16, help="prompts per suite")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0, help="of the order of arms")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    measured = options.out / "first_light.unfinished.json"
    result = begun(measured, options)
    pair = ddtree.load("smollm2-135m")
    for arm in ARMS:  # warm-up: allocations and first-call work are not measured
        generate(pair, "Hello", arm, 16)
    rows = result["rows"]
    done = {(row["suite"], row["id"]) for row in rows}
    for suite, prompt in prompts(options.limit):
        if (suite, prompt["id"]) in done:
            continue
        rng = random.Random(f"{options.seed} {suite} {prompt['id']}")
        rows.append(run_prompt(pair, suite, prompt, options.max_new_tokens, rng))
        write_whole(measured, as_text(result))
        print(f"{suite} {prompt['id']}: {summary(rows[-1])}", file=sys.stderr, flush=True)
    write_whole(options.out / "first_light.json", as_text(result))
    write_whole(options.out / "first_light.md", markdown(result))
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
    pair: ddtree.Pair,
    suite: str,
    prompt: dict[str, object],
    max_new_tokens: int,
    rng: random.Random,
) -> dict[str, object]:
    """All arms on the first turn of one prompt."""
    order = rng.sample(ARMS, len(ARMS))
    text = prompt["turns"][0]
    done = {arm.name: generate(pair, text, arm, max_new_tokens) for arm in order}
    agree = len({g.token_ids for g in done.values()}) == 1
    arms = {arm.name: generation_json(done[arm.name]) for arm in ARMS}
    for arm in arms.values():
        del arm["text"], arm["versions"]
    return {"suite": suite, "id": prompt["id"], "agree": agree, "arms": arms}


def generate(pair: ddtree.Pair, prompt: str, arm: Arm, max_new_tokens: int) -> ddtree.Generation:
    return pair.generate(
        prompt, method=arm.method, budget=arm.budget, max_new_tokens=max_new_tokens
    )


def summary(row: dict[str, object]) -> str:
    parts = [f"{name} {a['tokens_per_s']:.1f}/s" for name, a in row["arms"].items()]
    return ("agree, " if row["agree"] else "DIFFER, ") + ", ".join(parts)


def card(options: argparse.Namespace) -> dict[str, object]:
    """What a reader needs to judge or repeat the numbers."""
    return {
        **origin(),
        "target": "smollm2-135m, float32",
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
    lines = ["# First light: the embedded default, greedy, float32", ""]
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
    lines += ["", f"Median tokens/s, prefill included: {listed}.", "", "## Card", ""]
    lines += [f"- {key}: {value}" for key, value in result["card"].items()]
    return "\n".join(lines) + "\n"


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
