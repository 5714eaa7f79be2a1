"""What the host's work on a draft tree costs: builders and ancestor masks side by side.

    python benchmarks/builders.py --out benchmarks/results

Draws of marginals go through all arms in blocks, one arm after another in random order, so that a
drift of the machine hits all alike; no draw comes twice, or branch prediction would learn it by
heart. From sorted top-k tensors on the CPU, K = B, to a `DraftTree`, checks included; code is warm,
as it is not right after a forward. Writes builders.md: microseconds per call, median and quartiles
over draws.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ddtree.journal import write_whole
from ddtree.provenance import origin
from ddtree.tree import geometry, native, reference
from ddtree.types import Marginals

VOCAB_SIZE = 8192
SIZES = [(num_depths, budget) for num_depths in (7, 15) for budget in (16, 64, 256, 1024)]
BUILDERS = {"heapq": reference.build_tree, "compiled": native.build_tree}
GEOMETRY = {
    "mask by rows": geometry.ancestor_mask_by_rows,
    "mask compiled": native.ancestor_mask,
    "child lookup": geometry.child_lookup,
}
ARMS = (*BUILDERS, *GEOMETRY)
BLOCK = 10  # draws that one arm works through before the next has them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=100, help="marginals of each size, in tens")
    parser.add_argument("--seed", type=int, default=0, help="of marginals and of the order of arms")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    rng = random.Random(options.seed)
    found = {size: measure(*size, options.draws, rng) for size in SIZES}
    text = "\n".join(report(found, options)) + "\n"
    print(text)
    if options.out:
        write_whole(options.out / "builders.md", text)


def measure(
    num_depths: int, budget: int, num_draws: int, rng: random.Random
) -> dict[str, list[float]]:
    """Microseconds of every arm on every draw."""
    spent: dict[str, list[float]] = {name: [] for name in ARMS}
    for block in range(-1, math.ceil(num_draws / BLOCK)):  # the first is the warm-up
        draws = [random_marginals(num_depths, budget) for _ in range(BLOCK)]
        trees = [reference.build_tree(marginals, 0, budget) for marginals in draws]
        for name in rng.sample(ARMS, len(ARMS)):
            if name in BUILDERS:
                seconds = [timed(BUILDERS[name], marginals, 0, budget) for marginals in draws]
            else:
                seconds = [timed(GEOMETRY[name], tree) for tree in trees]
            if block >= 0:
                spent[name] += [1e6 * s for s in seconds]
    return spent


def random_marginals(num_depths: int, num_ranks: int) -> Marginals:
    """A drafter's: sure of the next token, less so of every further one."""
    scales = torch.linspace(5.0, 2.0, num_depths)[:, None]
    log_probs = (scales * torch.randn(num_depths, VOCAB_SIZE)).log_softmax(-1)
    return Marginals(*log_probs.topk(num_ranks))


def timed(call: Callable[..., object], *arguments: object) -> float:
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def report(
    found: dict[tuple[int, int], dict[str, list[float]]], options: argparse.Namespace
) -> list[str]:
    lines = ["# The host's work on a draft tree", "", "Microseconds, median (quartiles).", ""]
    lines += ["| L | B | " + " | ".join(ARMS) + " | heapq / compiled |"]
    lines += ["|---" * (len(ARMS) + 3) + "|"]
    for (num_depths, budget), arms in found.items():
        ratios = [h / c for h, c in zip(arms["heapq"], arms["compiled"], strict=True)]
        cells = [spread(arms[name], 1) for name in ARMS] + [spread(ratios, 0) + "x"]
        lines.append(f"| {num_depths} | {budget} | " + " | ".join(cells) + " |")
    facts = {
        **origin(),
        "marginals": f"softmax of normal logits, scale 5 falling to 2, {VOCAB_SIZE} tokens, K = B",
        "draws": options.draws,
        "seed": options.seed,
    }
    return [*lines, "", "## Card", "", *(f"- {key}: {value}" for key, value in facts.items())]


def spread(values: list[float], digits: int) -> str:
    low, median, high = statistics.quantiles(values, n=4)
    return f"{median:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


if __name__ == "__main__":
    main()
