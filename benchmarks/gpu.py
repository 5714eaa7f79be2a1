"""Check and time everything on a GPU in one call: the script for the day one is lent.

    PYTHONPATH=src python3 benchmarks/gpu.py --out DIR --minutes 9

Correctness first, in float32 with tiny random models: methods token for token, attention backends
against the CPU, the batched tree builder against the reference, noise by seed. Then times, in
bfloat16 with random weights in the shapes of Qwen3-4B, 8B and 30B-A3B. Needs no network.

Every section runs in a process of its own and has a share of the time: an exception is written
down with its traceback, a crash or a section that overruns costs the others nothing, and gpu.json
and gpu.md are whole after every section. Times are from synchronised clocks, after a warm-up,
interleaved: milliseconds, median (quartiles). `--device cpu --small` runs all of it in seconds.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from builders import random_marginals
from costs import Call, interleaved, spread_ms, spread_text
from speed import table
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from ddtree.attention.backends import BACKENDS, GROUPED, SPLIT
from ddtree.cache.hf import TargetCache
from ddtree.config import DecodeConfig
from ddtree.errors import UnsupportedModelError, first_line
from ddtree.models import target as target_module
from ddtree.models.drafter import DFlashDrafter, DFlashNetwork, top_marginals
from ddtree.models.drafter_config import parse_drafter_config
from ddtree.models.target import Target
from ddtree.pair import Pair
from ddtree.prefill import Context
from ddtree.provenance import origin
from ddtree.sampling.noise import gumbel_noise
from ddtree.sampling.rule import rule_for
from ddtree.stopping import TextStopping
from ddtree.train.journal import write_whole
from ddtree.tree import host, reference
from ddtree.tree.batched import build_trees, expand_ancestors
from ddtree.tree.geometry import ancestor_mask
from ddtree.types import METHODS, DraftTree, Generation, Marginals, StageSeconds
from ddtree.verify import verify
from ddtree.walk import walk

Json = dict[str, object]

# A section may overrun its share by so much before it is ended: it stops between cases by itself.
GRACE_S = 20.0
# Kept back for the last section's last case.
RESERVE_S = 15.0
WRITE_EVERY_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Where and how large.

    Args:
        device: of the models.
        small: tiny shapes and few repeats: does it run at all?
    """

    device: str
    small: bool

    @property
    def on_cuda(self) -> bool:
        """Whether there are graphs, a profiler of kernels, and something to wait for."""
        return self.device.startswith("cuda")

    @property
    def repeats(self) -> int:
        """Of every timed point."""
        return 2 if self.small else 11

    @property
    def contexts(self) -> tuple[int, ...]:
        """T of the verify forwards."""
        return (8, 24) if self.small else (200, 4000)

    @property
    def rows(self) -> tuple[int, ...]:
        """N of the verify forwards."""
        return (1, 4) if self.small else (1, 2, 4, 8, 16, 32, 64, 128, 256)

    def wait(self) -> None:
        """Until the device is done."""
        if self.on_cuda:
            torch.cuda.synchronize()


class Report:
    """What a section finds, told as it comes: what is told survives the section.

    Args:
        send: takes a kind of message and its content.
        deadline: on `time.monotonic`, when to stop between cases.
    """

    def __init__(self, send: Callable[[tuple[str, object]], None], deadline: float) -> None:
        self._send = send
        self._deadline = deadline

    def card(self, facts: Mapping[str, object]) -> None:
        """Facts about the whole run."""
        self._send(("card", dict(facts)))

    def note(self, text: str) -> None:
        """A sentence for the reader."""
        self._send(("note", text))

    def row(self, title: str, **facts: object) -> None:
        """A row of a table; three floats are low quartile, median and high quartile in ms."""
        self._send(("row", (title, facts)))

    def check(self, title: str, ok: bool, **facts: object) -> None:
        """A row that says whether something holds; one that does not fails the section."""
        self.row(title, **facts, ok=ok)

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """An exception inside is written down, and what follows the block goes on."""
        try:
            yield
        except Exception:  # noqa: BLE001, one broken case must not take the lease with it
            self._send(("failure", {"case": name, "traceback": traceback.format_exc()}))

    def late(self, what: str) -> bool:
        """Whether the section's time is over; then `what` is on record as left out."""
        if time.monotonic() < self._deadline:
            return False
        self._send(("skipped", what))
        return True


@dataclass
class Found:
    """A section's results so far, as JSON wants them."""

    status: str = "ok"
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    tables: dict[str, list[Json]] = field(default_factory=dict)
    failures: list[Json] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def take(self, kind: str, content: object) -> None:
        """Add one message of a `Report`, cards apart."""
        if kind == "row":
            title, facts = content
            self.tables.setdefault(title, []).append(facts)
        else:
            {"note": self.notes, "failure": self.failures, "skipped": self.skipped}[kind].append(
                content
            )

    def end(self, seconds: float) -> None:
        """Say how it went."""
        self.seconds = round(seconds, 1)
        unmet = any(row.get("ok") is False for rows in self.tables.values() for row in rows)
        if self.failures or unmet:
            self.status = "failed"
        elif self.skipped:
            self.status = "partial"


# Sections and their processes


@dataclass(frozen=True)
class Section:
    """A part of the run, by name.

    Args:
        run: the work.
        share: of the time, relative to the others; what one leaves goes to those after it.
    """

    run: Callable[[Setup, Report], None]
    share: float


def main() -> None:
    # Asking through NVML starts no CUDA in this process, and forked ones can.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    options = parsed()
    end = time.monotonic() + 60 * options.minutes
    last_deadline = end - min(RESERVE_S, 0.1 * 60 * options.minutes)
    setup = Setup(device=options.device, small=options.small)
    options.out.mkdir(parents=True, exist_ok=True)
    method = None if options.here else start_method(setup)
    processes = method or "none: sections share this one"
    card: Json = {"device": setup.device, "small": setup.small, "processes": processes}
    found: dict[str, Found] = {}

    def write() -> None:
        if options.commit:
            card["commit"] = options.commit
        result = {"card": card, "sections": {name: asdict(part) for name, part in found.items()}}
        write_whole(options.out / "gpu.json", json.dumps(result, indent=1) + "\n")
        write_whole(options.out / "gpu.md", markdown(card, found))

    chosen = {name: SECTIONS[name] for name in options.only or SECTIONS}
    shares = sum(section.share for section in chosen.values())
    for name, section in chosen.items():
        begin = time.monotonic()
        deadline = begin + (last_deadline - begin) * section.share / shares
        shares -= section.share
        part = found[name] = Found()
        take = taker(part, card, write)
        if method is None:
            run_section(name, setup, deadline, take)
        else:
            run_apart(name, setup, deadline, min(deadline + GRACE_S, end), method, take)
        part.end(time.monotonic() - begin)
        write()
        print(f"{name}: {part.status}, {part.seconds} s", file=sys.stderr, flush=True)
    print(markdown(card, found))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes, few repeats")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, help="these sections alone")
    parser.add_argument("--here", action="store_true", help="no processes: for a debugger")
    parser.add_argument("--commit", help="to write down where the copy has no .git")
    return parser.parse_args()


def taker(part: Found, card: Json, write: Callable[[], None]) -> Callable[[tuple], None]:
    """Takes a section's messages, and writes everything out now and then."""
    written = time.monotonic()

    def take(message: tuple) -> None:
        nonlocal written
        kind, content = message
        if kind == "card":
            card.update(content)
        else:
            part.take(kind, content)
        if time.monotonic() - written > WRITE_EVERY_S:
            write()
            written = time.monotonic()

    return take


def start_method(setup: Setup) -> str:
    """Forked processes need no imports, which saves a minute; not all drivers bear it."""
    probe = multiprocessing.get_context("fork").Process(target=_touch, args=(setup.device,))
    probe.start()
    probe.join(60)
    works = probe.exitcode == 0
    probe.kill()
    return "fork" if works else "spawn"


def _touch(device: str) -> None:
    torch.zeros(1, device=device).item()


def run_apart(
    name: str,
    setup: Setup,
    deadline: float,
    end: float,
    method: str,
    take: Callable[[tuple], None],
) -> None:
    """A section in its own process, ended where it does not end itself."""
    context = multiprocessing.get_context(method)
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(name, setup, deadline, sending))
    process.start()
    sending.close()  # else its end would never be seen here
    try:
        while receiving.poll(max(0.0, end - time.monotonic())):
            take(receiving.recv())
    except EOFError:
        process.join(10)
    late = process.is_alive()
    process.kill()
    process.join()
    if late:
        take(("failure", {"case": name, "traceback": "ended from outside: past its time"}))
    elif process.exitcode:
        ended = f"its process ended with exit code {process.exitcode}"
        take(("failure", {"case": name, "traceback": ended}))


def _child(name: str, setup: Setup, deadline: float, sending: Connection) -> None:
    run_section(name, setup, deadline, sending.send)
    sending.close()


def run_section(
    name: str, setup: Setup, deadline: float, send: Callable[[tuple[str, object]], None]
) -> None:
    """A section in this process."""
    report = Report(send, deadline)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    with report.case(name), torch.inference_mode():
        SECTIONS[name].run(setup, report)


def spreads(calls: Mapping[str, Call], setup: Setup, report: Report, what: str) -> dict:
    """Times of all calls, interleaved; one that fails is written down and left out."""
    working = {}
    for name, call in calls.items():
        with report.case(f"{what}, {name}"):
            call()
            setup.wait()
            working[name] = call
    spent = interleaved(working, setup.repeats, random.Random(0), wait=setup.wait)
    return {name: spread_ms(seconds) for name, seconds in spent.items()}


def graphed(call: Call) -> Call:
    """The same work as a CUDA graph's replay: what is left without the host."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def busy_s(call: Call, setup: Setup) -> float | None:
    """Seconds in which the device computed or copied; None off CUDA."""
    if not setup.on_cuda:
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        setup.wait()
    return sum(event.self_device_time_total for event in profile.key_averages()) / 1e6


# The machine


def machine(setup: Setup, report: Report) -> None:
    """What the card says, and the ceilings that the other numbers have to be read against."""
    report.card(origin())
    if setup.on_cuda:
        facts = torch.cuda.get_device_properties(setup.device)
        report.card(
            {
                "gpu": facts.name,
                "gpu memory GiB": round(facts.total_memory / 2**30, 1),
                "multiprocessors": facts.multi_processor_count,
                "cuda": torch.version.cuda,
            }
        )
    report.card({"tree builder on the host": host.describe()})
    size, side = (2**16, 64) if setup.small else (2**29, 8192)
    one = torch.zeros(1, device=setup.device)
    source = torch.zeros(size, dtype=torch.bfloat16, device=setup.device)
    goal = torch.empty_like(source)
    a = torch.randn(side, side, dtype=torch.bfloat16, device=setup.device)
    small_host = torch.zeros(64, dtype=torch.int64)
    calls: dict[str, Call] = {
        "a launch": lambda: one.add_(1),
        "a round trip": lambda: one.item(),
        "64 ids to the device": lambda: small_host.to(setup.device),
        "copy": lambda: goal.copy_(source),
        "bf16 product": lambda: a @ a,
    }
    found = spreads(calls, setup, report, "machine")
    work = {
        "copy": (4 * size / 1e9, "GB/s, read and written"),
        "bf16 product": (2 * side**3 / 1e12, "TFLOP/s"),
    }
    for name, ms in found.items():
        amount, unit = work.get(name, (0.0, ""))
        rate = f"{amount / (ms[1] / 1e3):.0f} {unit}" if amount else ""
        report.row("Ceilings", what=name, ms=ms, rate=rate)


# Correctness

_TINY: Json = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Large weights spread the logits, so that nothing hangs on a near tie.
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_WINDOW = {"use_sliding_window": True, "sliding_window": 9}
_MIXED = {**_WINDOW, "layer_types": ["full_attention", "sliding_attention"] * 2}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
# As wide as real heads are: the kernels of the GPU differ by width.
_WIDE = {"hidden_size": 256, "head_dim": 128, "initializer_range": 0.05}

ARCHITECTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_TINY),
    "llama-tied": lambda: LlamaConfig(**_TINY, tie_word_embeddings=True),
    "llama-biased": lambda: LlamaConfig(**_TINY, attention_bias=True, mlp_bias=True),
    "mistral": lambda: MistralConfig(**_TINY, sliding_window=None),
    "mistral-window": lambda: MistralConfig(**_TINY, sliding_window=9),
    "qwen2": lambda: Qwen2Config(**_TINY),
    "qwen2-mixed": lambda: Qwen2Config(**_TINY, **_MIXED),
    "qwen3": lambda: Qwen3Config(**_TINY, head_dim=12),
    "qwen3-tied": lambda: Qwen3Config(**_TINY, head_dim=12, tie_word_embeddings=True),
    "qwen3-wide": lambda: Qwen3Config(**{**_TINY, **_WIDE}),
    "qwen3_moe": lambda: Qwen3MoeConfig(**_TINY, **_EXPERTS, head_dim=12),
}


def architectures(setup: Setup) -> list[str]:
    few = ["qwen2-mixed", "qwen3-wide", "qwen3_moe"]
    return few if setup.small else list(ARCHITECTURES)


def tiny_model(architecture: str, report: Report) -> PreTrainedModel | None:
    """On the CPU in float32; None, with a note, where `Target` does not support it."""
    config = ARCHITECTURES[architecture]()
    if config.model_type not in target_module.SUPPORTED_MODEL_TYPES:
        report.note(f"{architecture}: not among the architectures that Target supports; left out.")
        return None
    torch.manual_seed(sorted(ARCHITECTURES).index(architecture))
    return AutoModelForCausalLM.from_config(config, attn_implementation=GROUPED).eval()


def tokens(setup: Setup, report: Report) -> None:
    """ar, dflash and ddtree say the same, greedy and sampled, with a random and a knowing drafter.

    Whether the CPU's ar says it too is reported only: rounding may differ.
    """
    for architecture in architectures(setup):
        for backend in (GROUPED, SPLIT):
            if report.late(f"{architecture}, {backend}"):
                continue
            with report.case(f"{architecture}, {backend}"):
                if (model := tiny_model(architecture, report)) is not None:
                    model.config._attn_implementation = backend
                    same_tokens(architecture, model, setup, report)


def same_tokens(name: str, model: PreTrainedModel, setup: Setup, report: Report) -> None:
    num_new = 5 if setup.small else 40
    prompt = [(7 * i) % 61 for i in range(12)]
    on_cpu = Pair(Target(model, None, name=name), None)
    target = Target(copy.deepcopy(model).to(setup.device), None, name=name)
    drafting = Pair(target, random_drafter(target, block_size=8, num_layers=2))
    for temperature in (0.0, 0.8):
        options = {"temperature": temperature, "seed": 7, "max_new_tokens": num_new}
        said = {
            method: drafting.generate(prompt, method=method, budget=16, **options)
            for method in METHODS
        }
        script = torch.tensor([*prompt, *said["ar"].token_ids], device=setup.device)
        knowing = Pair(target, ScriptedDrafter(script, target.vocab_size))
        said["knowing"] = knowing.generate(prompt, method="ddtree", budget=16, **options)
        there = on_cpu.generate(prompt, method="ar", **options)
        report.check(
            "Methods, token for token",
            len({generation.token_ids for generation in said.values()}) == 1,
            architecture=name,
            attention=target.backend,
            temperature=temperature,
            tokens=num_new,
            tau=f"{said['ddtree'].acceptance_length:.2f}",
            tau_knowing=f"{said['knowing'].acceptance_length:.2f}",
            cpu_agrees=there.token_ids == said["ar"].token_ids,
        )


@dataclass(frozen=True)
class ScriptedDrafter:
    """Knows the text, and hides each token at rank 0, 1 or 2 by its position.

    Args:
        script: [positions] the tokens, on the target's device.
        vocab_size: V.
    """

    script: Tensor
    vocab_size: int
    num_depths: int = 15
    layer_ids: tuple[int, ...] = (1,)

    def start(self, capacity: int) -> ScriptedSession:
        """A session that only counts."""
        return ScriptedSession(self)


@dataclass
class ScriptedSession:
    """Where the text stands."""

    drafter: ScriptedDrafter
    length: int = 0

    def extend(self, features: Tensor) -> None:
        """Count the committed positions."""
        self.length += features.shape[0]

    def propose(self, root_id: int, *, num_depths: int, num_ranks: int) -> Marginals:
        """Ranks are worth half of the one before; beyond the script everything is token 0."""
        script, vocab_size = self.drafter.script, self.drafter.vocab_size
        places = self.length + 1 + torch.arange(num_depths, device=script.device)
        known = script[places.clamp(max=script.shape[0] - 1)]
        ranks = torch.arange(min(num_ranks, vocab_size), device=script.device)
        log_probs = (0.6 * 0.5**ranks).log().expand(num_depths, -1).contiguous()
        shifted = known[:, None] + ranks - places[:, None] % 3
        return Marginals(log_probs.float(), shifted % vocab_size)


def backends(setup: Setup, report: Report) -> None:
    """Every attention backend's logits against the CPU's eager ones in float32."""
    for architecture in architectures(setup):
        if report.late(architecture):
            continue
        with report.case(architecture):
            if (model := tiny_model(architecture, report)) is None:
                continue
            # Only weights of a usual size say anything in bfloat16.
            wide = architecture == "qwen3-wide"
            for dtype in (torch.float32, torch.bfloat16) if wide else (torch.float32,):
                same_logits(architecture, model, dtype, setup, report)


def same_logits(
    name: str, model: PreTrainedModel, dtype: torch.dtype, setup: Setup, report: Report
) -> None:
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    tree = random_tree(17, 61)
    expected = logits_of(model, "eager", tree)
    there = copy.deepcopy(model).to(setup.device)
    for parameter in there.parameters():  # not the buffers: RoPE's frequencies stay exact
        parameter.data = parameter.data.to(dtype)
    errors = {}
    for backend in BACKENDS:
        with report.case(f"{name}, {backend}, {dtype}"):
            off = (logits_of(there, backend, tree) - expected).abs().max() / expected.abs().max()
            errors[backend] = float(off)
    report.check(
        "Logits of a tree of 17 rows behind 40 tokens: error over the largest logit",
        len(errors) == len(BACKENDS) and all(error <= tolerance for error in errors.values()),
        architecture=name,
        dtype=str(dtype).removeprefix("torch."),
        **{backend: f"{error:.1e}" for backend, error in errors.items()},
        tolerance=tolerance,
    )


def logits_of(model: PreTrainedModel, backend: str, tree: DraftTree) -> Tensor:
    """[1 + N, V] float32 on the CPU: of a prompt's last token and of a tree behind it."""
    model.config._attn_implementation = backend
    target = Target(model, None, name=backend)
    cache = target.new_cache(64)
    prompt = (torch.arange(40, device=target.device) * 7) % target.vocab_size
    first = target.prefill(prompt, cache).logits
    context = Context(cache, None, [0], ())
    return torch.cat([first, verify(target, context, tree).logits]).float().cpu()


def random_tree(num_rows: int, vocab_size: int) -> DraftTree:
    """Of a drafter of 15 depths, its tokens within the vocabulary."""
    tree = host.build_tree(random_marginals(15, max(1, num_rows - 1)), 0, num_rows - 1)
    return replace(tree, token_ids=tree.token_ids % vocab_size)


def builder(setup: Setup, report: Report) -> None:
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


def num_differing(trees: object, drawn: list[Marginals], budget: int) -> int:
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


def noise(setup: Setup, report: Report) -> None:
    """Whether noise by seed is the same on the device: as it is made, and were it made there."""
    vocab_size = 1000 if setup.small else 151936
    uniform = torch.arange(1, vocab_size + 1, dtype=torch.float32) / (vocab_size + 1)
    there = uniform.to(setup.device)
    pairs = {
        "gumbel_noise": (
            gumbel_noise(7, 100, vocab_size),
            gumbel_noise(7, 100, vocab_size, setup.device),
        ),
        "-log(-log1p(-u)) on the device": (
            -torch.log(-torch.log1p(-uniform)),
            -torch.log(-torch.log1p(-there)),
        ),
    }
    for name, (here, made) in pairs.items():
        off = (here - made.cpu()).abs()
        facts = {"differing": int((off > 0).sum()), "of": vocab_size, "most": f"{off.max():.1e}"}
        report.row("Noise, CPU against device", made=name, **facts)


# Times


def trees(setup: Setup, report: Report) -> None:
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
            for part in (tree.token_ids, tree.depths, ancestor_mask(tree)):
                torch.from_numpy(part.copy()).to(setup.device)

    def batched() -> None:
        expand_ancestors(build_trees(*inputs, budget).ancestor_words)

    return {
        "reference": partial(on_host, reference.build_tree),
        "host": partial(on_host, host.build_tree),
        "batched": batched,
    }


_QWEN = {
    "vocab_size": 151936,
    "num_attention_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
_DENSE = {**_QWEN, "num_key_value_heads": 8, "num_hidden_layers": 36}
_MOE = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 48,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
_SMALL = {
    "vocab_size": 1000,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
SHAPES: dict[str, tuple[type[PreTrainedConfig], Json]] = {
    "Qwen3-4B": (
        Qwen3Config,
        {**_DENSE, "hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    ),
    "Qwen3-8B": (Qwen3Config, {**_DENSE, "hidden_size": 4096, "intermediate_size": 12288}),
    "Qwen3-30B-A3B": (
        Qwen3MoeConfig,
        {**_QWEN, **_MOE, "hidden_size": 2048, "intermediate_size": 6144},
    ),
}


def model(name: str, setup: Setup, report: Report) -> None:
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


def sized_target(name: str, setup: Setup, report: Report) -> Target:
    """Random weights in bfloat16, made on the device."""
    kind, sizes = SHAPES[name]
    experts = {**_EXPERTS, "num_experts": 4} if kind is Qwen3MoeConfig else {}
    config = kind(**({**sizes, **_SMALL, **experts} if setup.small else sizes), eos_token_id=None)
    begin = time.perf_counter()
    with torch.device(setup.device):
        made = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=GROUPED
        )
    setup.wait()
    count = sum(parameter.numel() for parameter in made.parameters())
    seconds = time.perf_counter() - begin
    report.note(f"{count / 1e9:.2f} billion random parameters, made in {seconds:.1f} s.")
    if (experts_by := getattr(config, "_experts_implementation", None)) is not None:
        report.note(f"transformers runs the experts by {experts_by}.")
    try:
        return Target(made, None, name=name)
    except UnsupportedModelError as error:
        report.note(
            f"Target refuses it ({first_line(error)}): its check was lifted for these times, which "
            "are the model's own forward behind Target's mask and cache. Nothing vouches for the "
            "tokens. Random routers spread rows over more experts than trained ones may."
        )
        known = (*target_module.SUPPORTED_MODEL_TYPES, config.model_type)
        with mock.patch.object(target_module, "SUPPORTED_MODEL_TYPES", known):
            return Target(made, None, name=name)


def random_drafter(target: Target, *, block_size: int, num_layers: int) -> DFlashDrafter:
    """A DFlash of the target's width and heads with random weights, made where the target is."""
    config = target.config
    raw = {
        "architectures": ["DFlashDraftModel"],
        "block_size": block_size,
        "dflash_config": {"mask_token_id": min(151669, target.vocab_size - 1)},
        "num_target_layers": max(5, target.num_layers),
        "num_hidden_layers": num_layers,
        "head_dim": getattr(config, "head_dim", None) or 8,
        "rope_theta": 1e6,
        "max_position_embeddings": target.context_limit,
    }
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    raw.update({name: getattr(config, name) for name in sizes})
    if target.num_layers < 8:  # the rule that spreads five taps would name layers twice
        raw["dflash_config"]["target_layer_ids"] = [0, 2]
    before = torch.get_default_dtype()
    torch.set_default_dtype(target.dtype)
    try:
        with torch.device(target.device):
            network = DFlashNetwork(parse_drafter_config(raw, "gpu.py"))
    finally:
        torch.set_default_dtype(before)
    return DFlashDrafter(network, target, name="random")


def filled_cache(target: Target, context_length: int, room: int) -> TargetCache:
    """A cache that holds so many random positions."""
    cache, config = target.new_cache(context_length + room), target.config
    shape = (1, config.num_key_value_heads, context_length, config.head_dim)
    for store in cache.stores:
        keys, values = torch.randn(2, *shape, dtype=target.dtype, device=target.device)
        store.append(keys, values)
    return cache


def forward_call(
    target: Target, drafter: DFlashDrafter, cache: TargetCache, num_rows: int, backend: str
) -> Call:
    """A verify forward with the drafter's features, from inputs on the device; leaves no trace."""
    tree, start = random_tree(num_rows, target.vocab_size), cache.length
    ids = torch.from_numpy(tree.token_ids.copy()).to(target.device)
    depths = torch.from_numpy(tree.depths.copy()).to(target.device, torch.int64)
    ancestors = torch.from_numpy(ancestor_mask(tree)).to(target.device)

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
        session.extend(torch.randn(length, width, dtype=target.dtype, device=target.device))
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

    def inputs() -> None:
        for part in (tree.token_ids, tree.depths, ancestor_mask(tree)):
            torch.from_numpy(part.copy()).to(target.device)

    def keep(rows: tuple[int, ...]) -> None:
        for store in cache.stores:
            store.length = length + num_rows
        cache.keep(length, rows)

    calls: dict[str, Call] = {
        "inputs to the device": inputs,
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


SECTIONS: dict[str, Section] = {
    "machine": Section(machine, 2),
    "tokens": Section(tokens, 7),
    "backends": Section(backends, 4),
    "builder": Section(builder, 3),
    "noise": Section(noise, 1),
    "trees": Section(trees, 3),
    **{
        name: Section(partial(model, name), share)
        for name, share in zip(SHAPES, (9, 9, 14), strict=True)
    },
}


# The report


def markdown(card: Json, found: Mapping[str, Found]) -> str:
    lines = ["# On the device", "", "Milliseconds: median (quartiles).", ""]
    states = [[name, part.status, f"{part.seconds:.0f}"] for name, part in found.items()]
    lines += table(["section", "status", "s"], states)
    for name, part in found.items():
        lines += ["", f"## {name}: {part.status}"]
        lines += [line for text in dict.fromkeys(part.notes) for line in ("", text)]
        for title, rows in part.tables.items():
            columns = list(dict.fromkeys(column for row in rows for column in row))
            body = [[cell(row.get(column, "")) for column in columns] for row in rows]
            lines += ["", f"### {title}", "", *table(columns, body)]
        if part.skipped:
            lines += ["", "Left out, for want of time: " + "; ".join(part.skipped) + "."]
        for failure in part.failures:
            lines += ["", f"Failed: {failure['case']}", "", "```"]
            lines += [str(failure["traceback"]).rstrip(), "```"]
    lines += ["", "## Card", "", *(f"- {key}: {value}" for key, value in card.items())]
    return "\n".join(lines) + "\n"


def cell(value: object) -> str:
    """One cell of a table; three floats are a spread."""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return spread_text(value) if isinstance(value, list | tuple) else str(value)


if __name__ == "__main__":
    main()
