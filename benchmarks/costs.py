"""How each stage's cost grows: one factor at a time around a base point.

    python benchmarks/costs.py --out benchmarks/results

Models have random weights: what they say changes no cost. All points of a table are measured one
after another in random order, over and over, so that a drift of the machine hits all alike.
The last table sets a context of 4,000 tokens against one of 200, in the embedded default's shape,
with attention timed apart. Writes costs.json and costs.md: milliseconds per call, median and
quartiles over repeats. Formulas: docs/costs.md. Under five minutes on two cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from builders import random_marginals
from speed import table
from transformers import AutoModelForCausalLM, LlamaConfig

from ddtree.attention import grouped
from ddtree.attention.backends import GROUPED
from ddtree.cache.hf import TargetCache
from ddtree.commit import commit
from ddtree.draft import draft
from ddtree.journal import write_whole
from ddtree.models.drafter import DFlashDrafter, DFlashSession, top_marginals
from ddtree.models.drafter_config import parse_drafter_config
from ddtree.models.drafter_network import DFlashNetwork
from ddtree.models.packed import pack_linears
from ddtree.models.target import Target
from ddtree.prefill import Context
from ddtree.provenance import origin
from ddtree.sampling.rule import Greedy
from ddtree.stopping import TextStopping
from ddtree.tree.geometry import ancestor_mask, path_to
from ddtree.tree.host import build_tree, describe
from ddtree.types import DraftTree
from ddtree.verify import verify
from ddtree.walk import walk

Call = Callable[[], object]
# Low quartile, median, high quartile.
Spread = tuple[float, float, float]

# The base point, in the letters of docs/algorithm.md; `slots` is the drafter's block, L + 1.
BASE = {"L": 7, "B": 64, "K": 64, "N": 17, "T": 200, "V": 16384, "layers": 10, "slots": 8}
# Width and heads of the embedded default, whose 30 layers and 49,152 tokens the last table has.
SIZES = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "bos_token_id": None,
    "eos_token_id": None,
}
EMBEDDED = {"layers": 30, "V": 49152}
DRAFTER_LAYERS = 3
CONTEXTS = (200, 4000)
# No fewer than the tokens that random trees are made of.
VOCABULARIES = (8192, 16384, 49152, 151936)
# A call shorter than this is made several times per sample: the clock alone takes a microsecond.
SAMPLE_S = 1e-3
MIN_REPEATS = 5


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What is measured for one table.

    Args:
        title: its heading.
        factor: what the rows differ in, one of BASE.
        others: the other factors that matter, at their base.
        calls: per value of the factor and column, what is timed.
    """

    title: str
    factor: str
    others: tuple[str, ...]
    calls: Mapping[int, Mapping[str, Call]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=21, help="of every point, time allowing")
    parser.add_argument("--minutes", type=float, default=4.5, help="fewer repeats where it is slow")
    parser.add_argument("--seed", type=int, default=0, help="of weights and of the order of points")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    rng = random.Random(options.seed)
    deadline = time.perf_counter() + 60 * options.minutes
    tables: list[dict[str, object]] = []
    with torch.inference_mode():
        for i, sweep in enumerate(SWEEPS):
            # The last table is the longest, and counts as three.
            share_s = (deadline - time.perf_counter()) / (len(SWEEPS) - i + 3)
            tables.append(measured(sweep(), options.repeats, rng, share_s))
        left_s = deadline - time.perf_counter()
        growth = context_growth(options.repeats, rng, 0.8 * left_s)
    result = {"card": card(options), "base": BASE, "tables": tables, "context": growth}
    text = markdown(result)
    print(text)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        write_whole(options.out / "costs.json", json.dumps(result, indent=1) + "\n")
        write_whole(options.out / "costs.md", text)


def card(options: argparse.Namespace) -> dict[str, object]:
    return {
        **origin(),
        "models": "random weights in float32, Llama of hidden 576, 9 heads, 3 KV heads, packed",
        "builder": describe(),
        "repeats": f"{options.repeats}, or as many as {options.minutes} minutes allow",
        "seed": options.seed,
    }


# Measuring


def interleaved(
    calls: Mapping[str, Call],
    repeats: int,
    rng: random.Random,
    *,
    limit_s: float = math.inf,
    wait: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds of every call, in rounds of random order.

    Args:
        calls: by name; each is made once beforehand, as its warm-up.
        repeats: rounds; fewer, but never below MIN_REPEATS, when `limit_s` has passed.
        rng: of the order.
        wait: for the device, before the clock is read.
    """
    begin = time.perf_counter()
    times = {}
    for name, call in calls.items():
        call()
        times[name] = max(1, min(50, int(SAMPLE_S / timed(call, 1, wait))))
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for done in range(repeats):
        if done >= min(MIN_REPEATS, repeats) and time.perf_counter() - begin > limit_s:
            break
        for name in rng.sample(list(calls), len(calls)):
            spent[name].append(timed(calls[name], times[name], wait))
    return spent


def timed(call: Call, times: int, wait: Callable[[], object]) -> float:
    """Seconds of one call, as the mean of a few in a row."""
    wait()
    begin = time.perf_counter()
    for _ in range(times):
        call()
    wait()
    return (time.perf_counter() - begin) / times


def spread_ms(seconds: list[float]) -> Spread:
    """Median and quartiles in milliseconds."""
    low, median, high = statistics.quantiles([1e3 * s for s in seconds], n=4)
    return low, median, high


def measured(
    sweep: Sweep, repeats: int, rng: random.Random, limit_s: float = math.inf
) -> dict[str, object]:
    """One table: per value of the factor, the spread of every column."""
    points = {(v, c): call for v, calls in sweep.calls.items() for c, call in calls.items()}
    named = {f"{value} {column}": call for (value, column), call in points.items()}
    spent = interleaved(named, repeats, rng, limit_s=limit_s)
    rows = [
        {"value": v, "ms": {c: spread_ms(spent[f"{v} {c}"]) for c in calls}}
        for v, calls in sweep.calls.items()
    ]
    others = {name: BASE[name] for name in sweep.others}
    num_repeats = len(next(iter(spent.values())))
    return {
        "title": sweep.title,
        "factor": sweep.factor,
        "others": others,
        "repeats": num_repeats,
        "rows": rows,
    }


# What is measured: models, contexts and trees


def random_target(num_layers: int, vocab_size: int) -> Target:
    """A Llama with random weights, laid out as `load_target` does."""
    config = LlamaConfig(**SIZES, num_hidden_layers=num_layers, vocab_size=vocab_size)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=GROUPED)
    pack_linears(model)
    return Target(model, None, name=f"random, {num_layers} layers")


def random_drafter(target: Target, block_size: int) -> DFlashDrafter:
    """A DFlash in the shipped drafter's shape, with random weights and the whole head."""
    config = {
        "architectures": ["DFlashDraftModel"],
        "block_size": block_size,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2, 4, 6, 8]},
        "num_hidden_layers": DRAFTER_LAYERS,
        "head_dim": 64,
        "rope_theta": 1e5,
        **{name: size for name, size in SIZES.items() if name.endswith(("_size", "_heads"))},
    }
    network = DFlashNetwork(parse_drafter_config(config, "costs.py"))
    drafter = DFlashDrafter(network, target, name="random")
    drafter.pack()
    return drafter


def filled_cache(target: Target, context_length: int, room: int) -> TargetCache:
    """A cache that holds so many random positions."""
    cache = target.new_cache(context_length + room)
    shape = (1, SIZES["num_key_value_heads"], context_length, 64)
    for store in cache.stores:
        store.append(torch.randn(shape), torch.randn(shape))
    return cache


def filled_session(drafter: DFlashDrafter, context_length: int) -> DFlashSession:
    """A session that has seen so many random positions."""
    session = drafter.start(context_length)
    num_features = len(drafter.layer_ids) * SIZES["hidden_size"]
    ids = torch.zeros(context_length, dtype=torch.int64)
    session.extend(torch.randn(context_length, num_features), ids)
    return session


def random_tree(num_rows: int, num_depths: int = BASE["L"]) -> DraftTree:
    return build_tree(random_marginals(num_depths, max(1, num_rows - 1)), 0, num_rows - 1)


def verify_call(target: Target, cache: TargetCache, num_rows: int) -> Call:
    """A verify forward, which leaves the cache as it was."""
    context = Context(cache, None, [0], ())
    start, tree = cache.length, random_tree(num_rows)

    def call() -> None:
        verify(target, context, tree)
        cache.keep(start, ())

    return call


# The tables


def build_by_budget() -> Sweep:
    calls = {b: {"build": build_call(BASE["L"], b)} for b in (4, 16, 64, 256, 1024)}
    return Sweep(title="Build on the host, K = B", factor="B", others=("L",), calls=calls)


def build_by_depths() -> Sweep:
    calls = {n: {"build": build_call(n, BASE["B"])} for n in (3, 7, 15, 31)}
    return Sweep(title="Build on the host, K = B", factor="L", others=("B",), calls=calls)


def build_call(num_depths: int, budget: int) -> Call:
    # Over and over the same draw would be learnt by heart by the branch prediction.
    draws = cycled(lambda: random_marginals(num_depths, budget))
    return lambda: build_tree(next(draws), 0, budget)


def cycled(draw: Callable[[], object], count: int = 32) -> Iterator:
    return itertools.cycle([draw() for _ in range(count)])


def top_k_by_vocabulary() -> Sweep:
    calls = {v: {"top-k": top_k_call(v, BASE["K"])} for v in VOCABULARIES}
    return Sweep(title="The drafter's top-k", factor="V", others=("L", "K"), calls=calls)


def top_k_by_ranks() -> Sweep:
    calls = {k: {"top-k": top_k_call(BASE["V"], k)} for k in (4, 16, 64, 256, 1024)}
    return Sweep(title="The drafter's top-k", factor="K", others=("L", "V"), calls=calls)


def top_k_call(vocab_size: int, num_ranks: int) -> Call:
    draws = cycled(lambda: torch.randn(BASE["L"], vocab_size), 4)
    return lambda: top_marginals(next(draws), num_ranks)


def verify_by_rows() -> Sweep:
    target = random_target(BASE["layers"], BASE["V"])
    counts = (1, 2, 4, 8, 17, 33, 65, 129)
    cache = filled_cache(target, BASE["T"], max(counts))
    calls = {n: {"verify": verify_call(target, cache, n)} for n in counts}
    return Sweep(title="Verify", factor="N", others=("T", "layers", "V"), calls=calls)


def verify_by_context() -> Sweep:
    target = random_target(BASE["layers"], BASE["V"])
    calls = {}
    for length in (50, 200, 1000, 4000):
        cache = filled_cache(target, length, BASE["N"])
        calls[length] = {"verify": verify_call(target, cache, BASE["N"])}
    return Sweep(title="Verify", factor="T", others=("N", "layers", "V"), calls=calls)


def verify_by_layers() -> Sweep:
    calls = {n: {"verify": base_verify(n, BASE["V"])} for n in (5, 10, 20, 40)}
    return Sweep(title="Verify", factor="layers", others=("N", "T", "V"), calls=calls)


def verify_by_vocabulary() -> Sweep:
    calls = {v: {"verify": base_verify(BASE["layers"], v)} for v in VOCABULARIES}
    return Sweep(title="Verify", factor="V", others=("N", "T", "layers"), calls=calls)


def base_verify(num_layers: int, vocab_size: int) -> Call:
    target = random_target(num_layers, vocab_size)
    return verify_call(target, filled_cache(target, BASE["T"], BASE["N"]), BASE["N"])


def after_by_rows() -> Sweep:
    target = random_target(BASE["layers"], BASE["V"])
    counts = (9, 17, 65, 257)
    calls = {n: after_calls(target, random_tree(n), BASE["T"], BASE["V"]) for n in counts}
    return Sweep(title="Mask, walk, commit", factor="N", others=("T", "V", "layers"), calls=calls)


def after_by_context() -> Sweep:
    target, tree = random_target(BASE["layers"], BASE["V"]), random_tree(BASE["N"])
    calls = {t: after_calls(target, tree, t, BASE["V"]) for t in (50, 200, 1000, 4000)}
    return Sweep(title="Mask, walk, commit", factor="T", others=("N", "V", "layers"), calls=calls)


def after_by_vocabulary() -> Sweep:
    target, tree = random_target(BASE["layers"], BASE["V"]), random_tree(BASE["N"])
    calls = {v: after_calls(target, tree, BASE["T"], v) for v in VOCABULARIES}
    return Sweep(title="Mask, walk, commit", factor="V", others=("N", "T", "layers"), calls=calls)


def after_calls(
    target: Target, tree: DraftTree, context_length: int, vocab_size: int
) -> dict[str, Call]:
    """What a round does on the host around the forward; the walk accepts the last node's path."""
    num_rows = tree.num_rows
    cache = filled_cache(target, context_length, num_rows)
    context = Context(cache, None, [0], ())
    verify(target, context, tree)  # the buffers are written, the rows are there
    path = path_to(tree, num_rows - 1)
    logits = torch.randn(num_rows, vocab_size)
    for row, node in zip((0, *path), path, strict=False):
        logits[row, tree.token_ids[node]] = 100.0
    features = torch.empty(num_rows, 0)

    def mask() -> None:
        ancestors = torch.from_numpy(ancestor_mask(tree))
        cache.tree_mask.of(ancestors, context_length, torch.float32)

    def put_back() -> None:
        commit(context, context_length, path, features)
        for store in cache.stores:  # the rows that were dropped: the next call drops them again
            store.length = context_length + num_rows

    return {
        "mask": mask,
        "walk": lambda: walk(tree, logits, Greedy(), TextStopping(99, (), None), [0]),
        "commit": put_back,
    }


def draft_by_slots() -> Sweep:
    target = random_target(BASE["layers"], BASE["V"])
    calls = {n: {"draft": draft_call(random_drafter(target, n), BASE["T"])} for n in (4, 8, 16, 32)}
    return Sweep(title="Drafter pass", factor="slots", others=("T", "V", "K"), calls=calls)


def draft_by_context() -> Sweep:
    drafter = random_drafter(random_target(BASE["layers"], BASE["V"]), BASE["slots"])
    calls = {t: {"draft": draft_call(drafter, t)} for t in (50, 200, 1000, 4000)}
    return Sweep(title="Drafter pass", factor="T", others=("slots", "V", "K"), calls=calls)


def draft_by_vocabulary() -> Sweep:
    calls = {}
    for vocab_size in VOCABULARIES:
        drafter = random_drafter(random_target(BASE["layers"], vocab_size), BASE["slots"])
        calls[vocab_size] = {"draft": draft_call(drafter, BASE["T"])}
    return Sweep(title="Drafter pass", factor="V", others=("slots", "T", "K"), calls=calls)


def draft_call(drafter: DFlashDrafter, context_length: int) -> Call:
    session = filled_session(drafter, context_length)
    return lambda: draft(session, 0, drafter.num_depths, BASE["K"])


SWEEPS = (
    build_by_budget,
    build_by_depths,
    top_k_by_vocabulary,
    top_k_by_ranks,
    draft_by_slots,
    draft_by_context,
    draft_by_vocabulary,
    verify_by_rows,
    verify_by_context,
    verify_by_layers,
    verify_by_vocabulary,
    after_by_rows,
    after_by_context,
    after_by_vocabulary,
)


# Context of 4,000 tokens against 200


def context_growth(repeats: int, rng: random.Random, limit_s: float) -> dict[str, object]:
    """A round, its drafter pass, its verify and the verify's attention alone, at both contexts."""
    target = random_target(EMBEDDED["layers"], EMBEDDED["V"])
    drafter = random_drafter(target, BASE["slots"])
    calls: dict[str, Call] = {}
    memory = {}
    for length in CONTEXTS:
        cache = filled_cache(target, length, BASE["N"])
        session = filled_session(drafter, length)
        # Taken before the rounds: they hold the places that the rows are written to.
        calls[f"{length} attention"] = attention_call(target, cache)
        calls[f"{length} verify"] = verify_call(target, cache, BASE["N"])
        calls[f"{length} draft"] = draft_call_of(session, drafter)
        calls[f"{length} round"] = round_call(target, cache, session, drafter)
        memory[length] = {"target": cache.num_bytes, "drafter": session.num_bytes}
    spent = interleaved(calls, repeats, rng, limit_s=limit_s)
    rows = []
    for length in CONTEXTS:
        found = {s: spent[f"{length} {s}"] for s in ("round", "draft", "verify", "attention")}
        pairs = zip(found["verify"], found["attention"], strict=True)
        found["verify less attention"] = [v - a for v, a in pairs]
        ms = {stage: spread_ms(seconds) for stage, seconds in found.items()}
        rows.append({"context": length, "ms": ms, "kv_bytes": memory[length]})
    few, many = CONTEXTS
    grown = {
        stage: [
            b - a for a, b in zip(spent[f"{few} {stage}"], spent[f"{many} {stage}"], strict=True)
        ]
        for stage in ("verify", "attention")
    }
    explained = [a / v for a, v in zip(grown["attention"], grown["verify"], strict=True)]
    return {
        "shape": EMBEDDED,
        "num_rows": BASE["N"],
        "repeats": len(explained),
        "rows": rows,
        "growth_ms": {stage: spread_ms(seconds) for stage, seconds in grown.items()},
        "explained": statistics.quantiles(explained, n=4),
    }


def attention_call(target: Target, cache: TargetCache) -> Call:
    """All layers' attention over the cache's own keys and values, and nothing else."""
    start, tree = cache.length, random_tree(BASE["N"])
    verify(target, Context(cache, None, [0], ()), tree)
    entries = [(store.keys, store.values) for store in cache.stores]
    cache.keep(start, ())
    ancestors = torch.from_numpy(ancestor_mask(tree))
    mask = cache.tree_mask.of(ancestors, start, torch.float32)
    # Laid out as the projections leave it.
    query = torch.randn(1, BASE["N"], SIZES["num_attention_heads"], 64).transpose(1, 2)

    def call() -> None:
        for keys, values in entries:
            grouped.attend(target.model, query, keys, values, mask, scaling=64**-0.5)

    return call


def draft_call_of(session: DFlashSession, drafter: DFlashDrafter) -> Call:
    return lambda: draft(session, 0, drafter.num_depths, BASE["N"] - 1)


def round_call(
    target: Target, cache: TargetCache, session: DFlashSession, drafter: DFlashDrafter
) -> Call:
    """Draft, build, verify, walk, and the target's commit, taken back at the end."""
    context, start = Context(cache, None, [0], drafter.layer_ids), cache.length

    def call() -> None:
        marginals = draft(session, 0, drafter.num_depths, BASE["N"] - 1)
        tree = build_tree(marginals, 0, BASE["N"] - 1)
        output = verify(target, context, tree)
        walked = walk(tree, output.logits, Greedy(), TextStopping(99, (), None), [0])
        commit(context, start, walked.path, output.features)
        cache.keep(start, ())

    return call


# The report


def markdown(result: dict[str, object]) -> str:
    lines = ["# How each stage's cost grows", ""]
    lines += ["Milliseconds per call, median (quartiles), and how many times the row above."]
    for found in result["tables"]:
        others = ", ".join(f"{name} = {value}" for name, value in found["others"].items())
        lines += ["", f"## {found['title']}, by {found['factor']}", "", f"At {others}.", ""]
        lines += sweep_table(found)
    lines += ["", *growth_report(result["context"]), "", "## Card", ""]
    lines += [f"- {key}: {value}" for key, value in result["card"].items()]
    return "\n".join(lines) + "\n"


def sweep_table(found: dict[str, object]) -> list[str]:
    rows = found["rows"]
    columns = list(rows[0]["ms"])
    head = [found["factor"], *itertools.chain.from_iterable((c, "x") for c in columns)]
    body, before = [], None
    for row in rows:
        cells = [f"{row['value']:,}"]
        for column in columns:
            ratio = row["ms"][column][1] / before["ms"][column][1] if before else None
            cells += [spread_text(row["ms"][column]), f"{ratio:.2f}" if ratio else ""]
        body.append(cells)
        before = row
    return table(head, body)


def growth_report(found: dict[str, object]) -> list[str]:
    rows, shape = found["rows"], found["shape"]
    lines = ["## Context of 4,000 tokens against 200", ""]
    lines += [
        f"{shape['layers']} layers, V = {shape['V']:,}, {found['num_rows']} rows. Attention is "
        "timed alone, all layers, on the same keys and values. A round is draft, build, verify, "
        "walk and commit of the target. Memory is that of keys and values.",
        "",
    ]
    stages = list(rows[0]["ms"])
    body = []
    for row in rows:
        held = [f"{size / 2**20:.1f}" for size in row["kv_bytes"].values()]
        spreads = [spread_text(row["ms"][stage]) for stage in stages]
        body.append([f"{row['context']:,}", *spreads, *held])
    lines += table(["T", *stages, "target MiB", "drafter MiB"], body)
    low, median, high = found["explained"]
    grown = {stage: spread_text(ms) for stage, ms in found["growth_ms"].items()}
    lines += [
        "",
        f"Verify grows by {grown['verify']} ms, attention alone by {grown['attention']} ms: "
        f"{median:.2f} ({low:.2f}-{high:.2f}) of it.",
    ]
    return lines


def spread_text(spread: Spread) -> str:
    """Median (quartiles), all with the median's three digits.

    >>> spread_text((1.234, 1.25, 13.0))
    '1.25 (1.23-13.00)'
    """
    low, median, high = spread
    digits = max(0, 2 - math.floor(math.log10(abs(median)))) if median else 0
    return f"{median:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


if __name__ == "__main__":
    main()
