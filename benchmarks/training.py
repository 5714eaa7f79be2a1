"""How fast the stages of training run: tokens answered, rows read and blocks trained per second.

    python benchmarks/training.py --out benchmarks/results

Runs the stages' own command lines on the embedded default, one and two processes in turn, and
writes training.md. Respond is timed by the wall clock over a whole small run, loading and the slow
end with few rows left included; fit by the median of its reports.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from speed import card

from ddtree.journal import write_whole

LAYERS = "1,8,14,20,27"
PROMPTS = Path(__file__).parent.parent / "recipes" / "smollm2-135m" / "prompts.jsonl.gz"
FIT = """
[network]
draft_vocab_size = 7043
[fit]
num_steps = {steps}
sequences_per_step = 8
anchors_per_sequence = {anchors}
validation_share = 0.05
validate_every = 1000000
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-prompts", type=int, default=384, help="answered in one run")
    parser.add_argument("--num-rows", type=int, default=96, help="of each process")
    parser.add_argument("--num-steps", type=int, default=40, help="trained in one run")
    parser.add_argument("--repeats", type=int, default=3, help="of each fit")
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = measure(options, Path(folder))
    lines += ["", "## Card", "", *(f"- {key}: {value}" for key, value in card(options).items())]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        write_whole(options.out / "training.md", text)


def measure(options: argparse.Namespace, work: Path) -> list[str]:
    lines = ["# Speed of the training stages", "", "| stage | processes | speed |", "|---|---|---|"]
    rate = respond(options, work)
    lines.append(f"| respond, {options.num_rows} rows each, features recorded | 2 | {rate} |")
    found: dict[tuple[int, int], list[float]] = {}
    for repeat in range(options.repeats):
        for anchors in (16, 32):
            for workers in (1, 2):
                speeds = fit(options, work, workers, anchors, repeat)
                found.setdefault((anchors, workers), []).append(statistics.median(speeds))
    for (anchors, workers), medians in sorted(found.items()):
        spread = f"{min(medians):.0f} to {max(medians):.0f}"
        speed = f"{statistics.median(medians):.0f} blocks of 8 per second ({spread})"
        lines.append(f"| fit, 8 responses x {anchors} anchors a step | {workers} | {speed} |")
    return lines


def respond(options: argparse.Namespace, work: Path) -> str:
    """Answer some prompts, every n-th of the shipped file; tokens per second by the wall clock."""
    with gzip.open(PROMPTS, "rt", encoding="utf-8") as file:
        prompts = [line for line in file.read().split("\n") if line]
    some = prompts[:: max(1, len(prompts) // options.num_prompts)][: options.num_prompts]
    file = work / "prompts.jsonl"
    file.write_text("\n".join(some) + "\n", encoding="utf-8")
    begin = time.perf_counter()
    ddtree(
        "respond",
        *("--prompts", file, "--out", work, "--record-layers", LAYERS, "--num-workers", 2),
        *("--num-rows", options.num_rows, "--max-new-tokens", options.max_new_tokens),
        *("--seed", options.seed),
    )
    seconds = time.perf_counter() - begin
    lines = (work / "responses.jsonl").read_text(encoding="utf-8").split("\n")
    num_tokens = sum(len(json.loads(line)["response_ids"]) for line in lines if line)
    return f"{num_tokens / seconds:.0f} tokens/s ({num_tokens} tokens in {seconds:.0f} s)"


def fit(
    options: argparse.Namespace, work: Path, workers: int, anchors: int, repeat: int
) -> list[float]:
    """Train some steps from the start; blocks per second of every report but the first."""
    recipe = work / "recipe.toml"
    recipe.write_text(FIT.format(steps=options.num_steps, anchors=anchors))
    out = work / f"fit-{anchors}-{workers}-{repeat}"
    ddtree(
        "fit",
        *("--samples", work / "samples", "--out", out, "--recipe", recipe),
        *("--num-workers", workers),
    )
    lines = (out / "metrics.jsonl").read_text().split("\n")
    return [json.loads(line)["blocks_per_s"] for line in lines if line][1:]


def ddtree(stage: str, *arguments: object) -> None:
    command = [Path(sys.executable).with_name("ddtree"), "train", stage, *map(str, arguments)]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
