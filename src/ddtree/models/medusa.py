"""Medusa heads: each predicts one of the next positions from the target's final hidden state.

Head k, from 0, reads the state whose logits gave the root and predicts the token k + 1 positions
behind it: depth k + 1 of a draft. Nothing else of the context is looked at, so a session holds one
row. Names and formulas are those of the published checkpoints (FasterDecoding/Medusa, arXiv
2401.10774). Knows no other drafter.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from ddtree.errors import CheckpointError, PairMismatchError, UnsupportedModelError, first_line
from ddtree.models.drafter import top_marginals
from ddtree.models.drafter_weights import check_finite, check_tensors, opened_tensors
from ddtree.models.packed import pack_linears
from ddtree.models.target import FINAL_HIDDEN, Target, TargetShape
from ddtree.sampling.coupling import Perturb
from ddtree.types import Marginals

# The one that cannot run code comes first where a folder has both.
WEIGHT_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")

_KEY = re.compile(r"(\d+)\.(\d+)\.(linear\.)?(weight|bias)")


@dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """What a `config.json` says.

    Args:
        num_heads: as declared; files hold more than they declare, see `read_heads`.
        num_layers: residual blocks of each head.
        base_model: the target that the heads were made for, if it is named.
    """

    num_heads: int
    num_layers: int
    base_model: str | None

    def describe(self) -> str:
        """In a few words, for `ddtree doctor`."""
        made_for = "" if self.base_model is None else f", made for {self.base_model}"
        blocks = f"{self.num_layers} residual block{'s' * (self.num_layers != 1)} each"
        return f"{self.num_heads} or more Medusa heads, {blocks}{made_for}; loading checks the rest"


def is_medusa(raw: Mapping[str, object]) -> bool:
    """Whether a `config.json` is one of Medusa heads, in whatever layout."""
    return "medusa_num_heads" in raw or raw.get("model_type") == "medusa"


def parse_medusa_config(
    raw: Mapping[str, object], target: TargetShape, source: str
) -> MedusaConfig:
    """Read a `config.json`.

    Args:
        raw: its content.
        target: which the heads must fit.
        source: where it comes from, for messages.

    Raises:
        UnsupportedModelError: another layout than the published one.
        CheckpointError: counts that cannot be.
        PairMismatchError: made for a target of another shape, where it says so.
    """
    if "medusa_num_heads" not in raw:
        raise UnsupportedModelError(
            source,
            expected="medusa_num_heads, as FasterDecoding publishes Medusa",
            got="vLLM's layout of Medusa heads",
            remedy=f"Give the folder that it was made from, with {WEIGHT_FILES[0]}.",
        )
    for key, wanted in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if raw.get(key, wanted) != wanted:
            raise PairMismatchError(
                f"{source}: {key}",
                expected=f"{wanted} for target {target.name}",
                got=raw[key],
                remedy="Use the heads that were trained for this very target.",
            )
    base_model = raw.get("base_model_name_or_path")
    return MedusaConfig(
        num_heads=_count(raw, "medusa_num_heads", 1, source),
        num_layers=_count(raw, "medusa_num_layers", 0, source),
        base_model=base_model if isinstance(base_model, str) else None,
    )


def _count(raw: Mapping[str, object], key: str, least: int, source: str) -> int:
    value = raw.get(key, 1)
    if type(value) is not int or value < least:
        raise CheckpointError(
            f"{source}: {key}",
            expected=f"a whole number >= {least}",
            got=repr(value),
            remedy="Download the file again.",
        )
    return value


class _Block(nn.Module):
    """x + silu(linear(x))."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.silu(self.linear(x))


class MedusaNetwork(nn.ModuleList):
    """The heads; parameter names are those of the published files.

    Args:
        num_heads: L.
        num_layers: residual blocks of each head.
        hidden_size: D, the target's.
        vocab_size: V, of a linear layer at the end of each head; None where there is none and the
            target's head is used.
    """

    def __init__(
        self, num_heads: int, num_layers: int, hidden_size: int, vocab_size: int | None
    ) -> None:
        heads = []
        for _ in range(num_heads):
            parts: list[nn.Module] = [_Block(hidden_size) for _ in range(num_layers)]
            if vocab_size is not None:
                parts.append(nn.Linear(hidden_size, vocab_size, bias=False))
            heads.append(nn.Sequential(*parts))
        super().__init__(heads)
        self.has_linears = vocab_size is not None


def read_heads(folder: Path, config: MedusaConfig, target: TargetShape, name: str) -> MedusaNetwork:
    """Read the heads of a folder.

    The file decides how many there are: published folders declare 2 and hold 5. It also decides
    whether each head ends in a linear layer of its own or all share the target's head (as
    text-generation-inference's version 2 has it): either all of them are there, or none.

    Args:
        folder: of the checkpoint.
        config: what `config.json` says.
        target: which the heads must fit.
        name: of the drafter, for messages.

    Returns:
        The heads on the CPU, in the file's dtype.

    Raises:
        CheckpointError: no file, an unreadable one, fewer heads than declared, or tensors missing,
            left over, misshapen, quantised or not finite.
    """
    file = _weights_file(folder, name)
    tensors = _read_pickled(file) if file.suffix == ".pt" else _read_safetensors(file)
    places = [match for match in map(_KEY.fullmatch, tensors) if match]
    num_heads = max([config.num_heads, *(int(place[1]) + 1 for place in places)])
    linears = [p for p in places if p[3] is None and int(p[2]) == config.num_layers]
    with torch.device("meta"):
        # A wild index must not make a network of its size before the tensors are counted.
        network = MedusaNetwork(
            min(num_heads, config.num_heads + len(places)),
            config.num_layers,
            target.hidden_size,
            target.vocab_size if linears or not config.num_layers else None,
        )
    check_tensors(tensors, network, name)
    for key, tensor in tensors.items():
        check_finite(key, tensor, name)
    network.load_state_dict(tensors, assign=True)
    return network


def _weights_file(folder: Path, name: str) -> Path:
    for file in WEIGHT_FILES:
        if (folder / file).exists():
            return folder / file
    raise CheckpointError(
        f"drafter {name}",
        expected=f"{' or '.join(WEIGHT_FILES)} beside config.json",
        got=f"neither in {folder}",
        remedy="Heads that come inside a whole model (Medusa-2) belong to its weights and are not "
        "read.",
    )


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    with opened_tensors(file) as opened:
        return {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118, no dict


def _read_pickled(file: Path) -> dict[str, Tensor]:
    """A `.pt` file; nothing in it is run."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            str(file),
            expected="tensors by name, as torch.save writes a state dict",
            got=first_line(error),
            remedy="It may be truncated, or hold more than tensors, which is never loaded.",
        ) from error
    if not isinstance(content, dict) or not all(isinstance(v, Tensor) for v in content.values()):
        raise CheckpointError(
            str(file),
            expected="tensors by name, as torch.save writes a state dict",
            got=type(content).__name__,
            remedy="Save the heads' own state dict.",
        )
    return {str(key): tensor for key, tensor in content.items()}


class MedusaDrafter:
    """Medusa heads bound to their target.

    Args:
        network: on the target's device and in its dtype.
        target: lends its head where the heads have no linear layers of their own.
        name: how to call it in messages.
        base_model: the target that the heads were made for, if they say so.
    """

    # The heads were trained on what the model's body gives, which is behind its final norm.
    layer_ids = (FINAL_HIDDEN,)

    def __init__(
        self, network: MedusaNetwork, target: Target, *, name: str, base_model: str | None = None
    ) -> None:
        self.network = network.eval()
        self.target = target
        self.name = name
        self.base_model = base_model
        self.num_depths = len(network)

    def describe(self) -> str:
        """In a few words."""
        own = self.network.has_linears
        ends = "with output layers of their own" if own else "over the target's head"
        made_for = "" if self.base_model is None else f", made for {self.base_model}"
        return f"{self.num_depths} Medusa heads {ends}{made_for}"

    def pack(self) -> None:
        """Lay its weights out for speed, see `models.packed`; it can then only run."""
        pack_linears(self.network, self.target.products)

    def logits(self, hidden: Float[Tensor, "1 D"], num_depths: int) -> Float[Tensor, "L V"]:
        """Logits of the first `num_depths` heads in float32."""
        rows = torch.cat([head(hidden) for head in islice(self.network, num_depths)])
        return (rows if self.network.has_linears else self.target.head(rows)).float()

    def start(self, capacity: int) -> MedusaSession:
        """A session of its own for one request; how many positions it sees makes no difference."""
        return MedusaSession(self)


def load_medusa(
    folder: Path, raw: Mapping[str, object], target: Target, name: str
) -> MedusaDrafter:
    """Read a folder of Medusa heads and bind them to their target; not packed.

    Args:
        folder: of the checkpoint.
        raw: its `config.json`.
        target: on whose device and in whose dtype the heads will run.
        name: of the drafter, for messages.

    Raises:
        UnsupportedModelError, CheckpointError, PairMismatchError: see `parse_medusa_config` and
            `read_heads`.
    """
    config = parse_medusa_config(raw, target.shape, f"{name}/config.json")
    network = read_heads(folder, config, target.shape, name)
    return MedusaDrafter(
        network.to(target.device, target.dtype), target, name=name, base_model=config.base_model
    )


class MedusaSession:
    """One request's last committed position."""

    def __init__(self, drafter: MedusaDrafter) -> None:
        self._drafter = drafter
        self._hidden: Tensor | None = None
        self.length = 0

    def extend(self, features: Float[Tensor, "M F"], token_ids: Int64[Tensor, " M"]) -> None:
        """Take in the final hidden states of the next M committed positions."""
        if features.shape[0]:
            # A view would keep all rows of a prompt in memory.
            self._hidden = features[-1:].clone()
            self.length += features.shape[0]

    def propose(
        self, root_id: int, *, num_depths: int, num_ranks: int, perturb: Perturb | None = None
    ) -> Marginals:
        """Draft the positions that follow the root; see `DraftSession`.

        The heads do not look at the root: it is the target's own choice from the same state.
        """
        assert self._hidden is not None, "no context yet"
        logits = self._drafter.logits(self._hidden, num_depths)
        if perturb is not None:
            logits = perturb(logits, None)
        return top_marginals(logits, num_ranks)
