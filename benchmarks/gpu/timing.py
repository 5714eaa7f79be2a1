"""Timers, and the machine's ceilings that all other times have to be read against."""

from __future__ import annotations

import random
from collections.abc import Mapping

import torch
from costs import Call, interleaved, spread_ms

from ddtree.provenance import origin
from ddtree.tree import host
from gpu.section import Report, Setup


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


def ceilings(setup: Setup, report: Report) -> None:
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
