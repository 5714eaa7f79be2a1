"""What a training begins with: a drafter, the target's own layers, or random weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ddtree.errors import UnsupportedModelError
from ddtree.models.drafter import DFlashDrafter
from ddtree.models.drafter_network import DFlashNetwork
from ddtree.models.loading import LoadedDrafter, load_drafter
from ddtree.models.target import Target
from ddtree.train.first_layers import begin_as_target, why_not
from ddtree.train.network import (
    NetworkConfig,
    drafter_config_for,
    extended,
    most_frequent,
    new_network,
)


@dataclass(frozen=True, kw_only=True)
class FirstWeights:
    """A network at step 0.

    Args:
        network: in float32 on the CPU or where the drafter was loaded.
        draft_token_ids: the tokens that can be drafted; None: all.
        layers: the target's layers that its own begin as; None: they do not.
    """

    network: DFlashNetwork
    draft_token_ids: tuple[int, ...] | None
    layers: list[int] | None


def first_weights(
    target: Target,
    shape: NetworkConfig,
    *,
    start_from: str | None,
    said: Sequence[int],
    some_text: Sequence[int],
    seed: int,
) -> FirstWeights:
    """The first weights that a recipe asks for.

    Args:
        target: not packed; its layers may be copied.
        shape: of a new network; of one to start from, what it lacks.
        start_from: a drafter, by hub id or folder.
        said: response tokens, whose most frequent ones a reduced vocabulary holds.
        some_text: of the target, to size what it does not normalise (`begin_as_target`).
        seed: of random weights.

    Raises:
        UnsupportedModelError: a drafter that cannot be trained on, or a target without such layers.
    """
    if start_from is not None:
        return _of_drafter(target, shape, start_from, said, seed)
    ids = most_frequent(said, shape.draft_vocab_size)
    config = drafter_config_for(target, shape)
    config = config if ids is None else replace(config, draft_vocab_size=len(ids))
    network, layers = new_network(config, seed=seed), None
    wanted = shape.first_weights
    if wanted == "target" or (wanted == "auto" and why_not(network, target) is None):
        layers = begin_as_target(network, target, some_text)
    return FirstWeights(network=network, draft_token_ids=ids, layers=layers)


def _of_drafter(
    target: Target, shape: NetworkConfig, start_from: str, said: Sequence[int], seed: int
) -> FirstWeights:
    drafter = _trainable(load_drafter(start_from, target, packed=False))
    network, config = drafter.network.to(torch.float32), drafter.config
    known = drafter.draft_token_ids
    if known is None:
        # A head over the whole vocabulary has rows that a smaller one would not.
        bound = None if config.selector_rank else shape.draft_vocab_size
        ids = most_frequent(said, bound)
    else:
        ids = tuple(known.tolist())
    if shape.transition_rank is not None and config.selector_rank is None:
        size = None if ids is None else len(ids)
        config = replace(config, selector_rank=shape.transition_rank, draft_vocab_size=size)
        network = extended(network, config, seed=seed)
    return FirstWeights(network=network, draft_token_ids=ids, layers=None)


def _trainable(drafter: LoadedDrafter) -> DFlashDrafter:
    """What is trained borrows the target's ends, and its slots predict their own positions."""
    if not isinstance(drafter, DFlashDrafter):
        raise UnsupportedModelError(
            "start_from",
            expected="a DFlash drafter",
            got=f"{drafter.name}, {drafter.describe()}",
            remedy="Only DFlash is trained here: start from such a one, or from random weights.",
        )
    own = ["sample_from_anchor"] if drafter.config.sample_from_anchor else []
    own += [f"its own {name}" for name in drafter.own_tensors]
    if own:
        raise UnsupportedModelError(
            "start_from",
            expected="a drafter that borrows the target's embedding and head, and whose slots "
            "predict their own positions",
            got=f"{drafter.name} with {' and '.join(own)}",
            remedy="The drafters that are written have no place for that: start from another one, "
            "or from random weights.",
        )
    return drafter
