"""A drafter's tensors: read from safetensors, held against what its configuration implies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ddtree.errors import CheckpointError, UnsupportedModelError, first_line, listed

# Tensors and files of variants that would load without them and be silently wrong.
_REFUSED_TENSORS = ("attention_sink_bias", "qkv_proj", "g_proj", "aux_hidden_norms")
REFUSED_FILES = ("mask_embedding.pt",)

# Our own transition head lies apart, where loaders of others do not stumble over it.
TRANSITIONS_FILE = "transitions/model.safetensors"
TRANSITIONS_PREFIX = "candidate_selector."


def read_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files, an optional `model.` prefix removed.

    Raises:
        UnsupportedModelError: a file of a variant that would be silently wrong.
        CheckpointError: no such files, an unreadable one, or a tensor twice.
    """
    for refused in REFUSED_FILES:
        if (folder / refused).exists():
            raise _refused(refused, name)
    files = sorted(folder.glob("*.safetensors"))
    if files and (beside := folder / TRANSITIONS_FILE).exists():
        files.append(beside)
    if not files:
        raise CheckpointError(
            f"drafter {name}",
            expected="*.safetensors beside config.json",
            got=f"none in {folder}",
            remedy="Download the checkpoint again; other weight formats are not read.",
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        with opened_tensors(file) as opened:
            for key in opened.keys():  # noqa: SIM118, a safetensors handle is not a dict
                tensor_name = key.removeprefix("model.")
                if tensor_name in tensors:
                    raise CheckpointError(
                        str(file),
                        expected="each tensor once",
                        got=f"{key} again",
                        remedy="Keep either the whole file or its parts, not both.",
                    )
                tensors[tensor_name] = opened.get_tensor(key)
    return tensors


class OpenedTensors(Protocol):
    """What we use of the library's handle, which is not typed."""

    def keys(self) -> Sequence[str]:
        """Names of the tensors."""
        ...

    def get_tensor(self, name: str) -> Tensor:
        """One of them, as it is stored."""
        ...


@contextmanager
def opened_tensors(file: Path) -> Iterator[OpenedTensors]:
    """A safetensors file to read from.

    Raises:
        CheckpointError: it cannot be opened, or what is read during the block is damaged.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            str(file),
            expected="a readable safetensors file",
            got=first_line(error),
            remedy="It may be truncated: download it again.",
        ) from error


def check_tensors(tensors: Mapping[str, Tensor], network: nn.Module, name: str) -> None:
    """Every tensor that the network needs is there in its shape, and no other.

    Raises:
        UnsupportedModelError: a tensor of a variant that would be silently wrong.
        CheckpointError: tensors missing, left over, misshapen or quantised; lists them.
    """
    wanted = {key: tuple(value.shape) for key, value in network.state_dict().items()}
    found = {key: tuple(value.shape) for key, value in tensors.items()}
    for key in found:
        if any(part in key for part in _REFUSED_TENSORS) and key not in wanted:
            raise _refused(key, name)
    missing = [f"{key} {list(wanted[key])}" for key in wanted if key not in found]
    extra = [f"{key} {list(found[key])}" for key in found if key not in wanted]
    wrong = [
        f"{key} {list(found[key])} instead of {list(wanted[key])}"
        for key in wanted
        if key in found and found[key] != wanted[key]
    ]
    quantised = [k for k, t in tensors.items() if not t.is_floating_point() or t.itemsize < 2]
    kinds = {"missing": missing, "left over": extra, "misshapen": wrong, "quantised": quantised}
    told = [f"{len(names)} {kind}: {listed(names)}" for kind, names in kinds.items() if names]
    if told:
        raise CheckpointError(
            f"drafter {name}",
            expected="exactly the tensors that its config.json implies",
            got="; ".join(told),
            remedy="The checkpoint and its config.json do not belong together.",
        )


def check_finite(key: str, tensor: Tensor, name: str) -> None:
    """No NaN and no infinity in a tensor of a drafter.

    Raises:
        CheckpointError: there is one; says how many.
    """
    low, high = torch.aminmax(tensor)  # either is NaN if one number is
    if math.isfinite(low) and math.isfinite(high):
        return
    num_broken = int((~torch.isfinite(tensor)).sum())
    raise CheckpointError(
        f"drafter {name}: {key}",
        expected="finite numbers",
        got=f"NaN or infinity in {num_broken} of {tensor.numel()} places",
        remedy="The file or the training that made it is broken: download it again, or ask its "
        "maker.",
    )


def _refused(what: str, name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"drafter {name}",
        expected="a plain DFlash checkpoint",
        got=what,
        remedy="This variant would load and be silently wrong, so it is refused.",
    )
