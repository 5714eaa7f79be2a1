"""The tensors of a DFlash checkpoint in speculators' format: told apart, checked, put together.

Beside z-lab's set there are an embedding and a head, mostly copies of the target's, and the map of
a reduced vocabulary: token id = i + d2t[i] (CHECKPOINTS B). Whether they are the target's, is asked
in `target_ends`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.errors import CheckpointError
from ddtree.models.drafter_config import DrafterConfig

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
OFFSETS, MEMBERS = "d2t", "t2d"
# Copies of the target's weights that older files carry for training; drafting never used them.
VERIFIER_NORM, VERIFIER_HEAD = "verifier_norm.weight", "verifier_lm_head.weight"
_APART = frozenset({EMBEDDING, HEAD, OFFSETS, MEMBERS, VERIFIER_NORM, VERIFIER_HEAD})
_REMEDY = "The tensors and config.json do not belong together: download the checkpoint again."
_VOCABULARY_REMEDY = "d2t, t2d and draft_vocab_size must come from one and the same drafter."


@dataclass(frozen=True, kw_only=True)
class SpeculatorsTensors:
    """The tensors of such a checkpoint, told apart.

    Args:
        network: those of z-lab's format; not checked yet.
        draft_token_ids: [Vd] int64, ascending; None if every token can be proposed.
        embedding: [V, D], the target's or its own; None where the file leaves it out.
        head: [Vd, D], the same of the head's rows.
    """

    network: Mapping[str, Tensor]
    draft_token_ids: Tensor | None
    embedding: Tensor | None
    head: Tensor | None


def split_tensors(
    tensors: Mapping[str, Tensor], config: DrafterConfig, name: str
) -> SpeculatorsTensors:
    """Tell the network's tensors from embedding, head and the vocabulary's map.

    Args:
        tensors: all of the checkpoint's.
        config: of this checkpoint, so `vocab_size` is there.
        name: of the drafter, for messages.

    Raises:
        CheckpointError: one of the ends or of the map is missing, misshapen or contradictory.
    """
    vocab_size = config.vocab_size
    assert vocab_size is not None
    size, hidden = config.draft_vocab_size, config.hidden_size
    _check_ends(tensors, name, vocab_size, size or vocab_size, hidden)
    draft_token_ids = _draft_token_ids(tensors, name, vocab_size, size)
    if size is not None and HEAD not in tensors:
        wanted = f"the head of its {size} tokens, {HEAD} [{size}, {hidden}]"
        raise _misfit(name, HEAD, wanted, "none")
    return SpeculatorsTensors(
        network={key: tensor for key, tensor in tensors.items() if key not in _APART},
        draft_token_ids=draft_token_ids,
        embedding=tensors.get(EMBEDDING),
        head=tensors.get(HEAD),
    )


def _check_ends(
    tensors: Mapping[str, Tensor], name: str, vocab_size: int, size: int, hidden: int
) -> None:
    """Shapes and kinds of what is, or was, the target's."""
    shapes: dict[str, tuple[list[int], ...]] = {
        EMBEDDING: ([vocab_size, hidden],),
        HEAD: ([size, hidden],),
        VERIFIER_NORM: ([hidden],),
        VERIFIER_HEAD: ([size, hidden], [vocab_size, hidden]),
    }
    for key, allowed in shapes.items():
        tensor = tensors.get(key)
        if tensor is None:
            continue
        if list(tensor.shape) not in allowed:
            raise _misfit(name, key, " or ".join(map(str, allowed)), str(list(tensor.shape)))
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise _misfit(name, key, "float32, bfloat16 or float16", str(tensor.dtype))


def _draft_token_ids(
    tensors: Mapping[str, Tensor], name: str, vocab_size: int, size: int | None
) -> Tensor | None:
    """The target's id of each token that can be proposed; None for all."""
    if size is None and OFFSETS not in tensors and MEMBERS not in tensors:
        return None
    width = size or vocab_size
    for key, length, dtype in ((OFFSETS, width, "int64"), (MEMBERS, vocab_size, "bool")):
        tensor = tensors.get(key)
        got = "no such tensor" if tensor is None else _kind(tensor)
        if got != f"{dtype} [{length}]":
            wanted = f"{dtype} [{length}], as draft_vocab_size implies"
            raise _misfit(name, key, wanted, got, _VOCABULARY_REMEDY)
    token_ids = torch.arange(width) + tensors[OFFSETS]
    outside = ((token_ids < 0) | (token_ids >= vocab_size)).nonzero()
    if outside.numel():
        i = int(outside[0])
        got = f"{i} + {int(tensors[OFFSETS][i])} = {int(token_ids[i])} at index {i}"
        wanted = f"token ids i + d2t[i] from 0 to {vocab_size - 1}"
        raise _misfit(name, OFFSETS, wanted, got, _VOCABULARY_REMEDY)
    descents = (token_ids[1:] <= token_ids[:-1]).nonzero()
    if descents.numel():
        i = int(descents[0])
        got = f"{int(token_ids[i])}, {int(token_ids[i + 1])} at index {i}"
        raise _misfit(name, OFFSETS, "ascending, distinct token ids", got, _VOCABULARY_REMEDY)
    wrong = (tensors[MEMBERS] != _members(token_ids, vocab_size)).nonzero()
    if wrong.numel():
        i = int(wrong[0])
        got = f"{str(bool(tensors[MEMBERS][i])).lower()} at index {i}"
        wanted = "true for the tokens of d2t and false for all others"
        raise _misfit(name, MEMBERS, wanted, got, _VOCABULARY_REMEDY)
    return None if size is None else token_ids


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _members(token_ids: Tensor, vocab_size: int) -> Tensor:
    members = torch.zeros(vocab_size, dtype=torch.bool)
    members[token_ids] = True
    return members


def joined_tensors(
    network: Mapping[str, Tensor],
    *,
    draft_token_ids: Tensor | None,
    embedding: Tensor,
    head: Tensor,
) -> dict[str, Tensor]:
    """All tensors of a checkpoint in this format.

    Args:
        network: those of z-lab's format.
        draft_token_ids: [Vd], ascending; None for all.
        embedding: [V, D].
        head: [Vd, D]; may be the embedding itself.
    """
    # A file cannot hold one tensor under two names.
    head = head.clone() if head is embedding else head
    whole = {**network, EMBEDDING: embedding, HEAD: head}
    if draft_token_ids is None:
        return whole
    members = _members(draft_token_ids, embedding.shape[0])
    offsets = draft_token_ids - torch.arange(draft_token_ids.shape[0])
    return {**whole, OFFSETS: offsets, MEMBERS: members}


def _misfit(name: str, key: str, expected: str, got: str, remedy: str = _REMEDY) -> CheckpointError:
    return CheckpointError(f"drafter {name}: {key}", expected=expected, got=got, remedy=remedy)
