"""Where a result comes from: command, commit, versions, machine, and by which drafter."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

from ddtree.draft import Drafter
from ddtree.models.drafter import DFlashDrafter
from ddtree.models.loading import LoadedDrafter
from ddtree.models.packed import PackedLinear
from ddtree.report import versions


def origin() -> dict[str, object]:
    """What this process can say about itself, as JSON."""
    return {
        "command": _command(sys.argv),
        "commit": _commit(),
        "versions": versions(),
        "machine": _machine(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def drafter_digest(drafter: Drafter) -> str | None:
    """A digest of a loaded drafter's weights, the same packed or plain; None of the user's own.

    A folder that was moved, or trained on under its old name, is told by it.
    """
    if not isinstance(drafter, LoadedDrafter):
        return None
    tensors = dict(drafter.network.state_dict())
    for name, layer in drafter.network.named_modules():
        if isinstance(layer, PackedLinear):  # its weight is no parameter
            tensors[f"{name}.weight"] = layer.weight
    if isinstance(drafter, DFlashDrafter):
        tensors |= {f"own {name}": tensor for name, tensor in drafter.own_tensors.items()}
        if drafter.draft_token_ids is not None:
            tensors["draft_token_ids"] = drafter.draft_token_ids
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _command(arguments: list[str]) -> str:
    """As it would be typed again: an installed program by its name, a script with its path."""
    program = arguments[0]
    named = ["python", program] if program.endswith(".py") else [Path(program).name]
    return shlex.join([*named, *arguments[1:]])


def _commit() -> str | None:
    """The commit of the checkout that this package runs from; None where it is installed."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():  # git would look further up, and find somebody else's
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _machine() -> str:
    """Cores, processor, instructions, threads, system, and the GPU if there is one."""
    parts = [
        f"{os.cpu_count()} cores",
        _processor(),
        torch.backends.cpu.get_cpu_capability(),
        f"{torch.get_num_threads()} threads",
        platform.platform(),
    ]
    if torch.cuda.is_available():
        parts.append(torch.cuda.get_device_name())
    return ", ".join(part for part in parts if part)


def _processor() -> str:
    """Its name; Linux alone says it in a file."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
