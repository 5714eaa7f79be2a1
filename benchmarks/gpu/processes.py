"""A section in a process of its own, so that a crash or a hang ends nothing else.

A spawned process imports this module but not `__main__`: what is sent there must not live in it.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from gpu.section import Report, Send, Setup


@dataclass(frozen=True, kw_only=True)
class Job:
    """A section about to run.

    Args:
        name: of the section.
        run: its work.
        setup: where and how large.
        deadline: on `time.monotonic`, when to stop between cases.
    """

    name: str
    run: Callable[[Setup, Report], None]
    setup: Setup
    deadline: float


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


def run_apart(job: Job, end: float, method: str, take: Send) -> None:
    """A section in its own process, ended at `end` where it does not end itself."""
    context = multiprocessing.get_context(method)
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(job, sending))
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
        take(("failure", {"case": job.name, "traceback": "ended from outside: past its time"}))
    elif process.exitcode:
        ended = f"its process ended with exit code {process.exitcode}"
        take(("failure", {"case": job.name, "traceback": ended}))


def _child(job: Job, sending: Connection) -> None:
    run_here(job, sending.send)
    sending.close()


def run_here(job: Job, send: Send) -> None:
    """A section in this process."""
    report = Report(send, job.deadline)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    with report.case(job.name), torch.inference_mode():
        job.run(job.setup, report)
