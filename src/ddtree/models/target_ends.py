"""The two ends of a target, embedding and head, held against a drafter's copies of them.

A drafter borrows both, so a copy in its file may be left out only if it says the same: one that was
trained further would be lost without a word. Knows no formats.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ddtree.errors import UnsupportedModelError
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


def check_copies(
    ends: TargetEnds,
    *,
    embedding: Tensor | None,
    head: Tensor | None,
    draft_token_ids: Tensor | None,
    name: str,
) -> None:
    """Whether a drafter's copies say what the target says, so that they can be left out.

    Equal means: the same numbers after rounding to the narrower of the two dtypes.

    Args:
        ends: of the target.
        embedding: [V, D], or None if the drafter has none.
        head: [Vd, D], or None.
        draft_token_ids: [Vd], the tokens of the head's rows; None for all.
        name: of the drafter.

    Raises:
        UnsupportedModelError: a copy that differs, by how many rows and how much.
    """
    if embedding is not None:
        _check_rows(embedding, ends.embedding, None, f"{name}: embed_tokens.weight", ends.name)
    if head is not None:
        _check_rows(head, ends.head, draft_token_ids, f"{name}: lm_head.weight", ends.name)


def _check_rows(
    own: Tensor, whole: Tensor, token_ids: Tensor | None, what: str, target_name: str
) -> None:
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
    if num_differing:
        raise UnsupportedModelError(
            f"drafter {what}",
            expected=f"the same numbers as target {target_name} has",
            got=f"others in {num_differing} of {own.shape[0]} rows, the first that of token "
            f"{first}, by up to {largest:.3g}",
            remedy="Check that this is the drafter's target; a drafter with an embedding or head "
            "of its own is not supported, and to leave it out would change what it drafts.",
        )


def _unusual(name: str, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"target {name}",
        expected="an embedding and a head that are their weights and nothing more",
        got=what,
        remedy="speculators' format has no words for it: use z-lab's.",
    )
