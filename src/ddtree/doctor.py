"""`ddtree doctor`: what is installed, which backends work, and whether a pair fits together.

Reads configurations only, so it answers in seconds for models of any size. A check that fails says
what to do about it.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from transformers import AttentionInterface

from ddtree.attention.backends import GROUPED, SPLIT
from ddtree.attention.masks import TreeMask
from ddtree.attention.visibility import visible
from ddtree.errors import BackendError, UserError
from ddtree.models import kernels, zoo
from ddtree.models.loading import describe_drafter, read_target_shape
from ddtree.models.packed import best_layout
from ddtree.report import Json, versions
from ddtree.tree import host

# "eager" is each architecture's own function and cannot be asked without a model.
_CHECKED = (GROUPED, SPLIT, "sdpa")


@dataclass(frozen=True, kw_only=True)
class Check:
    """One finding.

    Args:
        name: what was looked at.
        well: whether it is as it should be; None for mere information.
        finding: what was found, or the error and its remedy.
    """

    name: str
    well: bool | None
    finding: str


@dataclass(frozen=True)
class Examination:
    """All findings, in the order in which they were looked at."""

    checks: tuple[Check, ...]

    @property
    def well(self) -> bool:
        """Whether no check failed."""
        return all(check.well is not False for check in self.checks)


def examine(target: str, drafter: str | None) -> Examination:
    """Look at the installation and at a pair.

    Args:
        target: hub id, folder or alias.
        drafter: the same, or None for the one known for this target.
    """
    checks = [Check(name=name, well=None, finding=found) for name, found in versions().items()]
    checks += [_processor(), *_devices()]
    checks += [_attempt(f"attention {name}", _backend_check(name)) for name in _CHECKED]
    layout = best_layout()
    finding = "plain: no other layout works here" if layout is None else f"packed: {layout.layout}"
    checks.append(Check(name="float32 layers on a CPU", well=None, finding=finding))
    mixed = "here: --dtype mixed" if kernels.PAIRS_AVAILABLE else "not here: no --dtype mixed"
    checks.append(Check(name="bfloat16 products on a CPU", well=None, finding=mixed))
    checks.append(Check(name="tree builder", well=None, finding=host.describe()))
    checks.append(_attempt("cache", _cache_folder))
    checks += _pair(target, drafter)
    return Examination(tuple(checks))


def as_json(examination: Examination) -> Json:
    """The report for programs."""
    return {"well": examination.well, "checks": [asdict(c) for c in examination.checks]}


def show(examination: Examination, console: Console) -> None:
    """The report for people."""
    marks = {True: "[green]✓[/]", False: "[bold red]✗[/]", None: " "}
    width = max(len(check.name) for check in examination.checks)
    for check in examination.checks:
        console.print(f"{marks[check.well]} {check.name:<{width}}  ", end="")
        console.print(check.finding, markup=False, highlight=False, soft_wrap=True)


def _attempt(name: str, look: Callable[[], str]) -> Check:
    try:
        return Check(name=name, well=True, finding=look())
    except UserError as error:
        return Check(name=name, well=False, finding=str(error))


def _processor() -> Check:
    capability = torch.backends.cpu.get_cpu_capability()
    return Check(
        name="processor",
        well=None,
        finding=f"{os.cpu_count()} cores, {platform.machine()}, {capability}, "
        f"{torch.get_num_threads()} threads in torch",
    )


def _devices() -> list[Check]:
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        found.append(Check(name=f"cuda:{index}", well=True, finding=f"{properties.name}, {memory}"))
    if not found:
        found.append(Check(name="cuda", well=None, finding="none"))
    mps = "available" if torch.backends.mps.is_available() else "none"
    return [*found, Check(name="mps", well=None, finding=mps)]


def _backend_check(name: str) -> Callable[[], str]:
    def look() -> str:
        # A root with two children, one entry of context; values of one say which were looked at.
        ancestors = torch.tensor([[True, False, False], [True, True, False], [True, False, True]])
        expected = visible(ancestors, torch.tensor([0, 1, 1]), 1, None)
        mask = TreeMask().of(ancestors, 1, torch.float32)
        rows, keys = torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 4, 4)
        values = torch.eye(4)[None, None]
        attend = AttentionInterface()[name]
        seen, _ = attend(torch.nn.Module(), rows, keys, values, mask, open_context=True)
        if not torch.equal(seen[0, :, 0] > 0, expected):
            raise BackendError(
                f"attention {name}",
                expected="rows that see their ancestors alone",
                got="other rows",
                remedy="Use another version of torch, and tell us which one this is.",
            )
        return "tree mask works"

    return look


def _cache_folder() -> str:
    folder = zoo.cache_root()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free_gib = shutil.disk_usage(existing).free / 2**30
    return f"{folder}, {free_gib:.1f} GiB free"


def _pair(target: str, drafter: str | None) -> list[Check]:
    """The target's architecture, the drafter's format, and whether the two fit."""
    if zoo.is_embedded(target) and not zoo.is_ready(target):
        finding = f"{target} is not here yet; the first `ddtree generate` fetches it (about 100 MB)"
        return [Check(name="target", well=None, finding=finding)]
    try:
        shape = read_target_shape(target)
    except UserError as error:
        return [Check(name="target", well=False, finding=str(error))]
    checks = [
        Check(
            name="target",
            well=True,
            finding=f"{target}: {shape.num_layers} layers, hidden {shape.hidden_size}, "
            f"vocabulary {shape.vocab_size}",
        )
    ]
    source = drafter or zoo.known_drafter(target)
    if source is None:
        finding = f"none known for {target}; give one with --drafter, or use --method ar"
        return [*checks, Check(name="drafter", well=None, finding=finding)]

    def described() -> str:
        return f"{source}: {describe_drafter(source, shape)}"

    return [*checks, _attempt("drafter", described)]
