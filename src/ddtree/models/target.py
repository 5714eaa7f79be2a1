"""The target: any Llama, Qwen2, Qwen3 or Mistral causal LM of transformers, behind one small face.

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
from ddtree.errors import OptionError, UnsupportedModelError
from ddtree.models.packed import PackedLinear

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


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

    Raises:
        UnsupportedModelError: another architecture.
        BackendError: an attention implementation without a tree mask.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, *, name: str
    ) -> None:
        self.config: Any = model.config
        if self.config.model_type not in SUPPORTED_MODEL_TYPES:
            raise unsupported_architecture(self.config.model_type, name)
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.name = name
        # Asked once here so that a wrong backend is an error before any work.
        check_backend(self.config._attn_implementation)
        self._cache_argument = cache_argument(model)
        self._windows = _window_by_layer_type(self.config)

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
        """The most positions that the model was made for."""
        return int(self.config.max_position_embeddings)

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
        return TargetCache(self.num_layers, capacity)

    def embed(self, token_ids: Int64[Tensor, " M"]) -> Float[Tensor, "M D"]:
        """The input embedding of each token."""
        embedded: Tensor = self.model.get_input_embeddings()(token_ids)
        return embedded

    def head(self, hidden: Float[Tensor, "M D"]) -> Float[Tensor, "M V"]:
        """The output head, tied or not, on normalised hidden states."""
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
            capture: 0-based ids of the layers whose outputs are wanted.
            num_logits: from 1 to M, rows at the end whose logits are wanted.
        """
        positions = torch.arange(cache.length, cache.length + token_ids.shape[0])
        return self._forward(
            token_ids[None],
            positions[None].to(self.device),
            cache,
            {"attention_mask": None, "logits_to_keep": num_logits},
            capture,
        )

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
            capture: 0-based ids of the layers whose outputs are wanted.
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
            token_ids: the whole prompt of the one row that the cache is filling, or else the last
                token of every row.
            cache: grows in place; the caller counts its lengths.
            capture: 0-based ids of the layers whose outputs are wanted.
        """
        if cache.filling is None:
            cache.begin_step()
            positions = cache.lengths[:, None]
            mask = self._masks(
                lambda window: additive(cache.visible(window), self.dtype).permute(2, 0, 1, 3)
            )
        else:
            positions = torch.arange(token_ids.shape[1], device=self.device)[None]
            mask = None
        options = {"attention_mask": mask, "logits_to_keep": 1}
        return self._forward(token_ids, positions, cache, options, capture)

    def _masks(self, of_window: Callable[[int | None], Tensor]) -> Any:
        """One mask, or one per layer type where the model mixes windows."""
        masks = {kind: of_window(window) for kind, window in self._windows.items()}
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
        with _captured(self.model.get_decoder().layers, capture) as outputs:
            result = self.model(
                input_ids=token_ids,
                position_ids=positions,
                use_cache=True,
                return_dict=True,
                **{self._cache_argument: cache},
                **options,
            )
        features = [outputs[layer].flatten(0, 1) for layer in capture]
        joined = torch.cat(features, dim=-1) if features else result.logits.new_empty((0, 0))
        return TargetOutput(result.logits.flatten(0, 1), joined)


def unsupported_architecture(model_type: object, name: str) -> UnsupportedModelError:
    """The error for a target of an architecture that is not among the tested ones."""
    return UnsupportedModelError(
        "target",
        expected=f"an architecture among {', '.join(SUPPORTED_MODEL_TYPES)}",
        got=f"{model_type!r} ({name})",
        remedy="Its attention or state may need a tree mask that is not tested yet.",
    )


@contextmanager
def _captured(layers: Any, layer_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Collect the outputs [R, M, D] of some layers during the block.

    Layers are hooked because `hidden_states[n]` of the last one is already normalised.
    """
    outputs: dict[int, Tensor] = {}
    handles = [
        layers[i].register_forward_hook(partial(_keep_output, outputs, i)) for i in layer_ids
    ]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _keep_output(
    outputs: dict[int, Tensor], layer_id: int, module: object, inputs: object, output: Any
) -> None:
    """A forward hook; some versions return the hidden states alone, some in a tuple."""
    hidden = output if isinstance(output, Tensor) else output[0]
    outputs[layer_id] = hidden


def _window_by_layer_type(config: Any) -> dict[str, int | None]:
    """The sliding window of each layer type that occurs; None for full attention."""
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return {"all": window if config.model_type == "mistral" else None}
    known = {"full_attention": None, "sliding_attention": window}
    unknown = sorted(set(layer_types) - set(known))
    if unknown:
        raise UnsupportedModelError(
            "target",
            expected="layers of full or sliding attention",
            got=", ".join(unknown),
            remedy="Such layers need a tree mask of their own, which is not tested yet.",
        )
    return {kind: known[kind] for kind in sorted(set(layer_types))}


def pick_device(device: str) -> torch.device:
    """The device of that name; "auto" takes cuda, then mps, then cpu.

    Raises:
        OptionError: no such device here.
    """
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    here = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        here.append("mps")
    if device in here or (device == "cuda" and torch.cuda.is_available()):
        return torch.device(device)
    raise OptionError(
        "device",
        expected=f"auto or a device of this machine ({', '.join(here)})",
        got=repr(device),
        remedy="Run `ddtree doctor` to see what is installed.",
    )


DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def pick_dtype(dtype: str, device: torch.device, declared: torch.dtype | None) -> torch.dtype:
    """The dtype of that name; "auto" is float32 on a CPU, else what the checkpoint declares.

    Raises:
        OptionError: another name.
    """
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" or declared is None else declared
    if dtype not in DTYPES:
        raise OptionError(
            "dtype",
            expected=f"auto, {', '.join(DTYPES)}",
            got=repr(dtype),
            remedy="auto is float32 on a CPU and the checkpoint's own dtype elsewhere.",
        )
    return DTYPES[dtype]
