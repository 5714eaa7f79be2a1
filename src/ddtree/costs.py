"""What a round costs on this machine: measured once per pair, kept on disk, corrected by rounds.

Only ratios matter to the budget, so a machine that slows down as a whole changes nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import __version__ as transformers_version

from ddtree.draft import Drafter
from ddtree.models.target import Target

# Rows of a verify forward that are measured; between them costs are interpolated. Our linear layers
# work on six rows at a time, so costs step up behind 12. The most rows bound the tree: on a CPU
# more have never paid.
ROWS_ON_CPU = (1, 2, 4, 6, 9, 12, 13, 18, 24, 33, 49)
ROWS_ELSEWHERE = (1, 9, 17, 33, 65, 129, 257)
CONTEXTS = (64, 512)
_FORMAT = 3  # of the file; another number measures anew
# A forward slower than this is measured in fewer places: a profile must not take minutes.
_SLOW_S = 0.3
_PASSES = 9


@dataclass(frozen=True, kw_only=True)
class CostProfile:
    """Seconds per stage, as measured.

    Args:
        contexts: T of each row of `verify`: one, or two that rise.
        rows: N of each column, rising.
        verify: [contexts][rows] seconds of a verify forward and the walk's first look at it.
        draft: seconds of one drafter pass with its top-k.
    """

    contexts: tuple[int, ...]
    rows: tuple[int, ...]
    verify: tuple[tuple[float, ...], ...]
    draft: float

    def verify_s(self, num_rows: int, context_length: int) -> float:
        """Seconds of a verify forward: interpolated, and carried on beyond the last point."""
        right = min(max(bisect_left(self.rows, num_rows), 1), len(self.rows) - 1)
        along = self._along(context_length)
        y0, y1 = (_at(along, self.verify[0][i], self.verify[-1][i]) for i in (right - 1, right))
        x0, x1 = self.rows[right - 1], self.rows[right]
        return y0 + (y1 - y0) / (x1 - x0) * (num_rows - x0)

    def verify_by_size(self, context_length: int) -> list[float]:
        """Seconds of a verify forward of each number of `rows`; a short context is no cheaper."""
        along = self._along(context_length)
        return [_at(along, s, t) for s, t in zip(self.verify[0], self.verify[-1], strict=True)]

    def _along(self, context_length: int) -> float:
        """Where a context lies between the first (0) and the last (1) of `contexts`, or beyond."""
        first, last = self.contexts[0], self.contexts[-1]
        return max(0.0, (context_length - first) / (last - first)) if last > first else 0.0


def _at(along: float, short_s: float, long_s: float) -> float:
    return short_s + max(0.0, (long_s - short_s) * along)


@torch.inference_mode()
def measure(target: Target, drafter: Drafter) -> CostProfile:
    """Time verify forwards and a drafter pass with tokens that mean nothing; takes seconds."""
    sizes = ROWS_ON_CPU if target.device.type == "cpu" else ROWS_ELSEWHERE
    every_size = _that_fit(sizes, target.max_rows)
    places = _contexts(target.context_limit - every_size[-1])
    capacity = places[-1] + every_size[-1]
    cache = target.new_cache(capacity)
    session = drafter.start(capacity)
    layer_ids = tuple(drafter.layer_ids)

    def grow(length: int) -> None:
        if length == cache.length:
            return
        ids = torch.arange(cache.length, length, device=target.device) % target.vocab_size
        session.extend(target.prefill(ids, cache, capture=layer_ids).features, ids)

    def verifies(rows: tuple[int, ...]) -> list[float]:
        """Passes over all sizes, so that a busy moment does not hit one of them alone."""
        passes = [[verify(n) for n in rows]]
        while len(passes) < _PASSES and passes[0][0] < _SLOW_S:
            passes.append([verify(n) for n in rows])
        return [min(times) for times in zip(*passes, strict=True)]

    def verify(num_rows: int) -> float:
        ids = torch.arange(num_rows, device=target.device) % target.vocab_size
        ancestors = torch.ones(num_rows, num_rows, dtype=torch.bool, device=target.device).tril()
        start = cache.length

        begin = time.perf_counter()
        output = target.verify(ids, ids, ancestors, cache, capture=layer_ids)
        output.logits.argmax(-1).tolist()  # waits for the device, as the walk does
        seconds = time.perf_counter() - begin
        cache.keep(start, ())
        return seconds

    grow(places[0])
    draft_s = _seconds(
        lambda: session.propose(0, num_depths=drafter.num_depths, num_ranks=16).log_probs.tolist()
    )
    slow = min(verify(1), verify(1)) > _SLOW_S
    few = _that_fit((1, 8, 33), target.max_rows)
    contexts, rows = (places[:1], few) if slow else (places, every_size)
    table = []
    for length in contexts:
        grow(length)
        table.append(verifies(rows))
    # A shorter context never costs more, and more rows never less: what looks so is noise.
    falling = np.minimum.accumulate(table[::-1], axis=0)[::-1]
    rising = np.maximum.accumulate(falling, axis=1).tolist()
    return CostProfile(
        contexts=contexts, rows=rows, verify=tuple(map(tuple, rising)), draft=draft_s
    )


def _that_fit(sizes: tuple[int, ...], max_rows: int | None) -> tuple[int, ...]:
    """The numbers of rows that a round may have; two at least, to draw a line through."""
    fit = tuple(n for n in sizes if max_rows is None or n <= max_rows)
    return fit if len(fit) > 1 else sizes[:2]


def _contexts(limit: int) -> tuple[int, ...]:
    """Where to measure: not beyond the positions that the model was made for."""
    return tuple(length for length in CONTEXTS if length <= limit) or (max(1, limit),)


def _seconds(once: Callable[[], object]) -> float:
    """The fastest of a few runs after a warm-up: noise only adds."""
    once()
    best = np.inf
    for _ in range(_PASSES):
        begin = time.perf_counter()
        once()
        best = min(best, time.perf_counter() - begin)
        if best > _SLOW_S:
            break
    return float(best)


def profile_for(
    target: Target, drafter: Drafter, folder: Path, *, say: Callable[[str], None] | None = None
) -> CostProfile:
    """The saved profile of this pair on this machine, or a new one, which is then saved.

    Args:
        target, drafter: the pair.
        folder: where profiles are kept, a JSON file for each pair and machine.
        say: told before measuring.
    """
    key = _key(target, drafter)
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    path = folder / f"{name}.json"
    if (saved := _read(path, key)) is not None:
        return saved
    if say is not None:
        say("Measuring what a round costs on this machine, once: a few seconds.")
    profile = measure(target, drafter)
    _write(path, {"key": key, "profile": asdict(profile)})
    return profile


def _key(target: Target, drafter: Drafter) -> dict[str, object]:
    """Everything that decides the costs and can be told beforehand."""
    where = target.device
    gpu = torch.cuda.get_device_name(where) if where.type == "cuda" else None
    return {
        "format": _FORMAT,
        "machine": [platform.node(), platform.machine(), os.cpu_count(), gpu],
        "threads": torch.get_num_threads(),
        "versions": [str(torch.__version__), transformers_version],
        "device": str(where),
        "target": [target.name, str(target.dtype), target.backend, asdict(target.shape)],
        "drafter": [getattr(drafter, "name", type(drafter).__name__), drafter.num_depths],
    }


def _read(path: Path, key: dict[str, object]) -> CostProfile | None:
    """A saved profile; None where there is none that can be used."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        if saved["key"] != key:
            return None
        raw = saved["profile"]
        return CostProfile(
            contexts=tuple(raw["contexts"]),
            rows=tuple(raw["rows"]),
            verify=tuple(tuple(map(float, costs)) for costs in raw["verify"]),
            draft=float(raw["draft"]),
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _write(path: Path, saved: dict[str, object]) -> None:
    """Keep it if that is possible: without, the next start measures again."""
    beside = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(saved, indent=1), encoding="utf-8")
        beside.replace(path)
