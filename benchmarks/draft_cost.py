"""What the drafter's pass and its head cost, against a verify of 17 rows: drafters side by side.

    python benchmarks/draft_cost.py --out benchmarks/results

Generates with a tree of 16 nodes on some prompts with each drafter in turn, after a warm-up, and
writes draft_cost.md: median milliseconds per round and the ratio, with quartiles over prompts.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from speed import card

import ddtree
from ddtree.journal import write_whole

ROOT = Path(__file__).parent.parent
DRAFTERS = {"shipped": "smollm2-135m", "v0": str(ROOT / "recipes" / "smollm2-135m" / "v0")}
BUDGET = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=int, default=3, help="prompts of each suite")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    target = ddtree.load_target("smollm2-135m")
    pairs = {
        name: ddtree.Pair(target, ddtree.load_drafter(drafter, target))
        for name, drafter in DRAFTERS.items()
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in pairs}
    for number, prompt in enumerate([prompts(options.limit)[0], *prompts(options.limit)]):
        for name, pair in pairs.items():
            generation = pair.generate(
                prompt, budget=BUDGET, max_new_tokens=options.max_new_tokens, seed=options.seed
            )
            rounds = generation.num_rounds
            if number and rounds:  # the first is the warm-up
                seconds = generation.seconds
                found[name].append((seconds.draft / rounds, seconds.verify / rounds))
    text = "\n".join(report(found, options)) + "\n"
    print(text)
    if options.out:
        write_whole(options.out / "draft_cost.md", text)


def prompts(limit: int) -> list[str]:
    files = sorted((Path(ddtree.__file__).parent / "assets" / "prompts").glob("*.jsonl"))
    return [
        json.loads(line)["turns"][0]
        for file in files
        for line in file.read_text(encoding="utf-8").split("\n")[:limit]
    ]


def report(found: dict[str, list[tuple[float, float]]], options: argparse.Namespace) -> list[str]:
    lines = [f"# Cost of drafting, against a verify of {BUDGET + 1} rows", ""]
    lines += ["| drafter | draft ms | verify ms | draft / verify (quartiles) |"]
    lines += ["|---|---|---|---|"]
    for name, costs in found.items():
        draft, verify = (1e3 * statistics.median(part) for part in zip(*costs, strict=True))
        low, middle, high = statistics.quantiles([d / v for d, v in costs], n=4)
        ratio = f"{middle:.2f} ({low:.2f}-{high:.2f})"
        lines.append(f"| {name} | {draft:.1f} | {verify:.1f} | {ratio} |")
    facts = [f"- {key}: {value}" for key, value in card(options).items() if key != "drafter"]
    return [*lines, "", "## Card", "", *facts]


if __name__ == "__main__":
    main()
