"""PARD: a small causal language model that predicts several positions at once behind mask tokens.

One pass over [new committed tokens, root, mask, ..., mask] gives at the root and at each mask the
token that follows there (arXiv 2504.18583; amd/PARD-*). It reads tokens alone, so one drafter
serves every target of its vocabulary. Its own cache holds committed tokens and nothing else. Knows
no target but that vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ddtree.errors import CheckpointError, PairMismatchError, UnsupportedModelError
from ddtree.models.drafter import top_marginals
from ddtree.models.drafter_weights import check_finite
from ddtree.models.fused import fuse_layers
from ddtree.models.packed import pack_linears
from ddtree.models.pretrained import parse_model_config, read_model, read_tokenizer
from ddtree.models.target import Target, TargetShape
from ddtree.sampling.coupling import Perturb
from ddtree.types import Marginals

# Of published ones; what a cache must forget here is keys and values alone.
PARD_MODEL_TYPES = ("llama", "qwen2", "qwen3")
# Checkpoints do not say it. AMD and vLLM both run 12; more are allowed, since all masks are one.
NUM_DEPTHS = 12

# Bounds the activations held at once, as the target's prefill does.
_CHUNK_TOKENS = 1024


@dataclass(frozen=True, kw_only=True)
class PardConfig:
    """What a `config.json` says.

    Args:
        model_type: the architecture.
        mask_token_id: of the one token that stands at every position to predict.
        vocab_size: rows of its embedding.
        num_layers: decoder layers.
    """

    model_type: str
    mask_token_id: int
    vocab_size: int
    num_layers: int

    def describe(self, target: TargetShape) -> str:
        """In a few words, for `ddtree doctor`: beside this target."""
        size = f"vocabulary {self.vocab_size}"
        if self.vocab_size == target.vocab_size:
            fits = f"{size}; fits"
        else:
            fits = f"{size} for {target.vocab_size}: loading compares the tokenizers"
        return (
            f"PARD, {self.model_type}, {self.num_layers} layers, mask token {self.mask_token_id}, "
            f"{NUM_DEPTHS} positions in a pass, {fits}"
        )


def is_pard(raw: Mapping[str, object]) -> bool:
    """Whether a `config.json` is PARD's; speculators' "peagle" has the key too and is another."""
    return "speculators_model_type" not in raw and ("pard_token" in raw or "spd_type" in raw)


def parse_pard_config(raw: Mapping[str, object], source: str) -> PardConfig:
    """Read a `config.json`.

    Args:
        raw: its content.
        source: where it comes from, for messages.

    Raises:
        UnsupportedModelError: another kind of parallel drafter, or another architecture.
        CheckpointError: a mask token or sizes that cannot be.
    """
    for key, known in (("spd_type", ("pard",)), ("model_type", PARD_MODEL_TYPES)):
        value = raw.get(key, known[0] if key == "spd_type" else None)
        if value not in known:
            raise UnsupportedModelError(
                f"{source}: {key}",
                expected=f"{' or '.join(known)} in a PARD drafter",
                got=repr(value),
                remedy="Others, such as PARD-2, which reads features too, would draft badly.",
            )
    vocab_size = _count(raw, "vocab_size", 1, None, source)
    return PardConfig(
        model_type=str(raw["model_type"]),
        mask_token_id=_count(raw, "pard_token", 0, vocab_size, source),
        vocab_size=vocab_size,
        num_layers=_count(raw, "num_hidden_layers", 1, None, source),
    )


def _count(raw: Mapping[str, object], key: str, least: int, below: int | None, source: str) -> int:
    value = raw.get(key)
    if type(value) is not int or value < least or (below is not None and value >= below):
        limit = f"from {least} to {below - 1}" if below is not None else f">= {least}"
        raise CheckpointError(
            f"{source}: {key}",
            expected=f"a whole number {limit}",
            got=repr(value),
            remedy="Download the file again, or ask its maker: PARD's own training writes it.",
        )
    return value


def check_vocabulary(
    config: PardConfig, tokenizer: PreTrainedTokenizerBase | None, target: Target, name: str
) -> None:
    """Whether an id means the same token to drafter and target.

    Models of a family round their vocabularies up to different sizes, so where both have a
    tokenizer these decide; else the sizes must be equal.

    Args:
        config: the drafter's.
        tokenizer: the drafter's, or None.
        target: it is to draft for.
        name: of the drafter, for messages.

    Raises:
        PairMismatchError: it does not.
    """
    if tokenizer is not None and target.tokenizer is not None:
        theirs = {index: token for token, index in target.tokenizer.get_vocab().items()}
        differing = [
            (index, token)
            for token, index in tokenizer.get_vocab().items()
            if theirs.get(index, token) != token
        ]
        if differing:
            index, token = min(differing)
            raise PairMismatchError(
                f"drafter {name}: tokenizer",
                expected=f"the tokens of target {target.name}",
                got=f"{token!r} as token {index}, which is {theirs[index]!r} there, and "
                f"{len(differing) - 1} more that differ",
                remedy="Use a drafter of the target's own family.",
            )
    elif config.vocab_size != target.vocab_size:
        raise PairMismatchError(
            f"drafter {name}: vocab_size",
            expected=f"{target.vocab_size} for target {target.name}",
            got=config.vocab_size,
            remedy="Use a drafter of the target's own family; where both have a tokenizer, these "
            "are compared instead.",
        )


class PardDrafter:
    """A PARD model beside its target.

    Args:
        model: the small model, on the target's device and in its dtype.
        config: see `PardConfig`.
        target: whose tokens it proposes.
        name: how to call it in messages.
        num_depths: L; the model does not bound it, but quality falls off.
    """

    layer_ids: tuple[int, ...] = ()

    def __init__(
        self,
        model: Target,
        config: PardConfig,
        target: Target,
        *,
        name: str,
        num_depths: int = NUM_DEPTHS,
    ) -> None:
        self.model = model
        self.config = config
        self.name = name
        self.num_depths = num_depths
        self._products = target.products
        num_tokens = min(model.vocab_size, target.vocab_size)
        self._num_tokens = num_tokens
        # Where the target has more rows, columns must say which tokens they are.
        self._token_ids = (
            None
            if num_tokens == target.vocab_size
            else torch.arange(num_tokens, device=target.device)
        )

    @property
    def network(self) -> nn.Module:
        """The small model itself."""
        network: nn.Module = self.model.model
        return network

    def describe(self) -> str:
        """In a few words."""
        config = self.config
        return (
            f"a PARD drafter, {config.model_type} of {config.num_layers} layers, "
            f"{self.num_depths} positions in a pass"
        )

    def pack(self) -> None:
        """Lay its weights out for speed, see `models.packed`; it can then only run."""
        fuse_layers(pack_linears(self.network, self._products))

    def known(self, token_ids: Int64[Tensor, " M"]) -> Int64[Tensor, " M"]:
        """The same tokens; the mask in place of those that only the target's padding has."""
        return token_ids.where(token_ids < self.model.vocab_size, self.config.mask_token_id)

    def marginals(
        self, logits: Float[Tensor, "L V"], num_ranks: int, perturb: Perturb | None
    ) -> Marginals:
        """Of the model's logits, over the tokens that the target has too."""
        logits = logits[:, : self._num_tokens].float()
        if perturb is not None:
            logits = perturb(logits, self._token_ids)
        return top_marginals(logits, num_ranks, self._token_ids)

    def start(self, capacity: int) -> PardSession:
        """A session of its own for one request, with room for `capacity` positions."""
        return PardSession(self, capacity)


def load_pard(folder: Path, raw: Mapping[str, object], target: Target, name: str) -> PardDrafter:
    """Read a folder of a PARD model and bind it to a target; not packed.

    Args:
        folder: of the checkpoint.
        raw: its `config.json`.
        target: on whose device and in whose dtype it will run.
        name: of the drafter, for messages.

    Raises:
        UnsupportedModelError, CheckpointError, PairMismatchError: see `parse_pard_config`,
            `check_vocabulary` and `models.pretrained`; also numbers that are not finite.
    """
    config = parse_pard_config(raw, f"{name}/config.json")
    what = f"drafter {name}"
    parse_model_config(folder, raw, what)
    check_vocabulary(config, read_tokenizer(folder), target, name)
    model = read_model(folder, what, target.dtype).to(target.device)
    for key, tensor in model.named_parameters():
        check_finite(key, tensor.detach(), name)
    return PardDrafter(Target(model, None, name=name), config, target, name=name)


class PardSession:
    """The model's cache of one request: keys and values of committed tokens only.

    Tokens wait until the next pass needs them: where nothing is drafted they cost nothing.
    """

    def __init__(self, drafter: PardDrafter, capacity: int) -> None:
        self._drafter = drafter
        self._cache = drafter.model.new_cache(capacity + drafter.num_depths)
        self._waiting: list[Tensor] = []

    @property
    def length(self) -> int:
        """Context positions seen; equals the target cache's length between rounds."""
        return self._cache.length + sum(part.shape[0] for part in self._waiting)

    def extend(self, features: Float[Tensor, "M F"], token_ids: Int64[Tensor, " M"]) -> None:
        """Take in the tokens at the next M committed positions."""
        self._waiting.append(token_ids)

    def propose(
        self, root_id: int, *, num_depths: int, num_ranks: int, perturb: Perturb | None = None
    ) -> Marginals:
        """Draft the positions that follow the root; see `DraftSession`."""
        drafter, cache = self._drafter, self._cache
        block = torch.full((num_depths,), drafter.config.mask_token_id, device=drafter.model.device)
        block[0] = root_id
        ids = drafter.known(torch.cat([*self._waiting, block]))
        start = self.length
        while ids.shape[0] > _CHUNK_TOKENS + num_depths:
            drafter.model.prefill(ids[:_CHUNK_TOKENS], cache)
            ids = ids[_CHUNK_TOKENS:]
        logits = drafter.model.prefill(ids, cache, num_logits=num_depths).logits
        self._waiting.clear()
        cache.keep(start, ())  # root and masks leave no trace
        return drafter.marginals(logits, num_ranks, perturb)
