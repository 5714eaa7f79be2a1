"""A target by name: loaded, fetched or described, as a stage or one of its workers needs it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from ddtree.models.folder import read_config, resolve_folder
from ddtree.models.loading import load_target, read_target_shape, silence_transformers
from ddtree.models.placement import MIXED, pick_device, pick_dtype
from ddtree.models.target import Target, TargetShape
from ddtree.train.samples import NUM_FAVOURITES

_NUM_SLICES = 64
_SLICE_BYTES = 2**14


@dataclass(frozen=True, kw_only=True)
class TargetSource:
    """A target by name, not loaded.

    Args:
        name: hub id, folder or alias.
        device: as for `load_target`.
        dtype: as for `load_target`.
        allow_untested: as for `load_target`.
    """

    name: str
    device: str = "auto"
    dtype: str = "auto"
    allow_untested: bool = False

    def load(self, *, packed: bool = True) -> Target:
        """The target itself, in this process; `packed` as for `load_target`."""
        silence_transformers()
        return load_target(
            self.name,
            device=self.device,
            dtype=self.dtype,
            packed=packed,
            allow_untested=self.allow_untested,
        )

    def fetch(self, console: Console | None = None) -> Path:
        """Its folder, fetched where it is not here: before the workers start, and not by each."""
        say = None
        if console is not None:
            say = partial(console.print, style="dim", soft_wrap=True, markup=False)
        return resolve_folder(self.name, argument="target", say=say)

    def shape(self) -> TargetShape:
        """Its sizes, read from its configuration."""
        return read_target_shape(self.name, allow_untested=self.allow_untested)

    def description(self) -> dict[str, object]:
        """Its name and the dtype that it will run in."""
        config = read_config(self.fetch(), "target")
        declared = getattr(torch, str(config.get("dtype", config.get("torch_dtype"))), None)
        known = declared if isinstance(declared, torch.dtype) else None
        dtype = pick_dtype(self.dtype, pick_device(self.device), known)
        return {"target": self.name, "dtype": MIXED if self.dtype == MIXED else str(dtype)}

    def samples_description(self, layer_ids: Sequence[int]) -> dict[str, object]:
        """What decides a sample, its response aside."""
        return {
            **self.description(),
            "weights_sha256": _weights_sha256(self.fetch()),
            "layer_ids": list(layer_ids),
            "num_favourites": NUM_FAVOURITES,
        }


def _weights_sha256(folder: Path) -> str:
    """A digest of slices of all weight files, spread evenly: tells a target from its fine-tune."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(str(size).encode())
        with path.open("rb") as file:
            for number in range(_NUM_SLICES):
                file.seek(size * number // _NUM_SLICES)
                digest.update(file.read(_SLICE_BYTES))
    return digest.hexdigest()
