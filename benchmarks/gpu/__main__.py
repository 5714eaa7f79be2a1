"""Check and time everything on a GPU in one call: the script for the day one is lent.

    PYTHONPATH=src python3 benchmarks/gpu --out DIR --minutes 9

Correctness first, in float32 with tiny random models: methods token for token, attention backends
against the CPU, the batched tree builder against the reference, noise by seed, attention over a
paged cache. Then times, in bfloat16 with random weights in the shapes of Qwen3-4B, 8B and 30B-A3B.
Needs no network.

Every section runs in a process of its own and has a share of the time: an exception is written
down with its traceback, a crash or a section that overruns costs the others nothing, and gpu.json
and gpu.md are whole after every section. Times are from synchronised clocks, after a warm-up,
interleaved: milliseconds, median (quartiles). `--device cpu --small` runs all of it in seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

if not __package__:  # run as a folder, which then stands in for benchmarks/ on the path
    sys.path[0] = str(Path(__file__).parents[1])

from ddtree.journal import write_whole
from gpu import checks, paged, shapes, timing, trees
from gpu.found import Found, markdown
from gpu.models import SHAPES
from gpu.processes import Job, run_apart, run_here, start_method
from gpu.section import Json, Report, Send, Setup

# A section may overrun its share by so much before it is ended: it stops between cases by itself.
GRACE_S = 20.0
# Kept back for the last section's last case.
RESERVE_S = 15.0
WRITE_EVERY_S = 5.0


@dataclass(frozen=True)
class Section:
    """A part of the run, by name.

    Args:
        run: the work; not from this file, which spawned processes do not see.
        share: of the time, relative to the others; what one leaves goes to those after it.
    """

    run: Callable[[Setup, Report], None]
    share: float


SECTIONS: dict[str, Section] = {
    "machine": Section(timing.ceilings, 2),
    "tokens": Section(checks.tokens, 7),
    "backends": Section(checks.backends, 4),
    "builder": Section(trees.check, 3),
    "noise": Section(checks.noise, 1),
    "trees": Section(trees.measure, 3),
    "paged": Section(paged.check, 2),
    "paged-times": Section(paged.measure, 6),
    **{
        name: Section(partial(shapes.measure, name), share)
        for name, share in zip(SHAPES, (9, 9, 14), strict=True)
    },
}


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
        job = Job(name=name, run=section.run, setup=setup, deadline=deadline)
        if method is None:
            run_here(job, take)
        else:
            run_apart(job, min(deadline + GRACE_S, end), method, take)
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


def taker(part: Found, card: Json, write: Callable[[], None]) -> Send:
    """Takes a section's messages, and writes everything out now and then."""
    written = time.monotonic()

    def take(message: tuple[str, object]) -> None:
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


if __name__ == "__main__":
    sys.argv[0] = os.path.relpath(__file__)  # a folder's bare name would not say how it was run
    main()
