"""One stage in several processes, each of which does its part.

On a CPU, two processes of one thread decode more per second than one process of two: the matrices
of a step are small, and threads would wait for one another at every product. Knows no stage.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import TypeVar

from ddtree.errors import OptionError, UserError

Item = TypeVar("Item")
Work = Callable[[tuple[int, int]], Generator[Item, None, None]]
"""Does part i of n; its items are sent to the parent one by one, so they should be small."""

_GRACE_S = 20.0  # to write what is waiting; a worker that takes longer is killed


class WorkerError(UserError):
    """A worker process that ended before its part was done."""


def items_of(work: Work[Item], num_workers: int) -> Generator[Item, None, None]:
    """What the parts give: in this process where it is one worker, else `in_processes`."""
    items = work((0, 1)) if num_workers == 1 else in_processes(work, num_workers)
    with closing(items):
        yield from items


def check_workers(num_workers: int) -> None:
    """Refuse a stage without workers.

    Raises:
        OptionError: fewer than one.
    """
    if num_workers < 1:
        raise OptionError(
            "num_workers",
            expected="a whole number >= 1",
            got=num_workers,
            remedy="1 works in this very process.",
        )


def in_processes(work: Work[Item], num_workers: int) -> Generator[Item, None, None]:
    """The items of all parts, in the order in which they come.

    However it ends, no worker outlives it, nor the parent process. A worker that is stopped closes
    its generator first.

    Args:
        work: a function of a module, or a partial of one; sent to each worker.
        num_workers: n; each runs with its share of torch's threads.

    Raises:
        UserError: what a worker met.
        WorkerError: a worker that was killed, or failed by a bug (its traceback is on stderr).
    """
    running: dict[Connection, SpawnProcess] = {}
    workers: list[SpawnProcess] = []
    context = multiprocessing.get_context("spawn")
    try:
        for place in range(num_workers):
            receiver, sender = context.Pipe(duplex=False)
            worker = context.Process(target=_live, args=(work, (place, num_workers), sender))
            worker.daemon = True
            worker.start()
            # Ours must be closed, or the end of the worker would not show as the end of the pipe.
            sender.close()
            running[receiver] = worker
            workers.append(worker)
        yield from _received(running)
    finally:
        _stop(workers)


def _received(running: dict[Connection, SpawnProcess]) -> Iterator[Item]:
    while running:
        for receiver in connection.wait(list(running)):
            assert isinstance(receiver, Connection)
            try:
                item = receiver.recv()
            except (EOFError, OSError):
                raise _lost(running[receiver]) from None
            if isinstance(item, UserError):
                raise item
            if item is None:
                del running[receiver]
            else:
                yield item


def _lost(worker: SpawnProcess) -> WorkerError:
    worker.join(_GRACE_S)
    code = worker.exitcode or 0
    return WorkerError(
        "--num-workers",
        expected="workers that end when their part is done",
        got=f"one killed by signal {-code}" if code < 0 else f"one that ended with code {code}",
        remedy="Run the same command again: nothing is lost. If memory was short, use fewer "
        "workers or rows.",
    )


def _stop(workers: Sequence[SpawnProcess]) -> None:
    for worker in workers:
        worker.terminate()
    deadline = time.monotonic() + _GRACE_S
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
        worker.kill()
        worker.join()


def _live(work: Work[object], part: tuple[int, int], sender: Connection) -> None:
    """A worker's whole life."""
    # Here, so that the parent of light work stays light.
    import torch

    # Ctrl-C reaches the whole group; the parent decides what becomes of the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    threading.Thread(target=_leave_with_the_parent, daemon=True).start()
    torch.set_num_threads(max(1, torch.get_num_threads() // part[1]))
    last: UserError | None = None
    with suppress(BrokenPipeError):  # the parent is gone, and nobody is left to tell
        try:
            with closing(work(part)) as items:
                for item in items:
                    sender.send(item)
        except UserError as error:
            last = error
        # Nothing is left to close, and a process may be stopped while it winds up.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sender.send(last)


def _leave_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os._exit(1)
