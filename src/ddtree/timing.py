"""Where the time goes: wraps the stages from outside, so that the loop knows no clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import fields, replace
from typing import ParamSpec, TypeVar

import torch

from ddtree.decode import Stages
from ddtree.types import StageSeconds

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Stopwatch:
    """Sums wall time per stage.

    On CUDA the time between two events of the stream is taken, which needs no synchronisation in
    the loop; elsewhere the host's clock.

    Args:
        device: where the target runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._host_s: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def timed(self, stages: Stages) -> Stages:
        """The same stages, each adding its time to this stopwatch."""
        wrapped = {f.name: self._wrap(f.name, getattr(stages, f.name)) for f in fields(stages)}
        return replace(stages, **wrapped)

    def seconds(self) -> StageSeconds:
        """Totals so far, in seconds."""
        totals = dict(self._host_s)
        if self._events:
            torch.cuda.synchronize()
        for name, begin, end in self._events:
            totals[name] = totals.get(name, 0.0) + begin.elapsed_time(end) / 1000
        return StageSeconds(**totals)

    def _wrap(self, name: str, stage: Callable[_P, _T]) -> Callable[_P, _T]:
        def on_host(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            begin = time.perf_counter()
            result = stage(*args, **kwargs)
            elapsed = time.perf_counter() - begin
            self._host_s[name] = self._host_s.get(name, 0.0) + elapsed
            return result

        def on_cuda(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            begin, end = _event(), _event()
            begin.record()
            result = stage(*args, **kwargs)
            end.record()
            self._events.append((name, begin, end))
            return result

        return on_cuda if self._on_cuda else on_host


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
