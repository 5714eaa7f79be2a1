"""The draft vocabulary: the target's tokens that a drafter can propose (docs/decisions/0006).

A side file of ours beside a checkpoint in z-lab's format, whose size `config.json` declares. Other
loaders know neither and use the target's whole head, which is right too, only slower.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ddtree.errors import CheckpointError
from ddtree.models.drafter_config import DrafterConfig
from ddtree.models.folder import read_config

VOCABULARY_FILE = "draft_vocabulary.json"


def read_draft_vocabulary(
    folder: Path, config: DrafterConfig, vocab_size: int, name: str
) -> Tensor | None:
    """The ids of the tokens that the drafter can propose.

    Args:
        folder: of the checkpoint.
        config: says how many there are, if not all.
        vocab_size: V of the target.
        name: of the drafter, for messages.

    Returns:
        [Vd] int64, ascending; None if the drafter can propose all.

    Raises:
        CheckpointError: file and configuration do not belong together, or the ids are broken.
    """
    source = f"{name}/{VOCABULARY_FILE}"
    size, found = config.draft_vocab_size, (folder / VOCABULARY_FILE).exists()
    if size is None:
        if found:
            raise _broken(source, "draft_vocab_size in the dflash_config of config.json", "none")
        return None
    if not found:
        raise _broken(source, f"a file with {size} token ids, as config.json declares", "no file")
    declared = read_config(folder, "drafter", VOCABULARY_FILE)
    return checked_token_ids(declared.get("token_ids"), size, vocab_size, source)


def checked_token_ids(token_ids: object, size: int, vocab_size: int | None, source: str) -> Tensor:
    """The ids as a tensor [Vd] int64.

    Args:
        token_ids: what came: right is a list of `size` ascending, distinct ids.
        size: Vd, as the configuration declares it.
        vocab_size: V of the target, or None if not known.
        source: the file, for messages.

    Raises:
        CheckpointError: anything else.
    """
    if not isinstance(token_ids, list) or not token_ids:
        raise _broken(source, "token_ids, a list of token ids", repr(token_ids))
    if len(token_ids) != size:
        raise _broken(source, f"{size} token ids, as config.json declares", str(len(token_ids)))
    limit = 2**63 if vocab_size is None else vocab_size
    for place, token_id in enumerate(token_ids):
        if type(token_id) is not int or not 0 <= token_id < limit:
            wanted = "whole numbers >= 0" + ("" if vocab_size is None else f" and < {vocab_size}")
            raise _broken(source, f"token ids that are {wanted}", f"{token_id!r} at index {place}")
        if place and token_ids[place - 1] >= token_id:
            pair = f"{token_ids[place - 1]}, {token_id} at index {place - 1}"
            raise _broken(source, "ascending, distinct token ids", pair)
    return torch.tensor(token_ids, dtype=torch.int64)


def _broken(source: str, expected: str, got: str) -> CheckpointError:
    return CheckpointError(
        source,
        expected=expected,
        got=got,
        remedy="The ids and draft_vocab_size must come from one and the same drafter.",
    )
