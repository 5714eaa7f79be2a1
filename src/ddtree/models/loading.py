"""From an id, an alias, a folder or a loaded model to a `Target` and a drafter, or a clear error.

Nothing is guessed: a tensor that is missing, left over or of the wrong shape is an error that names
it, and so is a drafter that was made for another target.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from ddtree.attention.backends import GROUPED
from ddtree.errors import (
    CheckpointError,
    OptionError,
    PairMismatchError,
    UnsupportedModelError,
    first_line,
    listed,
)
from ddtree.models.drafter import DFlashDrafter, DFlashNetwork
from ddtree.models.drafter_checkpoint import (
    SPECULATORS,
    DrafterDeclaration,
    read_checkpoint,
    read_declaration,
)
from ddtree.models.drafter_config import DrafterConfig
from ddtree.models.folder import CONFIG_PATTERNS, read_config, resolve_folder
from ddtree.models.fused import fuse_layers
from ddtree.models.packed import pack_linears
from ddtree.models.target import (
    SUPPORTED_MODEL_TYPES,
    Target,
    TargetShape,
    pick_device,
    pick_dtype,
    unsupported_architecture,
)
from ddtree.models.target_ends import check_copies, ends_of

# How transformers fails on values that it does not check itself.
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError)


def silence_transformers() -> None:
    """No log lines and no bars of the library's own: for programs that report themselves."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def load_target(
    source: str | Path | PreTrainedModel,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    device: str = "auto",
    dtype: str = "auto",
    packed: bool = True,
    say: Callable[[str], None] | None = None,
) -> Target:
    """Load a target model and its tokenizer.

    Args:
        source: a hub id, a local folder, an embedded alias, or a loaded model (taken as it is:
            `device` and `dtype` must then stay "auto").
        tokenizer: used in place of the one beside the model.
        device: "auto", "cpu", "cuda", "cuda:1", "mps".
        dtype: "auto", "float32", "bfloat16", "float16".
        packed: lay float32 weights on a CPU out for speed (see `models.packed`); False leaves the
            modules as transformers made them. A loaded model is never touched.
        say: told what takes long.

    Raises:
        ModelNotFoundError: no such model, or no network to fetch it.
        UnsupportedModelError: an architecture that is not supported.
        CheckpointError: tensors missing, left over or misshapen.
        OptionError: a device or dtype that does not exist here.
    """
    if isinstance(source, PreTrainedModel):
        if (device, dtype) != ("auto", "auto"):
            raise OptionError(
                "device, dtype",
                expected='"auto" with a loaded model',
                got=f"{device!r}, {dtype!r}",
                remedy="Move or convert the model before you hand it over.",
            )
        return Target(source, tokenizer, name=source.config.name_or_path or "the loaded model")
    name = str(source)
    where = pick_device(device)
    folder = resolve_folder(name, argument="target", say=say)
    config = _read_model_config(folder, name)
    model = _read_model(folder, name, pick_dtype(dtype, where, config.dtype)).to(where)
    if packed:
        fuse_layers(pack_linears(model))
    return Target(model, tokenizer or _read_tokenizer(folder), name=name)


def load_drafter(
    source: str | Path,
    target: Target,
    *,
    packed: bool = True,
    say: Callable[[str], None] | None = None,
) -> DFlashDrafter:
    """Load a DFlash drafter in z-lab's or speculators' format and bind it to its target.

    Args:
        source: a hub id, a local folder, or an embedded alias.
        target: on whose device and in whose dtype the drafter will run.
        packed: see `load_target`; False where its weights are read or trained.
        say: told what takes long, and of a format that is not z-lab's.

    Raises:
        ModelNotFoundError: no such checkpoint.
        UnsupportedModelError: another format, or an embedding or head that is not the target's.
        CheckpointError: tensors missing, left over or misshapen, or a broken draft vocabulary.
        PairMismatchError: made for another target.
    """
    name = str(source)
    folder = resolve_folder(name, argument="drafter", say=say)
    declared = read_declaration(folder, name)
    config = declared.config
    check_pair(config, target.shape, name)
    read = read_checkpoint(folder, declared, vocab_size=target.vocab_size, name=name)
    if declared.format == SPECULATORS:
        check_copies(
            ends_of(target),
            embedding=read.embedding,
            head=read.head,
            draft_token_ids=read.draft_token_ids,
            name=name,
        )
        if say is not None:
            say(_described(declared, name))
    # RoPE frequencies are buffers that are computed, not loaded: build them for real, and cast the
    # weights alone, since in bfloat16 they would turn far positions by whole radians.
    network = DFlashNetwork(config)
    weights = {key: tensor.to(target.dtype) for key, tensor in read.tensors.items()}
    network.load_state_dict(weights, assign=True)
    drafter = DFlashDrafter(
        network.to(target.device), target, name=name, draft_token_ids=read.draft_token_ids
    )
    if packed:
        drafter.pack()
    return drafter


def _described(declared: DrafterDeclaration, name: str) -> str:
    """One line about a drafter in speculators' format."""
    config, verifier = declared.config, declared.verifier
    made_for = "" if verifier is None else f", made for {verifier}"
    size = config.draft_vocab_size or config.vocab_size
    tokens = f"drafts {size} of {config.vocab_size} tokens"
    return f"{name}: a drafter in speculators' format, {tokens}{made_for}"


def read_target_shape(name: str) -> TargetShape:
    """The sizes of a target, from its configuration alone.

    Raises:
        ModelNotFoundError, UnsupportedModelError, CheckpointError: see `load_target`.
    """
    folder = resolve_folder(name, argument="target", patterns=CONFIG_PATTERNS)
    config = _read_model_config(folder, name)
    return TargetShape(
        name=name,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        vocab_size=config.vocab_size,
    )


def read_drafter_config(name: str) -> DrafterConfig:
    """The configuration of a drafter, without its weights.

    Raises:
        ModelNotFoundError, UnsupportedModelError, CheckpointError: see `load_drafter`.
    """
    folder = resolve_folder(name, argument="drafter", patterns=CONFIG_PATTERNS)
    return read_declaration(folder, name).config


def check_pair(config: DrafterConfig, target: TargetShape, name: str) -> None:
    """Whether a drafter was made for this target.

    Raises:
        PairMismatchError: hidden size, vocabulary, depth, tap or mask id do not fit.
    """
    declared_layers = config.num_target_layers
    highest_tap = max(config.target_layer_ids)
    checks = (
        (config.hidden_size == target.hidden_size, "hidden_size", target.hidden_size),
        (config.vocab_size in (None, target.vocab_size), "vocab_size", target.vocab_size),
        (declared_layers in (None, target.num_layers), "num_target_layers", target.num_layers),
        (
            highest_tap < target.num_layers,
            "target_layer_ids",
            f"ids below {target.num_layers}",
        ),
        (
            config.mask_token_id < target.vocab_size,
            "mask_token_id",
            f"an id below {target.vocab_size}, the rows of the target's embedding",
        ),
        (
            (config.draft_vocab_size or 0) <= target.vocab_size,
            "draft_vocab_size",
            f"at most {target.vocab_size}, the target's vocabulary,",
        ),
    )
    for fits, key, wanted in checks:
        if not fits:
            raise PairMismatchError(
                f"drafter {name}: {key}",
                expected=f"{wanted} for target {target.name}",
                got=getattr(config, key),
                remedy="Use the drafter that was trained for this very target.",
            )


def _read_model_config(folder: Path, name: str) -> Any:
    raw = read_config(folder, "target")
    if raw.get("model_type") not in SUPPORTED_MODEL_TYPES:
        raise unsupported_architecture(raw.get("model_type"), name)
    if "dflash_config" in raw or "DFlashDraftModel" in str(raw.get("architectures")):
        raise UnsupportedModelError(
            "target",
            expected="a causal language model",
            got=f"the DFlash drafter {name}",
            remedy="Give it as --drafter, and the model that it drafts for as --target.",
        )
    if (folder / "generation_config.json").exists():
        # transformers passes over a broken one, and the stop tokens in it would be lost.
        read_config(folder, "target", "generation_config.json")
    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, StrictDataclassError, *_MALFORMED) as error:
        raise CheckpointError(
            f"target {name}: config.json",
            expected=f"the configuration of a {raw['model_type']} model",
            got=" ".join(str(error).split()),
            remedy="Download the file again.",
        ) from error


def _read_model(folder: Path, name: str, dtype: torch.dtype) -> PreTrainedModel:
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=GROUPED,
            output_loading_info=True,
        )
    except (OSError, SafetensorError, RuntimeError, ImportError, *_MALFORMED) as error:
        raise CheckpointError(
            f"target {name}",
            expected="readable weights (*.safetensors) of the declared shapes",
            got=f"{type(error).__name__}: {first_line(error)}",
            remedy="Download the checkpoint again, or check config.json against it.",
        ) from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            raise CheckpointError(
                f"target {name}",
                expected="exactly the tensors of its architecture",
                got=f"{kind.replace('_', ' ')}: {listed(map(str, info[kind]))}",
                remedy="transformers would fill them at random; fix the checkpoint.",
            )
    return model


def _read_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer beside the model; None where there are no tokenizer files at all."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if not any((folder / name).exists() for name in names):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, *_MALFORMED) as error:
        raise CheckpointError(
            f"tokenizer in {folder}",
            expected="tokenizer files that transformers can read",
            got=first_line(error),
            remedy="Download them again, or remove them to work with token ids alone.",
        ) from error
