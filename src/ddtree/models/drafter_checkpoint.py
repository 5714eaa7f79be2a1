"""A drafter's folder in whichever format it is: what it declares, then what it holds, checked.

Two steps, because whether a drafter fits a target is asked before gigabytes are read. Knows no
target: an embedding and a head that a folder carries are handed on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ddtree.errors import UnsupportedModelError
from ddtree.models.draft_vocabulary import read_draft_vocabulary
from ddtree.models.drafter_config import DrafterConfig, parse_drafter_config
from ddtree.models.drafter_network import DFlashNetwork
from ddtree.models.drafter_weights import check_finite, check_tensors, read_tensors
from ddtree.models.folder import read_config
from ddtree.models.medusa import is_medusa
from ddtree.models.pard import is_pard
from ddtree.models.speculators import is_speculators, parse_speculators_config, verifier_name
from ddtree.models.speculators_tensors import split_tensors

DrafterFormat = Literal["z-lab", "speculators"]
Z_LAB: DrafterFormat = "z-lab"
SPECULATORS: DrafterFormat = "speculators"
FORMATS: tuple[DrafterFormat, ...] = (Z_LAB, SPECULATORS)


@dataclass(frozen=True, kw_only=True)
class DrafterDeclaration:
    """What a drafter's `config.json` says.

    Args:
        format: of the folder.
        config: the drafter's.
        verifier: the target that it names, if its format has a place for that.
    """

    format: DrafterFormat
    config: DrafterConfig
    verifier: str | None


@dataclass(frozen=True, kw_only=True)
class DrafterCheckpoint:
    """What a drafter's folder holds.

    Args:
        tensors: those of the network, exactly, as they are stored.
        draft_token_ids: [Vd] int64, ascending; None if every token can be proposed.
        embedding: [V, D], a copy of the target's or one of its own, which `target_ends` tells;
            None without one.
        head: [Vd, D], the same of the head's rows.
    """

    tensors: Mapping[str, Tensor]
    draft_token_ids: Tensor | None
    embedding: Tensor | None = None
    head: Tensor | None = None


def read_declaration(folder: Path, name: str) -> DrafterDeclaration:
    """Find the format of a drafter and read its configuration.

    Args:
        folder: of the checkpoint.
        name: of the drafter, for messages.

    Raises:
        ModelNotFoundError, CheckpointError, UnsupportedModelError: see `loading.load_drafter`.
    """
    raw, source = read_config(folder, "drafter"), f"{name}/config.json"
    if is_medusa(raw) or is_pard(raw):
        raise UnsupportedModelError(
            f"drafter {name}",
            expected="a DFlash drafter",
            got="Medusa heads" if is_medusa(raw) else "a PARD drafter",
            remedy="It can be drafted with as it is; there is no other format of it.",
        )
    if is_speculators(raw):
        config = parse_speculators_config(raw, source)
        return DrafterDeclaration(format=SPECULATORS, config=config, verifier=verifier_name(raw))
    return DrafterDeclaration(format=Z_LAB, config=parse_drafter_config(raw, source), verifier=None)


def read_checkpoint(
    folder: Path, declared: DrafterDeclaration, *, vocab_size: int, name: str
) -> DrafterCheckpoint:
    """Read a drafter's tensors and vocabulary, and hold them against its configuration.

    Args:
        folder: of the checkpoint.
        declared: what `read_declaration` found there.
        vocab_size: V of the target.
        name: of the drafter, for messages.

    Raises:
        CheckpointError: tensors missing, left over, misshapen or not finite, or a broken draft
            vocabulary.
        UnsupportedModelError: tensors of a variant that would be silently wrong.
    """
    config = declared.config
    if declared.format == SPECULATORS:
        parts = split_tensors(read_tensors(folder, name), config, name)
        checkpoint = DrafterCheckpoint(
            tensors=parts.network,
            draft_token_ids=parts.draft_token_ids,
            embedding=parts.embedding,
            head=parts.head,
        )
    else:
        draft_token_ids = read_draft_vocabulary(folder, config, vocab_size, name)
        checkpoint = DrafterCheckpoint(
            tensors=read_tensors(folder, name), draft_token_ids=draft_token_ids
        )
    with torch.device("meta"):
        network = DFlashNetwork(config)
    check_tensors(checkpoint.tensors, network, name)
    for key, tensor in checkpoint.tensors.items():
        check_finite(key, tensor, name)
    return checkpoint
