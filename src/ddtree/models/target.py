"""The target: a causal LM of transformers whose layers are known, behind one small face.

It runs a forward over rows, captures the layers that a drafter wants and no others, and lends its
embedding and head to the drafter. Knows no tree and no drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ddtree.attention.backends import check_backend
from ddtree.attention.masks import additive
from ddtree.attention.visibility import visible
from ddtree.cache.batch import BatchCache
from ddtree.cache.hf import TargetCache, cache_argument
from ddtree.cache.recurrent import RecurrentState
from ddtree.models.architectures import (
    check_architecture,
    check_layers,
    longest_context,
    window_by_layer_type,
)
from ddtree.models.packed import PackedLinear, PairLinear
from ddtree.models.placement import MIXED
from ddtree.models.recurrent import (
    ROUND_BYTES,
    most_rows,
    recurrent_layer_type,
    recurrent_layers,
    rows_of_a_tree,
)

# In place of a layer's id: the final hidden states behind the last norm, which the head reads.
FINAL_HIDDEN = -1


@dataclass(frozen=True)
class TargetOutput:
    """What one forward of the target gives.

    Args:
        logits: [N, V] in the model's dtype; of the last rows alone where no more were asked for.
        features: [N, F], the outputs of the captured layers side by side; F = 0 without any.
    """

    logits: Float[Tensor, "N V"]
    features: Float[Tensor, "M F"]


@dataclass(frozen=True, kw_only=True)
class TargetShape:
    """What a drafter must fit: read from a configuration, no weights needed."""

    name: str
    hidden_size: int
    num_layers: int
    vocab_size: int


class Target:
    """A loaded target model.

    Args:
        model: a causal LM of a supported architecture, on its device, in eval mode.
        tokenizer: its tokenizer, or None: then only token ids go in and out.
        name: how to call it in messages.
        allow_untested: let in an architecture that is not in the table, if its layers are known.

    Raises:
        UnsupportedModelError: an architecture that is not in the table, or layers that are unknown.
        BackendError: an attention implementation without a tree mask.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        name: str,
        allow_untested: bool = False,
    ) -> None:
        self.config: Any = model.config
        self.untested = check_architecture(self.config, name, allow_untested=allow_untested)
        if self.untested:
            check_layers(model, name)
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.name = name
        # Asked once here so that a wrong backend is an error before any work.
        check_backend(self.config._attn_implementation)
        self._cache_argument = cache_argument(model)
        self._windows = window_by_layer_type(self.config, name)
        # Gemma 4's last layers keep no entries: they read those of layers before them.
        self._num_sharing = int(getattr(self.config, "num_kv_shared_layers", 0) or 0)
        self._recurrent = recurrent_layers(self.config, model.get_decoder(), name)
        # Recurrent layers: memory for the rows of a round, which bounds the budget.
        self.round_bytes = ROUND_BYTES

    @property
    def shape(self) -> TargetShape:
        """The sizes that a drafter must fit."""
        return TargetShape(
            name=self.name,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            vocab_size=self.vocab_size,
        )

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return torch.device(self.model.device)

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype."""
        return self.model.dtype  # type: ignore[no-any-return]

    @property
    def products(self) -> torch.dtype:
        """The dtype in which its linear layers multiply."""
        mixed = any(isinstance(module, PairLinear) for module in self.model.modules())
        return torch.bfloat16 if mixed else self.dtype

    @property
    def dtype_name(self) -> str:
        """Its dtype in results: "torch.float32" and the like, or "mixed"."""
        return str(self.dtype) if self.products is self.dtype else MIXED

    @property
    def backend(self) -> str:
        """How its layers run: the attention, and the layout of packed linear layers."""
        layouts = {m.layout for m in self.model.modules() if isinstance(m, PackedLinear)}
        return ", ".join([self.config._attn_implementation, *sorted(layouts)])

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return int(self.config.num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        """D."""
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        """V: rows of the embedding and of the head, padding rows included."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def context_limit(self) -> int:
        """The most positions that the model was made for, and that a tree can be verified in."""
        return longest_context(self.config)

    @property
    def max_rows(self) -> int | None:
        """N, the most rows of a round: what fits into `round_bytes`; None: no recurrent layers."""
        return most_rows(self._recurrent, self.round_bytes) if self._recurrent else None

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """All stop tokens that the model declares, as its own `generate` takes them."""
        declared = self.model.generation_config.eos_token_id
        if declared is None:
            declared = getattr(self.config, "eos_token_id", None)
        if declared is None:
            return frozenset()
        return frozenset([declared] if isinstance(declared, int) else declared)

    def new_cache(self, capacity: int) -> TargetCache:
        """An empty cache with room for `capacity` rows."""
        return TargetCache(self.num_layers - self._num_sharing, capacity, self._fresh_states())

    def new_batch_cache(self, num_rows: int, capacity: int) -> BatchCache:
        """Empty caches for `run_batch`, with room for `capacity` positions in each row."""
        num_layers = self.num_layers - self._num_sharing
        return BatchCache(num_layers, num_rows, capacity, self.device, self._fresh_states())

    def _fresh_states(self) -> dict[int, RecurrentState]:
        return {i: layer.fresh_state() for i, layer in self._recurrent.items()}

    def embed(self, token_ids: Int64[Tensor, " M"]) -> Float[Tensor, "M D"]:
        """The input embedding of each token, as the target's first layer gets it.

        Gemma's embedding scales its rows by itself, and drafters for it are trained on that; a
        drafter's `input_embedding_scale` comes on top, in its own code.
        """
        embedded: Tensor = self.model.get_input_embeddings()(token_ids)
        return embedded

    def head(self, hidden: Float[Tensor, "M D"]) -> Float[Tensor, "M V"]:
        """The output head, tied or not, on normalised hidden states.

        Without the target's own caps and scales of logits: a drafter declares those that it has.
        """
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits

    def head_of(self, token_ids: Int64[Tensor, " Vd"]) -> nn.Linear:
        """The head for these tokens alone: a copy of its rows."""
        head = self.model.get_output_embeddings()
        part = nn.Linear(head.in_features, token_ids.shape[0], bias=False, device="meta")
        part.weight = nn.Parameter(head.weight.detach()[token_ids], requires_grad=False)
        if head.bias is not None:
            part.bias = nn.Parameter(head.bias.detach()[token_ids], requires_grad=False)
        return part

    def prefill(
        self,
        token_ids: Int64[Tensor, " M"],
        cache: TargetCache,
        *,
        capture: Sequence[int] = (),
        num_logits: int = 1,
    ) -> TargetOutput:
        """Feed tokens that follow the cached context; logits of the last ones only.

        The cache grows by M entries in place.

        Args:
            token_ids: [M].
            cache: holds the context.
            capture: 0-based ids of the layers whose outputs are wanted, or `FINAL_HIDDEN`.
            num_logits: from 1 to M, rows at the end whose logits are wanted.
        """
        start, num_rows = cache.length, token_ids.shape[0]
        positions = torch.arange(start, start + num_rows)
        output = self._forward(
            token_ids[None],
            positions[None].to(self.device),
            cache,
            {"attention_mask": None, "logits_to_keep": num_logits},
            capture,
        )
        if self._recurrent:
            cache.keep(start, tuple(range(num_rows)))
        return output

    def verify(
        self,
        token_ids: Int64[Tensor, " N"],
        depths: Int64[Tensor, " N"],
        ancestors: torch.Tensor,
        cache: TargetCache,
        *,
        capture: Sequence[int] = (),
    ) -> TargetOutput:
        """Feed the rows of a tree: each sees the context, its ancestors and itself.

        The cache grows by N entries in place; the caller keeps the accepted ones.

        Args:
            token_ids: [N].
            depths: [N], the root 0.
            ancestors: [N, N] bool, see `tree.geometry.ancestor_mask`.
            cache: holds the context.
            capture: 0-based ids of the layers whose outputs are wanted, or `FINAL_HIDDEN`.
        """
        num_rows, length = token_ids.shape[0], cache.length
        options: dict[str, Any] = {"attention_mask": None}
        if num_rows > 1:

            def hides_nothing(window: int | None) -> bool:
                # No row lies deeper than N - 1.
                return window is None or length + num_rows <= window

            def mask_of(window: int | None) -> Tensor:
                if hides_nothing(window):
                    return cache.tree_mask.of(ancestors, length, self.dtype)
                return additive(visible(ancestors, depths, length, window), self.dtype)

            options = {"attention_mask": self._masks(mask_of)}
            if all(map(hides_nothing, self._windows.values())):
                options["open_context"] = True
        branching = self._recurrent if num_rows > 1 else {}
        with rows_of_a_tree(branching, cache.recurrent_stores, ancestors):
            return self._forward(token_ids[None], (length + depths)[None], cache, options, capture)

    def run_batch(
        self,
        token_ids: Int64[Tensor, "R M"],
        cache: BatchCache,
        *,
        capture: Sequence[int] = (),
    ) -> TargetOutput:
        """Feed independent requests side by side; logits [R, V] of each one's last token.

        The features are those of all R M tokens, request by request.

        Args:
            token_ids: the prompt of the one row that the cache is filling, from what it shares with
                another row on, or else the last token of every row.
            cache: grows in place; the caller counts its lengths.
            capture: 0-based ids of the layers whose outputs are wanted, or `FINAL_HIDDEN`.
        """
        if cache.filling is None:
            cache.begin_step()
            positions = cache.lengths[:, None]
            mask = self._masks(
                lambda window: additive(cache.visible(window), self.dtype).permute(2, 0, 1, 3)
            )
        else:
            depths = torch.arange(token_ids.shape[1], device=self.device)
            positions = (cache.shared + depths)[None]
            mask = None if cache.shared == 0 else self._masks(partial(self._behind, cache, depths))
        options = {"attention_mask": mask, "logits_to_keep": 1}
        return self._forward(token_ids, positions, cache, options, capture)

    def _behind(self, cache: BatchCache, depths: Int64[Tensor, " M"], window: int | None) -> Tensor:
        """The mask of a prompt's rows behind those that it shares with another one."""
        rows = depths[:, None] >= depths
        return additive(visible(rows, depths, cache.shared, window), self.dtype)

    def _masks(self, of_window: Callable[[int | None], Tensor]) -> Any:
        """One mask, or one per layer type where they are mixed; recurrent layers need none."""
        masks: dict[str, Tensor | None] = {
            kind: of_window(window) for kind, window in self._windows.items()
        }
        if (recurrent := recurrent_layer_type(self.config.model_type)) is not None:
            masks[recurrent] = None
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        cache: TargetCache | BatchCache,
        options: dict[str, Any],
        capture: Sequence[int],
    ) -> TargetOutput:
        """Run R rows of tokens [R, M]; logits and features of all, row by row."""
        if capture and self._num_sharing and "logits_to_keep" in options:
            # A number makes such layers run for the last rows alone; their features would be lost.
            rows = torch.arange(token_ids.shape[1], device=token_ids.device)
            options = {**options, "logits_to_keep": rows[-options["logits_to_keep"] :]}
        with _captured(self.model.get_decoder(), capture) as outputs:
            result = self.model(
                input_ids=token_ids,
                position_ids=positions,
                use_cache=True,
                return_dict=True,
                **{self._cache_argument: cache},
                **options,
            )
        features = [outputs[layer].flatten(0, 1) for layer in capture]
        none = result.logits.new_empty((token_ids.numel(), 0))
        joined = torch.cat(features, dim=-1) if features else none
        return TargetOutput(result.logits.flatten(0, 1), joined)


@contextmanager
def _captured(decoder: Any, layer_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Collect the outputs [R, M, D] of some layers, or of the whole decoder, during the block.

    Layers are hooked because `hidden_states[n]` of the last one is already normalised.
    """
    outputs: dict[int, Tensor] = {}
    hooked = {i: decoder if i == FINAL_HIDDEN else decoder.layers[i] for i in layer_ids}
    handles = [
        module.register_forward_hook(partial(_keep_output, outputs, i))
        for i, module in hooked.items()
    ]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _keep_output(
    outputs: dict[int, Tensor], layer_id: int, module: object, inputs: object, output: Any
) -> None:
    """A forward hook; hidden states come alone, in a tuple, or first in an output object."""
    hidden = output if isinstance(output, Tensor) else output[0]
    outputs[layer_id] = hidden
