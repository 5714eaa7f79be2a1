"""The drafter's shape for a given target, and its first weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ddtree.errors import OptionError
from ddtree.models.drafter_config import DrafterConfig
from ddtree.models.drafter_network import DFlashNetwork
from ddtree.models.target import Target
from ddtree.models.transitions import TransitionHead

FIRST_WEIGHTS = ("auto", "target", "random")

_INIT_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """Options of the drafter's shape; what is None follows the target.

    Args:
        block_size: b, slots of one pass, the root included.
        num_layers: decoder layers.
        target_layer_ids: 0-based target layers whose outputs are the features; None: five of them,
            spread from the second to the third last.
        mask_token_id: row of the target's embedding that stands for "undecided"; None: an unused
            row, else an unused special token.
        intermediate_size: width of the MLP.
        draft_vocab_size: how many of the most frequent tokens of the responses the drafter can say;
            None: all.
        transition_rank: r of a head that scores each token behind the one before it, see
            `models.transitions`; None: no such head.
        first_weights: "target" begins with the target's last layers, see `first_layers`; "random"
            does not; "auto" does where the target's layers are like the drafter's.

    Raises:
        OptionError: an option outside its range.
    """

    block_size: int = 8
    num_layers: int = 3
    target_layer_ids: tuple[int, ...] | None = None
    mask_token_id: int | None = None
    intermediate_size: int | None = None
    draft_vocab_size: int | None = None
    transition_rank: int | None = None
    first_weights: str = "auto"

    def __post_init__(self) -> None:
        for name, low in (
            ("block_size", 2),
            ("num_layers", 1),
            ("mask_token_id", 0),
            ("intermediate_size", 1),
            ("draft_vocab_size", 1),
            ("transition_rank", 1),
        ):
            value = getattr(self, name)
            optional = name not in ("block_size", "num_layers")
            if not (optional and value is None) and (type(value) is not int or value < low):
                raise OptionError(
                    name,
                    expected=f"a whole number >= {low}",
                    got=repr(value),
                    remedy="Leave it out to follow the target." if optional else f"Try {low + 1}.",
                )
        if self.first_weights not in FIRST_WEIGHTS:
            raise OptionError(
                "first_weights",
                expected=f"one of {', '.join(FIRST_WEIGHTS)}",
                got=repr(self.first_weights),
                remedy="Leave it out to begin with the target's last layers where they fit.",
            )
        taps = self.target_layer_ids
        right = isinstance(taps, tuple) and all(type(tap) is int and tap >= 0 for tap in taps)
        if taps is not None and not (right and 0 < len(set(taps)) == len(taps)):
            raise OptionError(
                "target_layer_ids",
                expected="distinct 0-based layers of the target",
                got=repr(taps),
                remedy="Leave them out for five layers spread over the target.",
            )


def spread_taps(num_target_layers: int, num_taps: int = 5) -> tuple[int, ...]:
    """Layers from the second to the third last, evenly, as published DFlash drafters have them.

    >>> spread_taps(36)
    (1, 9, 17, 25, 33)
    """
    last = max(num_target_layers - 3, 1)
    taps = {round(1 + i * (last - 1) / (num_taps - 1)) for i in range(num_taps)}
    return tuple(sorted(min(tap, num_target_layers - 1) for tap in taps))


def drafter_config_for(target: Target, options: NetworkConfig) -> DrafterConfig:
    """A DFlash configuration that fits a target.

    Raises:
        OptionError: a layer or token id that the target does not have, or no unused token.
    """
    shape: Any = target.config
    taps = options.target_layer_ids or spread_taps(target.num_layers)
    if max(taps) >= target.num_layers:
        raise OptionError(
            "target_layer_ids",
            expected=f"0-based layers below {target.num_layers}",
            got=str(list(taps)),
            remedy="Leave them out for five layers spread over the target.",
        )
    num_heads = int(shape.num_attention_heads)
    rope = dict(getattr(shape, "rope_parameters", None) or {})
    return DrafterConfig(
        block_size=options.block_size,
        mask_token_id=_mask_token_id(target, options.mask_token_id),
        target_layer_ids=tuple(taps),
        num_target_layers=target.num_layers,
        hidden_size=target.hidden_size,
        intermediate_size=options.intermediate_size or int(shape.intermediate_size),
        num_layers=options.num_layers,
        num_heads=num_heads,
        num_kv_heads=int(shape.num_key_value_heads),
        head_dim=int(getattr(shape, "head_dim", None) or target.hidden_size // num_heads),
        vocab_size=target.vocab_size,
        rms_norm_eps=float(shape.rms_norm_eps),
        attention_bias=False,
        max_position_embeddings=target.context_limit,
        # Plain RoPE of the target's base: the drafter need not follow the target's scaling.
        rope_parameters={"rope_type": "default", "rope_theta": float(rope["rope_theta"])},
        windows=(None,) * options.num_layers,
        causal=(False,) * options.num_layers,
        selector_rank=options.transition_rank,
    )


def _mask_token_id(target: Target, wanted: int | None) -> int:
    """The given id, or an embedding row that no text contains."""
    if wanted is not None:
        if wanted < target.vocab_size:
            return wanted
        raise OptionError(
            "mask_token_id",
            expected=f"a row of the target's embedding, below {target.vocab_size}",
            got=wanted,
            remedy="Leave it out to take an unused one.",
        )
    tokenizer = target.tokenizer
    if tokenizer is not None:
        if len(tokenizer) < target.vocab_size:
            return len(tokenizer)
        template = str(tokenizer.chat_template or "")
        special = set(tokenizer.all_special_tokens)
        unused = [
            token_id
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.special
            and token.content not in special
            and token.content not in template
            and token_id not in target.eos_token_ids
        ]
        if unused:
            return int(max(unused))
    raise OptionError(
        "mask_token_id",
        expected="an id, since this target has neither unused embedding rows nor special tokens",
        got="none",
        remedy="Give the id of a token that its responses never contain.",
    )


def new_network(config: DrafterConfig, *, seed: int) -> DFlashNetwork:
    """A network with random weights (normal, 0.02; norms 1), the same for the same seed."""
    network = DFlashNetwork(config)
    generator = torch.Generator().manual_seed(seed)
    for module in network.modules():
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0.0, _INIT_STD, generator=generator)
            if module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, TransitionHead):
            module.predecessor_codebook.data.normal_(0.0, 1.0, generator=generator)
            # Nothing is added to the logits at first.
            module.successor_codebook.data.zero_()
    return network


def extended(network: DFlashNetwork, config: DrafterConfig, *, seed: int) -> DFlashNetwork:
    """A network with the weights of another one, and random ones for what that did not have.

    Args:
        network: has a part of the tensors that `config` implies.
        config: of the result.
        seed: of what is new.
    """
    whole = new_network(config, seed=seed)
    whole.load_state_dict({**whole.state_dict(), **network.state_dict()})
    return whole


def most_frequent(token_ids: Iterable[int], size: int | None) -> tuple[int, ...] | None:
    """The `size` most frequent tokens, ascending; ties go to the lower id. None for None.

    >>> most_frequent([5, 3, 3, 9, 9], 2)
    (3, 9)
    """
    if size is None:
        return None
    counts = Counter(token_ids)
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    return tuple(sorted(ranked[:size]))
