"""Where a model runs and in which dtype, by the names that a user gives. Knows no models."""

from __future__ import annotations

import torch

from ddtree.errors import OptionError
from ddtree.models import kernels


def pick_device(device: str) -> torch.device:
    """The device of that name; "auto" takes cuda, then mps, then cpu.

    Raises:
        OptionError: no such device here.
    """
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    here = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        here.append("mps")
    if device in here or (device == "cuda" and torch.cuda.is_available()):
        return torch.device(device)
    raise OptionError(
        "device",
        expected=f"auto or a device of this machine ({', '.join(here)})",
        got=repr(device),
        remedy="Run `ddtree doctor` to see what is installed.",
    )


MIXED = "mixed"
"""A model in float32 whose linear layers multiply in bfloat16, see `models.packed`."""

DTYPES = {
    "float32": torch.float32,
    MIXED: torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def pick_dtype(dtype: str, device: torch.device, declared: torch.dtype | None) -> torch.dtype:
    """The dtype of that name; "auto" is float32 on a CPU, else what the checkpoint declares.

    Raises:
        OptionError: another name.
    """
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" or declared is None else declared
    if dtype not in DTYPES:
        raise OptionError(
            "dtype",
            expected=f"auto, {', '.join(DTYPES)}",
            got=repr(dtype),
            remedy="auto is float32 on a CPU and the checkpoint's own dtype elsewhere.",
        )
    return DTYPES[dtype]


def check_mixed(device: torch.device) -> None:
    """Refuse to run a "mixed" model where nothing multiplies bfloat16 for it.

    Raises:
        OptionError: another device, another processor, or no compiled kernels.
    """
    if device.type == "cpu" and kernels.PAIRS_AVAILABLE:
        return
    raise OptionError(
        "dtype",
        expected="for mixed: a CPU that multiplies bfloat16 (AVX512-BF16), and compiled kernels",
        got="a CPU or a build without" if device.type == "cpu" else f"device {device}",
        remedy="Take float32, or bfloat16 on a GPU; `ddtree doctor` says what is here.",
    )
