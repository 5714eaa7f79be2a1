"""Is the baseline lean? Our `ar` beside a bare loop over the model and transformers' `generate`.

    python benchmarks/bare_loop.py --max-new-tokens 64 --repeats 7 --out benchmarks/results

The bare loop is what one would write by hand: a prefill, then one forward per token with the
library's own cache, and an argmax. All three run on the same model object, in turns whose order is
drawn anew; prefill included. Writes bare_loop.md.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import DynamicCache

import ddtree
from ddtree.cache.hf import cache_argument
from ddtree.journal import write_whole
from ddtree.prompt import encode
from ddtree.provenance import origin

PROMPT = "Write a Python function that returns the n-th Fibonacci number, and explain it."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0, help="of the order of arms")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    pair = ddtree.load("smollm2-135m")
    prompt_ids = encode(PROMPT, pair.target, raw=False)
    arms = arms_of(pair, prompt_ids, options.max_new_tokens)
    said = {name: run() for name, run in arms.items()}  # the warm-up
    assert len(set(map(tuple, said.values()))) == 1, said
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    rng = random.Random(options.seed)
    for _ in range(options.repeats):
        for name in rng.sample(list(arms), len(arms)):
            begin = time.perf_counter()
            arms[name]()
            seconds[name].append(time.perf_counter() - begin)
    options.out.mkdir(parents=True, exist_ok=True)
    write_whole(options.out / "bare_loop.md", markdown(seconds, len(said["ar"])))


def arms_of(
    pair: ddtree.Pair, prompt_ids: list[int], num_new: int
) -> dict[str, Callable[[], list[int]]]:
    """Each says the first `num_new` greedy tokens."""
    model = pair.target.model
    cache_name = cache_argument(model)

    @torch.inference_mode()
    def bare_loop() -> list[int]:
        cache = DynamicCache(config=model.config)
        ids, said = torch.tensor([prompt_ids]), []
        for _ in range(num_new):
            out = model(input_ids=ids, use_cache=True, logits_to_keep=1, **{cache_name: cache})
            said.append(int(out.logits[0, -1].argmax()))
            ids = torch.tensor([said[-1:]])
        return said

    def generate() -> list[int]:
        ids = torch.tensor([prompt_ids])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            do_sample=False,
        )
        return out[0, len(prompt_ids) :].tolist()

    def ar() -> list[int]:
        done = pair.generate(prompt_ids, method="ar", max_new_tokens=num_new, ignore_eos=True)
        return list(done.token_ids)

    return {"ar": ar, "bare loop": bare_loop, "model.generate": generate}


def markdown(seconds: dict[str, list[float]], num_tokens: int) -> str:
    lines = ["# Our `ar` beside a bare loop over the same model", ""]
    lines += ["Milliseconds per token, prefill included; ratio: of ar's time in the same turn.", ""]
    lines += ["| arm | median (least, most) | ar / arm, median (quartiles) |", "|---|---|---|"]
    for name, times in seconds.items():
        each = [1000 * s / num_tokens for s in times]
        ratios = [a / s for a, s in zip(seconds["ar"], times, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        lines.append(
            f"| {name} | {statistics.median(each):.1f} ({min(each):.1f}, {max(each):.1f}) "
            f"| {middle:.3f} ({low:.3f} to {high:.3f}) |"
        )
    lines += ["", "## Card", "", f"- tokens: {num_tokens}, greedy, all arms said the same"]
    lines += [f"- {key}: {value}" for key, value in origin().items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
