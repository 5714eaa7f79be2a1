"""Trees in a serving engine: attention over a paged cache, and a round's end, right and how fast.

Triton's kernel needs CUDA. What it is held against runs anywhere: `paged_tree_attention`, which
gathers each request's keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np
import torch
from costs import Call
from torch import Tensor

from ddtree.serving.device_steps import WalkedRows, move_rows, path_order, walk_rows
from ddtree.serving.paged_attention import CacheLayout, paged_tree_attention
from ddtree.serving.step import ancestor_words, walk_tree
from ddtree.serving.tree_rows import TreeRows
from ddtree.serving.triton_attention import (
    Bounds,
    Tiling,
    choose_tiling,
    paged_tree_attention_triton,
)
from ddtree.tree.geometry import ancestor_mask
from ddtree.types import DraftTree
from gpu.models import SHAPES, random_tree
from gpu.section import Report, Setup
from gpu.timing import graphed, spreads

BLOCK_SIZE = 16
# Error over the largest number, of our kernel against float64.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
TILINGS = (
    Tiling(rows=64, keys=32, splits=1, num_warps=4, num_stages=2),
    Tiling(rows=64, keys=32, splits=1, num_warps=4, num_stages=4),
    Tiling(rows=64, keys=64, splits=1, num_warps=4, num_stages=2),
    Tiling(rows=64, keys=64, splits=1, num_warps=4, num_stages=3),
    Tiling(rows=32, keys=64, splits=1, num_warps=4, num_stages=2),
    Tiling(rows=128, keys=64, splits=1, num_warps=8, num_stages=2),
    Tiling(rows=128, keys=64, splits=1, num_warps=8, num_stages=3),
)


@dataclass(frozen=True)
class Heads:
    """Of a layer."""

    num: int
    num_kv: int
    width: int


@dataclass(frozen=True)
class Inputs:
    """A step of tree requests in one layer; the cache as vLLM's, keys beside values."""

    query: Tensor
    key: Tensor
    value: Tensor
    kv_cache: Tensor  # [Z, KVH, C, 2 * D]
    trees: TreeRows
    masks: tuple[Tensor, ...]

    @property
    def scale(self) -> float:
        """As in every model here."""
        return float(self.query.shape[2] ** -0.5)

    @property
    def caches(self) -> tuple[Tensor, Tensor]:
        """Keys and values, [Z, KVH, C, D]."""
        keys, values = self.kv_cache.split(self.query.shape[2], dim=-1)
        return keys, values


def shapes_of_heads(setup: Setup) -> dict[str, Heads]:
    """By the names of the models that have them."""
    if setup.small:
        return {"small": Heads(4, 2, 16)}
    names: dict[Heads, list[str]] = {}
    for name, (_, sizes) in SHAPES.items():
        heads = Heads(
            *(sizes[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        )
        names.setdefault(heads, []).append(name)
    return {", ".join(models): heads for heads, models in names.items()}


def drawn(
    heads: Heads,
    num_rows: Sequence[int],
    context_lens: Sequence[int],
    dtype: torch.dtype,
    device: str,
) -> Inputs:
    """Random numbers, random trees, and blocks in no order."""
    most_blocks = max(1, *(-(-length // BLOCK_SIZE) for length in context_lens))
    num_blocks = len(num_rows) * most_blocks + 1
    joint = torch.randn(
        sum(num_rows), heads.num + 2 * heads.num_kv, heads.width, dtype=dtype, device=device
    )
    query, key, value = joint.split((heads.num, heads.num_kv, heads.num_kv), dim=1)
    shape = (num_blocks, heads.num_kv, BLOCK_SIZE, 2 * heads.width)
    tables = torch.randperm(num_blocks, device=device)[: len(num_rows) * most_blocks]
    masks = [ancestor_mask(random_tree(count, 1000)) for count in num_rows]
    num_words = -(-max(num_rows) // 64)

    def on_device(values: object, kind: torch.dtype) -> Tensor:
        return torch.as_tensor(values, dtype=kind, device=device)

    trees = TreeRows(
        row_starts=on_device(np.cumsum([0, *num_rows[:-1]]), torch.int32),
        num_rows=on_device(num_rows, torch.int32),
        context_lens=on_device(context_lens, torch.int32),
        block_tables=tables.view(len(num_rows), -1).to(torch.int32),
        ancestor_words=on_device(
            np.concatenate([ancestor_words(mask, num_words) for mask in masks]), torch.int64
        ),
        max_rows=max(num_rows),
        max_context_len=max(context_lens),
    )
    kv_cache = torch.randn(shape, dtype=dtype, device=device)
    on_devices = tuple(on_device(mask, torch.bool) for mask in masks)
    return Inputs(query, key, value, kv_cache, trees, on_devices)


def by_gathering(inputs: Inputs, dtype: torch.dtype | None = None) -> Tensor:
    """The readable twin's answer, in another dtype if one is given."""
    query, key, value = (t.to(dtype) for t in (inputs.query, inputs.key, inputs.value))
    out = torch.empty_like(query)
    caches = (cache.to(dtype) for cache in inputs.caches)
    paged_tree_attention(
        query, key, value, *caches, inputs.trees, inputs.scale, out, CacheLayout.TOKENS
    )
    return out


def by_triton(inputs: Inputs, tiling: Tiling | None = None, out: Tensor | None = None) -> Tensor:
    out = torch.empty_like(inputs.query) if out is None else out
    caches = (cache.transpose(1, 2) for cache in inputs.caches)
    paged_tree_attention_triton(
        inputs.query, inputs.key, inputs.value, *caches, inputs.trees, inputs.scale, out, tiling
    )
    return out


# Is it right? -------------------------------------------------------------------------------------


def check(setup: Setup, report: Report) -> None:
    """Attention against float64, its launch as a CUDA graph, and a round's end against the host."""
    cases = {
        "one, no context": ((17,), (0,)),
        "several": ((5, 17, 1, 65), (33, 0, 16, 700)),
        "many rows": ((257, 130), (40, 1000)),
    }
    heads_of_all = [Heads(4, 2, 16)] if setup.small else [Heads(32, 8, 128), Heads(14, 2, 80)]
    for (name, (num_rows, lengths)), heads, dtype in product(
        cases.items(), heads_of_all, TOLERANCES
    ):
        if not report.late(f"{name}, {dtype}"):
            with report.case(f"{name}, {heads}, {dtype}"):
                inputs = drawn(heads, num_rows, lengths, dtype, setup.device)
                same_attention(name, inputs, setup, report)
    if setup.on_cuda:
        with report.case("CUDA graph of attention"):
            same_in_graph(setup, report)
    else:
        report.note("Triton's kernel needs CUDA; its interpreter is for tests/unit/serving.")
    with report.case("a round's end"):
        same_end(setup, report)


def same_attention(name: str, inputs: Inputs, setup: Setup, report: Report) -> None:
    expected = by_gathering(inputs, torch.float64)
    ways: dict[str, Callable[[], Tensor]] = {"gathered": lambda: by_gathering(inputs)}
    if setup.on_cuda:
        ways["triton"] = lambda: by_triton(inputs)
        for splits in (1, 8):
            tiling = replace(choose_tiling(bounds_of(inputs), 132), splits=splits)
            ways[f"triton, {splits} shares"] = partial(by_triton, inputs, tiling)
    dtype = inputs.query.dtype
    errors = {
        way: float((call() - expected).abs().max() / expected.abs().max())
        for way, call in ways.items()
    }
    report.check(
        "Paged attention of trees: error over the largest number",
        all(error <= TOLERANCES[dtype] for error in errors.values()),
        trees=name,
        heads=f"{inputs.query.shape[1]} of {inputs.key.shape[1]} x {inputs.query.shape[2]}",
        dtype=str(dtype).removeprefix("torch."),
        **{way: f"{error:.1e}" for way, error in errors.items()},
        tolerance=TOLERANCES[dtype],
    )


def bounds_of(inputs: Inputs) -> Bounds:
    return Bounds(
        num_requests=len(inputs.trees.num_rows),
        num_heads=inputs.query.shape[1],
        num_kv_heads=inputs.key.shape[1],
        head_dim=inputs.query.shape[2],
        element_bytes=inputs.query.element_size(),
        max_rows=inputs.trees.max_rows,
        max_context_len=inputs.trees.max_context_len,
    )


def same_in_graph(setup: Setup, report: Report) -> None:
    """A captured launch is right for trees, contexts and blocks it was not captured with."""
    heads = Heads(32, 8, 128)
    inputs = drawn(heads, (65,) * 4, (2000,) * 4, torch.bfloat16, setup.device)
    out = torch.zeros_like(inputs.query)
    by_triton(inputs, out=out)  # compiled before
    torch.cuda.set_sync_debug_mode("error")
    try:
        by_triton(inputs, out=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    report.note("A launch makes the host wait nowhere.")
    replay = graphed(lambda: by_triton(inputs, out=out))
    fresh = drawn(heads, (65,) * 4, (7, 2000, 0, 513), torch.bfloat16, setup.device)
    tensors = ("context_lens", "block_tables", "ancestor_words")
    # Fewer blocks are named where contexts are shorter; here the longest is as long.
    for field in tensors:
        getattr(inputs.trees, field).copy_(getattr(fresh.trees, field))
    replay()
    setup.wait()
    expected = by_gathering(inputs, torch.float64)
    error = float((out - expected).abs().max() / expected.abs().max())
    report.check(
        "Paged attention of trees: error over the largest number",
        error <= TOLERANCES[torch.bfloat16],
        trees="replayed CUDA graph",
        triton=f"{error:.1e}",
        tolerance=TOLERANCES[torch.bfloat16],
    )


def same_end(setup: Setup, report: Report) -> None:
    """The walk on the device goes where the host's does."""
    trees = [tree_of_ranks(count) for count in (1, 5, 17, 65)]
    end = RoundsEnd(trees, setup.device)
    walked = end.walk()
    starts = np.cumsum([0, *(tree.num_rows for tree in trees)]).tolist()
    chosen = [end.chosen[i, : tree.num_rows].tolist() for i, tree in enumerate(trees)]
    differing = 0
    order = end.order().tolist()
    for i, tree in enumerate(trees):
        walk = walk_tree(tree, chosen[i])
        said = walked.token_ids[i].tolist()
        path = [starts[i] + node for node in (0, *walk.path)]
        same = said[: len(walk.token_ids)] == list(walk.token_ids)
        differing += not (same and order[starts[i] : starts[i] + len(path)] == path)
    report.check("A round's end on the device", differing == 0, trees=len(trees))


# How fast? ----------------------------------------------------------------------------------------


def measure(setup: Setup, report: Report) -> None:
    """Attention of one layer by shape, requests, context and rows; tilings; a round's end."""
    for name, heads in shapes_of_heads(setup).items():
        requests = (1, 2) if setup.small else (1, 8, 32)
        rows = setup.rows[-1:] if setup.small else (1, 17, 65, 129)
        for num_requests, length, count in product(requests, setup.contexts, rows):
            what = f"{name}, R = {num_requests}, T = {length}, N = {count}"
            if report.late(what):
                continue
            with report.case(what):
                sizes = [count] * num_requests, [length] * num_requests
                inputs = drawn(heads, *sizes, torch.bfloat16, setup.device)
                found = spreads(attention_calls(inputs, setup), setup, report, what)
                shown = {"R": num_requests, "T": length, "N": count, **found}
                if (fastest := found.get("triton, graph")) is not None:
                    read = inputs.kv_cache.nbytes / (fastest[1] / 1e3)
                    shown["cache read"] = f"{read / 1e9:.0f} GB/s"
                report.row(f"Paged attention of trees, {name}, ms", **shown)
        if setup.on_cuda and not report.late(f"tilings, {name}"):
            with report.case(f"tilings, {name}"):
                time_tilings(name, heads, setup, report)
    for num_requests in (1, 2) if setup.small else (1, 8, 32):
        what = f"a round's end, R = {num_requests}"
        if not report.late(what):
            with report.case(what):
                end = RoundsEnd([tree_of_ranks(65)] * num_requests, setup.device)
                found = spreads(end.calls(setup), setup, report, what)
                report.row("A round's end on the device, N = 65, ms", R=num_requests, **found)


def attention_calls(inputs: Inputs, setup: Setup) -> dict[str, Call]:
    """Ours, beside dense attention of the same rows whose keys need no gathering."""
    calls: dict[str, Call] = {"dense, masked": partial(torch_attention, *dense_inputs(inputs))}
    if setup.on_cuda:
        out = torch.empty_like(inputs.query)
        calls["triton"] = lambda: by_triton(inputs, out=out)
        calls["triton, graph"] = graphed(calls["triton"])
        whole = replace(choose_tiling(bounds_of(inputs), 132), splits=1)
        calls["triton, not split, graph"] = graphed(lambda: by_triton(inputs, whole, out))
    return calls


def torch_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, enable_gqa=True
    )


def dense_inputs(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[R, H, N, D], [R, KVH, T + N, D] twice, and [R, 1, N, T + N]; all requests are alike."""
    trees, device = inputs.trees, inputs.query.device
    num_requests, count, length = len(trees.num_rows), trees.max_rows, trees.max_context_len
    blocks = trees.block_tables.long()
    rows = (
        t.unflatten(0, (num_requests, count)).transpose(1, 2)
        for t in (inputs.query, inputs.key, inputs.value)
    )
    query, *own = rows
    context = (
        cache[blocks].transpose(1, 2).flatten(2, 3)[:, :, :length] for cache in inputs.caches
    )
    key, value = (torch.cat(pair, dim=2) for pair in zip(context, own, strict=True))
    seen = torch.ones(num_requests, count, length, dtype=torch.bool, device=device)
    mask = torch.cat([seen, torch.stack(inputs.masks)], dim=2)
    return query.contiguous(), key, value, mask[:, None]


def time_tilings(name: str, heads: Heads, setup: Setup, report: Report) -> None:
    """Other ways to cut the work: for whoever wants to change `choose_tiling`."""
    for num_requests, splits in ((1, (1, 4, 8, 16)), (8, (1, 2, 4))):
        sizes = [65] * num_requests, [setup.contexts[-1]] * num_requests
        inputs = drawn(heads, *sizes, torch.bfloat16, setup.device)
        out = torch.empty_like(inputs.query)
        chosen = replace(choose_tiling(bounds_of(inputs), 132), splits=1)
        calls = {}
        for tiling, cut in product((chosen, *TILINGS), splits):
            label = (
                f"{tiling.rows} rows, {tiling.keys} keys, {tiling.num_warps} warps,"
                f" {tiling.num_stages} stages, {cut} shares"
            )
            with report.case(label):  # one that does not fit is left out
                calls[label] = graphed(partial(by_triton, inputs, replace(tiling, splits=cut), out))
        for label, ms in spreads(calls, setup, report, "tilings").items():
            report.row(
                f"Tilings, {name}, R = {num_requests}, N = 65, T = {setup.contexts[-1]}, ms",
                tiling=label,
                ms=ms,
            )


def tree_of_ranks(num_rows: int) -> DraftTree:
    """Of few tokens, so that random choices are in it, and siblings still differ."""
    tree = random_tree(num_rows, 1000)
    return replace(tree, token_ids=tree.ranks.astype(np.int64))


class RoundsEnd:
    """From the target's choices to keys moved and rows in order, for some trees.

    Args:
        trees: of each request.
        device: where it all is.
    """

    def __init__(self, trees: Sequence[DraftTree], device: str) -> None:
        width = max(tree.num_rows for tree in trees)

        def padded(rows: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:
            filled = np.zeros((len(rows), width), np.int64)
            for i, row in enumerate(rows):
                filled[i, : len(row)] = row
            return torch.as_tensor(filled, dtype=dtype, device=device)

        counts = [tree.num_rows for tree in trees]
        self.token_ids = padded([tree.token_ids for tree in trees], torch.int64)
        self.parents = padded([tree.parents for tree in trees], torch.int32)
        self.num_rows = torch.tensor(counts, dtype=torch.int32, device=device)
        self.starts = torch.tensor(np.cumsum([0, *counts[:-1]]), dtype=torch.int32, device=device)
        self.total = sum(counts)
        self.chosen = torch.randint(0, 3, self.token_ids.shape, device=device)
        num_blocks = -(-self.total // BLOCK_SIZE)
        shape = (num_blocks, BLOCK_SIZE, 8, 256)  # a layer's keys and values
        self.cache = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        self.walked = self.walk()

    def walk(self) -> WalkedRows:
        """Down every tree."""
        return walk_rows(self.chosen, self.token_ids, self.parents, self.num_rows, max_depth=15)

    def order(self) -> Tensor:
        """Of all rows."""
        walked = self.walked
        return path_order(walked.path, walked.num_accepted, self.starts, self.num_rows, self.total)

    def move(self) -> None:
        """Keys and values of one layer, up to 15 rows a request."""
        path = self.walked.path[:, 1:16]
        steps = torch.arange(1, 1 + path.shape[1], device=path.device)
        valid = steps <= self.walked.num_accepted[:, None]
        sources = (self.starts[:, None] + path).long()
        targets = (self.starts[:, None] + steps).long()
        move_rows(self.cache, sources.flatten(), targets.flatten(), valid.flatten())

    def calls(self, setup: Setup) -> dict[str, Call]:
        """The three, and as CUDA graphs."""
        calls: dict[str, Call] = {
            "walk": self.walk,
            "order": self.order,
            "move, one layer": self.move,
        }
        if setup.on_cuda:
            calls |= {f"{name}, graph": graphed(call) for name, call in list(calls.items())}
        return calls
