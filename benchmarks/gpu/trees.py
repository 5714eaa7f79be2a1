"""The batched tree builder: node for node as the reference, and its times beside the host's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial

import numpy as np
import torch
from builders import random_marginals
from costs import Call
from torch import Tensor

from ddtree.tree import host, reference
from ddtree.tree.batched import BatchedTrees, build_trees, expand_ancestors
from ddtree.tree.geometry import ancestor_mask
from ddtree.types import DraftTree, Marginals
from gpu.models import uploaded
from gpu.section import Report, Setup
from gpu.timing import graphed, spreads

# How a drafter's log-probs can be: as usual, with exact ties, with banned tokens, with q = 1.
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "usual": lambda log_probs: log_probs,
    "ties": lambda log_probs: (2 * log_probs).round() / 2,
    "banned": lambda log_probs: log_probs.index_fill(
        1, torch.arange(log_probs.shape[1] // 3, log_probs.shape[1]), -torch.inf
    ),
    "certain": lambda log_probs: torch.cat(
        [torch.zeros_like(log_probs[:, :1]), torch.full_like(log_probs[:, 1:], -torch.inf)], dim=1
    ),
}


def check(setup: Setup, report: Report) -> None:
    """The batched builder node for node against the reference, hard marginals included."""
    sizes = [(1, 7, 16, 16), (3, 15, 64, 64), (8, 15, 16, 100), (2, 15, 256, 256)]
    for num_requests, num_depths, num_ranks, budget in sizes[:2] if setup.small else sizes:
        for kind in KINDS:
            size = f"{num_requests} x {num_depths} x {num_ranks}, B = {budget}"
            if report.late(f"{kind}, {size}"):
                continue
            with report.case(f"{kind}, {size}"):
                drawn = [draw(kind, num_depths, num_ranks) for _ in range(num_requests)]
                trees = build_trees(*stacked(drawn, setup), budget)
                differing = num_differing(trees, drawn, budget)
                shown = {"marginals": kind, "size": size, "differing": differing}
                report.check("Batched builder against the reference", differing == 0, **shown)
    if setup.on_cuda:
        with report.case("no synchronisation"):
            inputs = stacked([draw("usual", 15, 64)], setup)
            build_trees(*inputs, 64)
            torch.cuda.set_sync_debug_mode("error")
            try:
                build_trees(*inputs, 64)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            report.note("The batched builder makes the host wait nowhere.")
        with report.case("CUDA graph"):
            same_in_graph(setup, report)


def draw(kind: str, num_depths: int, num_ranks: int) -> Marginals:
    drawn = random_marginals(num_depths, num_ranks)
    return Marginals(KINDS[kind](drawn.log_probs), drawn.token_ids)


def stacked(drawn: list[Marginals], setup: Setup) -> tuple[Tensor, Tensor, Tensor]:
    """Marginals of R requests on the device, and their roots 0 to R - 1."""
    return (
        torch.stack([marginals.log_probs for marginals in drawn]).to(setup.device),
        torch.stack([marginals.token_ids for marginals in drawn]).to(setup.device),
        torch.arange(len(drawn), device=setup.device),
    )


def num_differing(trees: BatchedTrees, drawn: list[Marginals], budget: int) -> int:
    """Requests whose tree or ancestor mask is not the reference's."""
    masks = expand_ancestors(trees.ancestor_words).cpu().numpy()
    count = 0
    for request, marginals in enumerate(drawn):
        expected = reference.build_tree(marginals, request, budget)
        got, n = trees.tree(request), expected.num_rows
        same = all(
            np.array_equal(getattr(got, part.name), getattr(expected, part.name))
            for part in fields(DraftTree)
        )
        count += not (same and np.array_equal(masks[request, :n, :n], ancestor_mask(expected)))
    return count


def same_in_graph(setup: Setup, report: Report) -> None:
    """A captured builder gives the reference's trees for marginals it was not captured with."""
    inputs = stacked([draw("usual", 15, 64) for _ in range(4)], setup)
    captured = []
    replay = graphed(lambda: captured.append(build_trees(*inputs, 64)))
    drawn = [draw("ties", 15, 64) for _ in range(4)]
    for buffer, fresh in zip(inputs, stacked(drawn, setup), strict=True):
        buffer.copy_(fresh)
    replay()
    setup.wait()
    differing = num_differing(captured[-1], drawn, 64)
    shown = {"marginals": "ties", "size": "replayed CUDA graph", "differing": differing}
    report.check("Batched builder against the reference", differing == 0, **shown)


def measure(setup: Setup, report: Report) -> None:
    """From marginals on the device to ids, depths and mask there: on the host, and batched."""
    budgets = (16,) if setup.small else (16, 64, 256)
    for num_requests in (1, 8):
        for budget in budgets:
            what = f"R = {num_requests}, B = {budget}"
            if report.late(what):
                continue
            with report.case(what):
                drawn = [random_marginals(15, budget) for _ in range(num_requests)]
                inputs = stacked(drawn, setup)
                calls = tree_calls(inputs, budget, setup)
                if setup.on_cuda:
                    with report.case(f"{what}, graph"):
                        calls["batched, graph"] = graphed(calls["batched"])
                found = spreads(calls, setup, report, what)
                report.row("Tree with its mask, ms", R=num_requests, B=budget, **found)


def tree_calls(inputs: tuple[Tensor, Tensor, Tensor], budget: int, setup: Setup) -> dict[str, Call]:
    log_probs, token_ids, _ = inputs

    def on_host(build: Callable[[Marginals, int, int], DraftTree]) -> None:
        for request in range(len(log_probs)):
            tree = build(Marginals(log_probs[request], token_ids[request]), 0, budget)
            uploaded(tree, setup.device)

    def batched() -> None:
        expand_ancestors(build_trees(*inputs, budget).ancestor_words)

    return {
        "reference": partial(on_host, reference.build_tree),
        "host": partial(on_host, host.build_tree),
        "batched": batched,
    }
