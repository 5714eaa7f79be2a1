"""Peak memory of each method at one context, every method in a process of its own.

    python benchmarks/memory.py --context 2000 --out benchmarks/results

Writes memory.md: the peak resident size (ru_maxrss) after generating, and the ratio to ar.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from pathlib import Path

from speed import card

from ddtree.journal import write_whole

ARMS = (("ar", 0), ("dflash", 16), ("ddtree", 32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=2000, help="prompt tokens")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", nargs=2, metavar=("METHOD", "BUDGET"), help="used by itself")
    options = parser.parse_args()
    if options.child:
        method, budget = options.child
        print(peak_mib(method, int(budget), options.context, options.max_new_tokens))
        return
    peaks = {}
    for method, budget in ARMS:
        command = [sys.executable, *sys.argv, "--child", method, str(budget)]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        peaks[f"{method}, B = {budget}"] = float(output)
    baseline = peaks["ar, B = 0"]
    lines = [f"# Peak memory at {options.context} tokens of context", ""]
    lines += ["| method | peak MiB | over ar |", "|---|---|---|"]
    lines += [f"| {name} | {v:.0f} | {v / baseline:.3f} |" for name, v in peaks.items()]
    lines += ["", "## Card", "", *(f"- {k}: {v}" for k, v in card(options).items())]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        write_whole(options.out / "memory.md", text)


def peak_mib(method: str, budget: int, context: int, max_new_tokens: int) -> float:
    import ddtree

    pair = ddtree.load("smollm2-135m")
    prompt = [1000 + (7919 * i) % 40000 for i in range(context)]
    pair.generate(prompt, method=method, budget=budget, max_new_tokens=max_new_tokens)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
