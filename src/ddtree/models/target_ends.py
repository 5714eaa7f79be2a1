"""The two ends of a target, embedding and head, held against those in a drafter's file.

What says the same is the target's, and not held twice; what was trained further is the drafter's
own. Knows no files.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ddtree.errors import CheckpointError, UnsupportedModelError
from ddtree.models.drafter_checkpoint import DrafterCheckpoint
from ddtree.models.drafter_weights import check_finite
from ddtree.models.speculators_tensors import EMBEDDING, HEAD
from ddtree.models.target import Target

_ROWS_AT_A_TIME = 8192


@dataclass(frozen=True, kw_only=True)
class TargetEnds:
    """Embedding and head of a target.

    Args:
        name: of the target, for messages.
        embedding: [V, D].
        head: [V, D]; may be the embedding itself.
        architectures: as its `config.json` names them.
    """

    name: str
    embedding: Tensor
    head: Tensor
    architectures: tuple[str, ...] = ()


def ends_of(target: Target) -> TargetEnds:
    """The ends of a loaded target.

    Raises:
        UnsupportedModelError: see `refuse_unusual_ends`.
    """
    embedding, head = target.model.get_input_embeddings(), target.model.get_output_embeddings()
    refuse_unusual_ends(embedding, head, target.name)
    return TargetEnds(name=target.name, embedding=embedding.weight, head=head.weight)


def refuse_unusual_ends(embedding: nn.Module, head: nn.Module, name: str) -> None:
    """Rows of weights alone say what these two modules do, or not.

    Raises:
        UnsupportedModelError: an embedding that scales, or a head with a bias.
    """
    if type(embedding) is not nn.Embedding:
        raise _unusual(name, f"an embedding of the kind {type(embedding).__name__}")
    if getattr(head, "bias", None) is not None:
        raise _unusual(name, "a head with a bias")


@dataclass(frozen=True, kw_only=True)
class OwnEnd:
    """An embedding or head of a drafter that is not the target's.

    Args:
        key: the name of its tensor.
        rows: [V or Vd, D], as they are stored.
        num_differing: rows that the target has otherwise.
        first_token: the token of the first of them.
        largest_gap: between two numbers of them.
    """

    key: str
    rows: Tensor
    num_differing: int
    first_token: int
    largest_gap: float

    @property
    def difference(self) -> str:
        """How it differs from the target's, for people."""
        return (
            f"others in {self.num_differing} of {self.rows.shape[0]} rows, the first that of "
            f"token {self.first_token}, by up to {self.largest_gap:.3g}"
        )


@dataclass(frozen=True, kw_only=True)
class OwnEnds:
    """What of a drafter's embedding and head says something else than the target's.

    Args:
        embedding: [V, D], or None where the target's will do.
        head: [Vd, D], or None.
    """

    embedding: OwnEnd | None = None
    head: OwnEnd | None = None

    @property
    def found(self) -> tuple[OwnEnd, ...]:
        """Those that are there."""
        return tuple(end for end in (self.embedding, self.head) if end is not None)


def own_ends(read: DrafterCheckpoint, ends: TargetEnds, name: str) -> OwnEnds:
    """Which of a drafter's two ends it must keep, since the target says something else.

    The same means: the same numbers after rounding to the narrower of the two dtypes.

    Args:
        read: the drafter.
        ends: of the target.
        name: of the drafter.

    Raises:
        CheckpointError: one that differs, and has numbers that are not finite; or an embedding
            that differs without a head beside it.
    """
    own = OwnEnds(
        embedding=_own_end(EMBEDDING, read.embedding, ends.embedding, None, name),
        head=_own_end(HEAD, read.head, ends.head, read.draft_token_ids, name),
    )
    if own.embedding is not None and read.head is None:
        # It may stand for the head as well, or the target's head may be meant.
        raise CheckpointError(
            f"drafter {name}: {HEAD}",
            expected=f"a head beside {EMBEDDING}, which is not target {ends.name}'s",
            got=f"none, and {own.embedding.difference}",
            remedy="Check that this is the drafter's target; if it is, ask the drafter's maker "
            "for its head.",
        )
    return own


def _own_end(
    key: str, own: Tensor | None, whole: Tensor, token_ids: Tensor | None, name: str
) -> OwnEnd | None:
    if own is None:
        return None
    whole = whole.detach()
    dtype = own.dtype if own.itemsize <= whole.itemsize else whole.dtype
    num_differing, first, largest = 0, -1, 0.0
    for begin in range(0, own.shape[0], _ROWS_AT_A_TIME):
        part = own[begin : begin + _ROWS_AT_A_TIME].to(dtype)
        rows = torch.arange(begin, begin + part.shape[0])
        ids = rows if token_ids is None else token_ids[rows]
        theirs = whole[ids.to(whole.device)].to("cpu", dtype)
        differing = (part != theirs).any(dim=1).nonzero().flatten()
        if not differing.numel():
            continue
        first = int(ids[differing[0]]) if first < 0 else first
        num_differing += differing.numel()
        gap = (part[differing].float() - theirs[differing].float()).abs()
        largest = max(largest, float(gap.nan_to_num(torch.inf).max()))
    if not num_differing:
        return None
    check_finite(key, own, name)
    return OwnEnd(
        key=key, rows=own, num_differing=num_differing, first_token=first, largest_gap=largest
    )


def _unusual(name: str, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"target {name}",
        expected="an embedding and a head that are their weights and nothing more",
        got=what,
        remedy="speculators' format has no words for it: use z-lab's.",
    )
