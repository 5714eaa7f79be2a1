"""Times of one target's shape: verify, drafter, what lies around them, the loop, CUDA graphs."""

from __future__ import annotations

from dataclasses import fields
from functools import partial

import torch
from costs import Call

from ddtree.attention.backends import BACKENDS, GROUPED, SPLIT
from ddtree.cache.hf import TargetCache
from ddtree.config import DecodeConfig
from ddtree.models.drafter import DFlashDrafter, top_marginals
from ddtree.models.target import Target
from ddtree.pair import Pair
from ddtree.sampling.rule import rule_for
from ddtree.stopping import TextStopping
from ddtree.types import Generation, StageSeconds
from ddtree.walk import walk
from gpu.models import (
    ScriptedDrafter,
    filled_cache,
    random_drafter,
    random_tree,
    sized_target,
    uploaded,
)
from gpu.section import Json, Report, Setup
from gpu.timing import busy_s, graphed, spreads


def measure(name: str, setup: Setup, report: Report) -> None:
    """Everything about one target's shape; CUDA graphs last, since a failed capture can linger."""
    target = sized_target(name, setup, report)
    drafter = random_drafter(target, block_size=16, num_layers=5)
    for table_of in (time_verify, time_drafter, time_around, time_loop, time_graphs):
        if not report.late(table_of.__name__):
            with report.case(table_of.__name__):
                table_of(target, drafter, setup, report)
    if setup.on_cuda:
        peak = torch.cuda.max_memory_allocated() / 2**30
        report.note(f"Most memory allocated: {peak:.1f} GiB.")


def forward_call(
    target: Target, drafter: DFlashDrafter, cache: TargetCache, num_rows: int, backend: str
) -> Call:
    """A verify forward with the drafter's features, from inputs on the device; leaves no trace."""
    start = cache.length
    ids, depths, ancestors = uploaded(random_tree(num_rows, target.vocab_size), target.device)
    depths = depths.to(torch.int64)

    def call() -> None:
        target.config._attn_implementation = backend
        target.verify(ids, depths, ancestors, cache, capture=drafter.layer_ids)
        cache.keep(start, ())

    return call


def time_verify(target: Target, drafter: DFlashDrafter, setup: Setup, report: Report) -> None:
    """By rows, context and attention backend."""
    for length in setup.contexts:
        cache = filled_cache(target, length, max(setup.rows))
        for num_rows in setup.rows:
            what = f"verify, T = {length}, N = {num_rows}"
            if report.late(what):
                continue
            calls = {b: forward_call(target, drafter, cache, num_rows, b) for b in BACKENDS}
            report.row("Verify, ms", T=length, N=num_rows, **spreads(calls, setup, report, what))
    target.config._attn_implementation = GROUPED


def time_drafter(target: Target, drafter: DFlashDrafter, setup: Setup, report: Report) -> None:
    """The pass with its head and top-k, and these two alone."""
    width = len(drafter.layer_ids) * target.hidden_size
    hidden = torch.randn(15, target.hidden_size, dtype=target.dtype, device=target.device)
    logits = drafter.logits(hidden)
    calls: dict[str, Call] = {"head alone": lambda: drafter.logits(hidden)}
    for num_ranks in (16, 256):
        calls[f"top-{num_ranks} alone"] = partial(top_marginals, logits, num_ranks)
    for length in setup.contexts:
        session = drafter.start(length)
        features = torch.randn(length, width, dtype=target.dtype, device=target.device)
        session.extend(features, torch.zeros(length, dtype=torch.int64, device=target.device))
        ranks = {"num_depths": drafter.num_depths, "num_ranks": 64}
        calls[f"pass, T = {length}, K = 64"] = partial(session.propose, 0, **ranks)
    for name, ms in spreads(calls, setup, report, "drafter").items():
        report.row("Drafter of block 16 and 5 layers", what=name, ms=ms)


def time_around(target: Target, drafter: DFlashDrafter, setup: Setup, report: Report) -> None:
    """What a round does around its forwards: inputs to the device, walk, keys and values kept."""
    length, num_rows = setup.contexts[-1], 4 if setup.small else 65
    tree = random_tree(num_rows, target.vocab_size)
    cache = filled_cache(target, length, num_rows)
    forward_call(target, drafter, cache, num_rows, GROUPED)()  # the rows are there
    logits = torch.randn(num_rows, target.vocab_size, dtype=target.dtype, device=target.device)
    sampled = rule_for(DecodeConfig(temperature=0.8, seed=1))

    def keep(rows: tuple[int, ...]) -> None:
        for store in cache.stores:
            store.length = length + num_rows
        cache.keep(length, rows)

    calls: dict[str, Call] = {
        "inputs to the device": lambda: uploaded(tree, target.device),
        "walk, greedy": lambda: walk(
            tree, logits, rule_for(DecodeConfig()), TextStopping(99, (), None), [0]
        ),
        "walk, sampled": lambda: walk(tree, logits, sampled, TextStopping(99, (), None), [0]),
        "keep, chain": lambda: keep((0, 1, 2)),
        "keep, scattered": lambda: keep((0, 2, 3)),
    }
    for name, ms in spreads(calls, setup, report, "around").items():
        report.row(f"Around the forwards, N = {num_rows}, T = {length}", what=name, ms=ms)


def time_loop(target: Target, drafter: DFlashDrafter, setup: Setup, report: Report) -> None:
    """The whole loop per round: by stage, and how long the device had nothing to do."""
    num_new = 6 if setup.small else 48
    prompt = [(7919 * i) % target.vocab_size for i in range(setup.contexts[0])]
    pair = Pair(target, drafter)
    plain = pair.generate(prompt, method="ar", max_new_tokens=num_new, ignore_eos=True)
    script = torch.tensor([*prompt, *plain.token_ids], device=target.device)
    knowing = Pair(target, ScriptedDrafter(script, target.vocab_size))
    arms: dict[str, tuple[Pair, str, int]] = {
        "ar": (pair, "ar", 0),
        "dflash, random": (pair, "dflash", 15),
        "ddtree, random": (pair, "ddtree", 64),
        "ddtree, knowing": (knowing, "ddtree", 64),
    }
    for name, (by, method, budget) in arms.items():
        if report.late(f"loop, {name}"):
            continue
        options = {"method": method, "budget": budget, "ignore_eos": True}
        run = partial(by.generate, prompt, **options, max_new_tokens=num_new)
        with report.case(f"loop, {name}"):
            run()
            generation = run()
            shown = loop_row(generation, plain)
            with report.case(f"loop, {name}, profiled"):
                if (busy := busy_s(run, setup)) is not None:
                    shown["device busy"] = f"{busy / generation.elapsed_s:.2f} of the wall"
            report.row(f"Loop behind {len(prompt)} tokens, ms per round", arm=name, **shown)


def loop_row(generation: Generation, plain: Generation) -> Json:
    """Per round: wall without prefill, stages, and what no stage accounts for."""
    rounds = max(1, generation.num_rounds)
    wall = generation.elapsed_s - generation.seconds.prefill
    stages = [part.name for part in fields(StageSeconds) if part.name != "prefill"]
    spent = {stage: getattr(generation.seconds, stage) for stage in stages}
    same = [a == b for a, b in zip(generation.token_ids, plain.token_ids, strict=True)]
    outside = 1.0 - (spent["draft"] + spent["verify"]) / wall
    return {
        "rounds": generation.num_rounds,
        "tau": f"{generation.acceptance_length:.2f}",
        "wall": f"{1e3 * wall / rounds:.2f}",
        **{stage: f"{1e3 * seconds / rounds:.2f}" for stage, seconds in spent.items()},
        "other": f"{1e3 * (wall - sum(spent.values())) / rounds:.2f}",
        "outside draft and verify": f"{outside:.2f} of the wall",
        "as ar up to": "the end" if all(same) else f"token {same.index(False)}",
    }


def time_graphs(target: Target, drafter: DFlashDrafter, setup: Setup, report: Report) -> None:
    """Verify as a CUDA graph beside itself: the difference is what the host costs."""
    if not setup.on_cuda:
        report.note("No CUDA graphs on this device.")
        return
    # All before the first capture: one that fails can break what draws random numbers.
    caches = {length: filled_cache(target, length, max(setup.rows)) for length in setup.contexts}
    for length, cache in caches.items():
        for num_rows in setup.rows[::2]:
            what = f"graph, T = {length}, N = {num_rows}"
            if report.late(what):
                continue
            calls = {}
            for backend in (GROUPED, SPLIT):
                with report.case(f"{what}, {backend}"):
                    calls[backend] = forward_call(target, drafter, cache, num_rows, backend)
                    calls[f"{backend}, graph"] = graphed(calls[backend])
            found = spreads(calls, setup, report, what)
            report.row("Verify as a CUDA graph, ms", T=length, N=num_rows, **found)
