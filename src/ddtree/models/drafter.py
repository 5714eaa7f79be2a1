"""The DFlash network and its session: one pass gives a distribution for each of L positions.

Features of the context become keys and values of every layer, once per position; the block
[root, mask, ..., mask] attends to them and to itself (arXiv 2602.06036; CHECKPOINTS A). Knows the
target only by its embedding and head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    rotate_half,
)

from ddtree.cache.store import KVStore
from ddtree.models.drafter_config import DrafterConfig
from ddtree.models.fused import fuse_layers
from ddtree.models.packed import pack_linears
from ddtree.models.target import Target
from ddtree.sampling.coupling import Perturb
from ddtree.types import Marginals

_Rotation = tuple[Tensor, Tensor]

# Positions whose features wait at most: they take more memory than keys and values made of them.
_MOST_WAITING = 256


def _rotate(states: Tensor, rotation: _Rotation) -> Tensor:
    """Apply RoPE to [R, H, S, d] with cos and sin [1 or R, S, d]."""
    cos, sin = rotation
    rotated: Tensor = states * cos[:, None] + rotate_half(states) * sin[:, None]
    return rotated


class _Attention(nn.Module):
    """Queries from the block; keys and values from context and block."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width, kv_width = config.num_heads * self.head_dim, config.num_kv_heads * self.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, width, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.view(*projected.shape[:-1], -1, self.head_dim)

    def keys_values(self, x: Tensor, rotation: _Rotation) -> tuple[Tensor, Tensor]:
        """Keys (normed, rotated) and values of rows x [R, S, D], each [R, H, S, d]."""
        keys = self.k_norm(self._heads(self.k_proj(x))).transpose(1, 2)
        return _rotate(keys, rotation), self._heads(self.v_proj(x)).transpose(1, 2)

    def forward(
        self, x: Tensor, rotation: _Rotation, store: KVStore, mask: Tensor | None
    ) -> Tensor:
        """Attend from block rows x [1, b, D]; the store is left as it was."""
        context_length = store.length
        store.append(*self.keys_values(x, rotation))
        attended = self.attend(x, rotation, store.keys, store.values, mask)
        store.crop(context_length)
        return attended

    def attend(
        self, x: Tensor, rotation: _Rotation, keys: Tensor, values: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Attend from rows x [S, Q, D] to keys and values [S, H, M, d]."""
        queries = _rotate(self.q_norm(self._heads(self.q_proj(x))).transpose(1, 2), rotation)
        attended = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, enable_gqa=True
        )
        projected: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return projected


class _Layer(nn.Module):
    def __init__(self, config: DrafterConfig, shape: Qwen3Config) -> None:
        super().__init__()
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = Qwen3MLP(shape)

    def forward(
        self, h: Tensor, rotation: _Rotation, store: KVStore, mask: Tensor | None
    ) -> Tensor:
        h = h + self.self_attn(self.input_layernorm(h), rotation, store, mask)
        return self._feed_forward(h)

    def packed(
        self, h: Tensor, rotation: _Rotation, context: tuple[Tensor, Tensor], mask: Tensor
    ) -> Tensor:
        """The same for many blocks side by side, h [S, Q, D], behind keys and values of context."""
        x = self.input_layernorm(h)
        keys, values = self.self_attn.keys_values(x, rotation)
        keys, values = torch.cat([context[0], keys], 2), torch.cat([context[1], values], 2)
        h = h + self.self_attn.attend(x, rotation, keys, values, mask)
        return self._feed_forward(h)

    def _feed_forward(self, h: Tensor) -> Tensor:
        out: Tensor = h + self.mlp(self.post_attention_layernorm(h))
        return out


class DFlashNetwork(nn.Module):
    """The network; parameter names are those of z-lab's checkpoints.

    Args:
        config: see `DrafterConfig`.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        shape = Qwen3Config(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=dict(config.rope_parameters),
        )
        num_features = len(config.target_layer_ids) * config.hidden_size
        self.fc = nn.Linear(num_features, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(_Layer(config, shape) for _ in range(config.num_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary = Qwen3RotaryEmbedding(shape)

    def extend(self, features: Float[Tensor, "M F"], stores: list[KVStore]) -> None:
        """Append the context entries of M further positions to each layer's store, in place."""
        start = stores[0].length
        c = self.hidden_norm(self.fc(features))[None]
        rotation = self._rotation(c, start, start + features.shape[0])
        for layer, store in zip(self.layers, stores, strict=True):
            # c skips input_layernorm: only the block goes through it.
            assert isinstance(layer, _Layer)
            store.append(*layer.self_attn.keys_values(c, rotation))

    def forward(self, block: Float[Tensor, "b D"], stores: list[KVStore]) -> Float[Tensor, "b D"]:
        """One pass over the embedded block; returns final-normed hidden states per slot."""
        start, size = stores[0].length, block.shape[0]
        h = block[None]
        rotation = self._rotation(h, start, start + size)
        for i, (layer, store) in enumerate(zip(self.layers, stores, strict=True)):
            window, causal = self.config.windows[i], self.config.causal[i]
            h = layer(h, rotation, store, _block_mask(start, size, window, causal, h.device))
        normed: Tensor = self.norm(h[0])
        return normed

    def forward_packed(
        self,
        features: Float[Tensor, "S T F"],
        blocks: Float[Tensor, "S Q D"],
        positions: Int64[Tensor, "S Q"],
        masks: Sequence[Bool[Tensor, "S 1 Q T+Q"]],
    ) -> Float[Tensor, "S Q D"]:
        """Many blocks of S sequences in one pass, for training; see `train.packing`.

        Args:
            features: of positions [0, T) of each sequence, padded at the end.
            blocks: embedded slots of all blocks of a sequence, side by side.
            positions: of each slot.
            masks: per layer, which slot sees which of the T positions and Q slots.

        Returns:
            Final-normed hidden states per slot, as `forward` gives for one block.
        """
        c = self.hidden_norm(self.fc(features))
        context_rotation = self._rotation(c, 0, features.shape[1])
        cos, sin = self.rotary(blocks, positions)
        h = blocks
        for layer, mask in zip(self.layers, masks, strict=True):
            assert isinstance(layer, _Layer)
            context = layer.self_attn.keys_values(c, context_rotation)
            h = layer.packed(h, (cos, sin), context, mask)
        normed: Tensor = self.norm(h)
        return normed

    def _rotation(self, like: Tensor, start: int, end: int) -> _Rotation:
        positions = torch.arange(start, end, device=like.device)[None]
        cos, sin = self.rotary(like, positions)
        return cos, sin


def _block_mask(
    start: int, size: int, window: int | None, causal: bool, device: torch.device
) -> Bool[Tensor, "1 1 b S"] | None:
    """Who sees whom in one drafter layer; None where every slot sees context and block."""
    if window is None and not causal:
        return None
    query = torch.arange(start, start + size, device=device)[:, None]
    key = torch.arange(start + size, device=device)[None]
    mask = torch.ones((size, start + size), dtype=torch.bool, device=device)
    if window is not None:
        mask &= (query - key < window) & (key - query < window)
    if causal:
        mask &= key <= query
    return mask[None, None]


class DFlashDrafter:
    """A DFlash network bound to its target.

    Args:
        network: on the target's device and in its dtype.
        target: lends its embedding and head.
        name: how to call it in messages.
        draft_token_ids: [Vd], the only target tokens it can propose; None for all. The head's rows
            of these are copied, and the softmax is over them alone.
    """

    def __init__(
        self,
        network: DFlashNetwork,
        target: Target,
        *,
        name: str,
        draft_token_ids: Int64[Tensor, " Vd"] | None = None,
    ) -> None:
        self.network = network.eval()
        self.target = target
        self.name = name
        self.config = network.config
        self.layer_ids = self.config.target_layer_ids
        self.num_depths = self.config.block_size - 1
        self.draft_token_ids: Tensor | None = None
        self._head: Callable[[Tensor], Tensor] = target.head
        if draft_token_ids is not None:
            self.draft_token_ids = draft_token_ids.to(target.device)
            self._head = target.head_of(self.draft_token_ids)

    def pack(self) -> None:
        """Lay its weights out for speed, see `models.packed`; it can then only run."""
        fuse_layers(pack_linears(self.network))
        if isinstance(self._head, nn.Module):
            self._head = pack_linears(self._head)

    def logits(self, hidden: Float[Tensor, "L D"]) -> Float[Tensor, "L Vd"]:
        """Scaled and capped logits in float32, one column per token that can be proposed."""
        return shaped_logits(self._head(hidden).float(), self.config)

    def start(self, capacity: int) -> DFlashSession:
        """A session of its own for one request, with room for `capacity` positions."""
        return DFlashSession(self, capacity)


class DFlashSession:
    """The drafter's context of one request: keys and values of committed positions only.

    Features wait until the next pass needs them: where nothing is drafted they cost nothing.
    """

    def __init__(self, drafter: DFlashDrafter, capacity: int) -> None:
        self._drafter = drafter
        room = capacity + drafter.config.block_size
        self._stores = [KVStore(room) for _ in drafter.network.layers]
        self._waiting: list[Tensor] = []

    @property
    def length(self) -> int:
        """Context positions seen; equals the target cache's length between rounds."""
        return self._stores[0].length + sum(part.shape[0] for part in self._waiting)

    @property
    def num_bytes(self) -> int:
        """Memory held by the context entries, and by features that wait."""
        waiting = sum(part.numel() * part.element_size() for part in self._waiting)
        return waiting + sum(store.num_bytes for store in self._stores)

    def extend(self, features: Float[Tensor, "M F"]) -> None:
        """Take in the target's features of the next M committed positions."""
        self._waiting.append(features)
        if sum(part.shape[0] for part in self._waiting) >= _MOST_WAITING:
            self._take_in()

    def _take_in(self) -> None:
        if self._waiting:
            self._drafter.network.extend(torch.cat(self._waiting), self._stores)
            self._waiting.clear()

    def propose(
        self, root_id: int, *, num_depths: int, num_ranks: int, perturb: Perturb | None = None
    ) -> Marginals:
        """Draft the positions that follow the root.

        Args:
            root_id: the last decided token, at position `length`.
            num_depths: positions wanted, 1 <= num_depths <= L.
            num_ranks: K, capped at the draft vocabulary.
            perturb: changes the logits before they are ranked, see `sampling.coupling`.
        """
        self._take_in()
        drafter, config = self._drafter, self._drafter.config
        ids = torch.full((config.block_size,), config.mask_token_id, device=drafter.target.device)
        ids[0] = root_id
        block = drafter.target.embed(ids) * config.input_embedding_scale
        hidden = drafter.network(block, self._stores)
        logits = drafter.logits(hidden[1 : num_depths + 1])
        if perturb is not None:
            logits = perturb(logits, drafter.draft_token_ids)
        return top_marginals(logits, num_ranks, drafter.draft_token_ids)


def shaped_logits(logits: Float[Tensor, "M V"], config: DrafterConfig) -> Float[Tensor, "M V"]:
    """The head's logits after the drafter's multiplier and soft-capping."""
    logits = logits * config.output_multiplier
    cap = config.final_logit_softcapping
    return logits if cap is None else cap * torch.tanh(logits / cap)


def top_marginals(
    logits: Float[Tensor, "L V"], num_ranks: int, token_ids: Int64[Tensor, " V"] | None = None
) -> Marginals:
    """Normalise over the vocabulary and keep the best ranks.

    Args:
        logits: [L, V] float32.
        num_ranks: K, capped at V.
        token_ids: [V], the token of each column; None where the columns are the token ids.

    >>> top_marginals(torch.tensor([[0.0, 0.0]]), 16).log_probs.exp()
    tensor([[0.5000, 0.5000]])
    """
    top = torch.topk(logits, min(num_ranks, logits.shape[1]), dim=-1, sorted=True)
    log_probs = top.values - torch.logsumexp(logits, dim=-1, keepdim=True)
    # Rounding can lift a probability of 1 above 1.
    ids = top.indices if token_ids is None else token_ids[top.indices]
    return Marginals(log_probs.clamp(max=0.0), ids)
