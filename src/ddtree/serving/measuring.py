"""What a step costs on this machine, timed once when the engine has loaded its models."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from vllm.forward_context import set_forward_context

from ddtree.serving.step_costs import StepCosts

# Rows of a forward and requests of a drafter pass that are timed, as far as the engine allows them.
_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048)
_REQUESTS = (1, 2, 4, 8, 16, 32, 64)
_PASSES = 5
# A forward slower than this is timed once: the start must not take minutes.
_SLOW_S = 0.3


@torch.inference_mode()
def measured_costs(runner: Any) -> StepCosts:
    """Time forwards of the target and of the drafter, without attention: its share is learnt.

    Args:
        runner: a `TreeModelRunner` whose models are loaded.
    """
    most_rows = min(runner.max_num_tokens, runner.max_num_reqs * (1 + runner.num_spec_tokens))
    rows = list(_up_to(_ROWS, most_rows))
    verify = [_seconds(lambda n=n: _verify(runner, n)) for n in rows]  # type: ignore[misc]
    requests = list(_up_to(_REQUESTS, runner.max_num_reqs))
    draft = [_seconds(lambda n=n: _draft(runner, n)) for n in requests]  # type: ignore[misc]
    return StepCosts.measured(rows, verify, draft_requests=requests, draft_seconds=draft)


def _up_to(sizes: Sequence[int], most: int) -> Iterator[int]:
    """The sizes below the most, and the most itself where that is no larger than the largest."""
    yield from (n for n in sizes if n < most)
    if most <= sizes[-1]:
        yield most


def _verify(runner: Any, num_rows: int) -> None:
    """One forward of the target with its head, waited for."""
    with set_forward_context(None, runner.vllm_config, num_tokens=num_rows):
        output = runner.model(
            input_ids=runner.input_ids.gpu[:num_rows], positions=runner.positions[:num_rows]
        )
    hidden = output[0] if isinstance(output, tuple) else output
    runner.model.compute_logits(hidden[:num_rows]).argmax(-1).tolist()


def _draft(runner: Any, num_requests: int) -> None:
    """One pass of the drafter for so many requests, up to the ranked tokens."""
    drafter = runner.drafter
    num_slots = num_requests * (1 + drafter.num_depths)
    drafter.dummy_run(num_slots)
    hidden = torch.zeros(
        num_requests, drafter.num_depths, drafter.hidden_size, device=drafter.device
    ).to(drafter.dtype)
    roots = [0] * num_requests
    drafter.head.marginals(hidden, roots, drafter.max_nodes, [None] * num_requests)


def _seconds(once: Callable[[], None]) -> float:
    """The fastest of a few after a warm-up: noise only adds."""
    once()
    best = float("inf")
    for _ in range(_PASSES):
        began = time.perf_counter()
        once()
        best = min(best, time.perf_counter() - began)
        if best > _SLOW_S:
            break
    return best
