"""The DFlash network: features of the context become keys and values, a block attends to them.

Every layer takes the features in once per position; the block [root, mask, ..., mask] attends to
them and to itself (arXiv 2602.06036; CHECKPOINTS A). Knows no target: neither its embedding nor its
head are here.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from ddtree.models.dflash2 import Sublayer, convolution, convolved
from ddtree.models.drafter_config import DrafterConfig
from ddtree.models.transitions import TransitionHead

_Rotation = tuple[Tensor, Tensor]


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
        self.attention_conv = convolution(config)
        self.mlp_conv = convolution(config)

    def forward(
        self, h: Tensor, rotation: _Rotation, store: KVStore, mask: Tensor | None
    ) -> Tensor:
        def attention(x: Tensor) -> Tensor:
            attended: Tensor = self.self_attn(x, rotation, store, mask)
            return attended

        return self._sublayers(h, attention, h.shape[1])

    def packed(
        self,
        h: Tensor,
        rotation: _Rotation,
        context: tuple[Tensor, Tensor],
        mask: Tensor,
        block_size: int,
    ) -> Tensor:
        """The same for many blocks side by side, h [S, Q, D], behind keys and values of context."""

        def attention(x: Tensor) -> Tensor:
            keys, values = self.self_attn.keys_values(x, rotation)
            keys, values = torch.cat([context[0], keys], 2), torch.cat([context[1], values], 2)
            return self.self_attn.attend(x, rotation, keys, values, mask)

        return self._sublayers(h, attention, block_size)

    def _sublayers(self, h: Tensor, attention: Sublayer, block_size: int) -> Tensor:
        h = h + convolved(self.attention_conv, self.input_layernorm(h), attention, block_size)
        x = self.post_attention_layernorm(h)
        return h + convolved(self.mlp_conv, x, self.mlp, block_size)


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
        self.candidate_selector = _transition_head(config)

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
        *,
        block_size: int,
    ) -> Float[Tensor, "S Q D"]:
        """Many blocks of S sequences in one pass, for training; see `train.packing`.

        Args:
            features: of positions [0, T) of each sequence, padded at the end.
            blocks: embedded slots of all blocks of a sequence, side by side.
            positions: of each slot.
            masks: per layer, which slot sees which of the T positions and Q slots.
            block_size: slots of each of these blocks.

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
            h = layer.packed(h, (cos, sin), context, mask, block_size)
        normed: Tensor = self.norm(h)
        return normed

    def _rotation(self, like: Tensor, start: int, end: int) -> _Rotation:
        positions = torch.arange(start, end, device=like.device)[None]
        cos, sin = self.rotary(like, positions)
        return cos, sin


def _transition_head(config: DrafterConfig) -> TransitionHead | None:
    if config.selector_rank is None:
        return None
    num_tokens = config.draft_vocab_size or config.vocab_size
    assert num_tokens is not None, "a drafter with a transition head declares its vocabulary"
    return TransitionHead(num_tokens, config.selector_rank, config.hidden_size)


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
