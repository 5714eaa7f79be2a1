"""Processes in which triton interprets its kernels, or compiles them for GPUs that are not there.

Triton decides which when it is imported, so each has a process of its own.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch


@contextmanager
def process(
    variables: Mapping[str, str], begin: Callable[[], None] | None = None
) -> Iterator[ProcessPoolExecutor]:
    """One process whose environment has these variables before anything is imported."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=begin) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("TRITON_INTERPRET", raising=False)
            for name, value in variables.items():
                patch.setenv(name, value)
            pool.submit(int).result()  # it starts with the first task
        yield pool


@contextmanager
def interpreting() -> Iterator[ProcessPoolExecutor]:
    """One process in which kernels run without a GPU."""
    with process({"TRITON_INTERPRET": "1"}, _teach_bfloat16) as pool:
        yield pool


def _teach_bfloat16() -> None:
    """Triton's interpreter multiplies the bits of bfloat16 as if they were whole numbers."""
    torch.set_num_threads(1)
    from triton.runtime import interpreter

    multiply = interpreter.InterpreterBuilder.create_dot

    def widened(handle: interpreter.TensorHandle) -> interpreter.TensorHandle:
        if handle.dtype.scalar != interpreter.tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), interpreter.tl.float32)

    def create_dot(self, a, b, *others):
        return multiply(self, widened(a), widened(b), *others)

    interpreter.InterpreterBuilder.create_dot = create_dot
