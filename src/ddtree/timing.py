"""Where the time goes: wraps the stages from outside, so that the loop knows no clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import fields, replace
from typing import ParamSpec, TypeVar

import torch

from ddtree.decode import Stages
from ddtree.types import StageSpan

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Stopwatch:
    """Notes when each stage of one generation began and how long it took.

    On CUDA the time between two events of the stream is taken, which needs no synchronisation in
    the loop; elsewhere the host's clock.

    Args:
        device: where the target runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._on_host: list[tuple[str, float, float]] = []
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def timed(self, stages: Stages) -> Stages:
        """The same stages, each call noted by this stopwatch."""
        wrapped = {f.name: self._wrap(f.name, getattr(stages, f.name)) for f in fields(stages)}
        return replace(stages, **wrapped)

    def spans(self) -> tuple[StageSpan, ...]:
        """The calls so far, in order."""
        calls = self._on_host
        if self._events:
            torch.cuda.synchronize()
            first = self._events[0][1]
            calls = [
                (name, first.elapsed_time(begin) / 1000, begin.elapsed_time(end) / 1000)
                for name, begin, end in self._events
            ]
        spans: list[StageSpan] = []
        round_index = 0
        for name, begin_s, seconds in calls:
            spans.append(StageSpan(name, begin_s - calls[0][1], seconds, round_index))
            # The prefill ends with a walk, every other round with its commit.
            round_index += name == "commit" or (name == "walk" and round_index == 0)
        return tuple(spans)

    def _wrap(self, name: str, stage: Callable[_P, _T]) -> Callable[_P, _T]:
        def on_host(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            begin = time.perf_counter()
            result = stage(*args, **kwargs)
            self._on_host.append((name, begin, time.perf_counter() - begin))
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
