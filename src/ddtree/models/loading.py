"""From an id, an alias, a folder or a loaded model to a `Target` and a drafter, or a clear error.

Nothing is guessed: a tensor that is missing, left over or of the wrong shape is an error that names
it, and so is a drafter that was made for another target.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from ddtree.errors import (
    OptionError,
    PairMismatchError,
    UnsupportedModelError,
)
from ddtree.models.architectures import check_architecture, check_model_type
from ddtree.models.drafter import DFlashDrafter
from ddtree.models.drafter_checkpoint import (
    SPECULATORS,
    DrafterDeclaration,
    read_checkpoint,
    read_declaration,
)
from ddtree.models.drafter_config import DFLASH, DFLASH2, DrafterConfig
from ddtree.models.drafter_network import DFlashNetwork
from ddtree.models.folder import CONFIG_PATTERNS, read_config, resolve_folder
from ddtree.models.fused import fuse_layers
from ddtree.models.medusa import MedusaDrafter, is_medusa, load_medusa, parse_medusa_config
from ddtree.models.packed import pack_linears
from ddtree.models.pard import PardDrafter, is_pard, load_pard, parse_pard_config
from ddtree.models.placement import MIXED, check_mixed, pick_device, pick_dtype
from ddtree.models.pretrained import parse_model_config, read_model, read_tokenizer
from ddtree.models.target import Target, TargetShape
from ddtree.models.target_ends import OwnEnds, ends_of, own_ends
from ddtree.models.text_part import reader_of, text_config, text_part

LoadedDrafter = DFlashDrafter | MedusaDrafter | PardDrafter


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
    allow_untested: bool = False,
    say: Callable[[str], None] | None = None,
) -> Target:
    """Load a target model and its tokenizer.

    Args:
        source: a hub id, a local folder, an embedded alias, or a loaded model (taken as it is:
            `device` and `dtype` must then stay "auto").
        tokenizer: used in place of the one beside the model.
        device: "auto", "cpu", "cuda", "cuda:1", "mps".
        dtype: "auto", "float32", "mixed" (products of linear layers in bfloat16, all else in
            float32; on a CPU with AVX512-BF16), "bfloat16", "float16".
        packed: lay float32 weights on a CPU out for speed (see `models.packed`); False leaves the
            modules as transformers made them, and "mixed" is then float32. A loaded model is never
            touched.
        allow_untested: let in an architecture that is not in the table (docs/models.md), if its
            layers are of known kinds; `Pair` then holds the first text against plain decoding.
        say: told what takes long, and of an architecture that is not in the table, which is else
            a Python warning.

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
        called = source.config.name_or_path or "the loaded model"
        target = Target(source, tokenizer, name=called, allow_untested=allow_untested)
        _warn_if_untested(target, say)
        return target
    name = str(source)
    where = pick_device(device)
    products = torch.bfloat16 if dtype == MIXED else torch.float32
    if packed and dtype == MIXED:
        check_mixed(where)
    folder = resolve_folder(name, argument="target", say=say)
    config = _read_model_config(folder, name, allow_untested=allow_untested)
    reader = reader_of(read_config(folder, "target")["model_type"])
    model = read_model(folder, f"target {name}", pick_dtype(dtype, where, config.dtype), reader)
    model = text_part(model).to(where)
    if packed:
        fuse_layers(pack_linears(model, products))
    tokenizer = tokenizer or read_tokenizer(folder)
    target = Target(model, tokenizer, name=name, allow_untested=allow_untested)
    _warn_if_untested(target, say)
    return target


def _warn_if_untested(target: Target, say: Callable[[str], None] | None) -> None:
    if not target.untested:
        return
    message = (
        f"{target.config.model_type!r} ({target.name}) is not among the tested architectures: its "
        "first text is made twice, with drafts and without, and compared"
    )
    if say is None:
        warnings.warn(message, stacklevel=3)
    else:
        say(message)


def load_drafter(
    source: str | Path,
    target: Target,
    *,
    packed: bool = True,
    say: Callable[[str], None] | None = None,
) -> LoadedDrafter:
    """Load a drafter and bind it to its target: DFlash in either format, Medusa heads, or PARD.

    Args:
        source: a hub id, a local folder, or an embedded alias.
        target: on whose device and in whose dtype the drafter will run.
        packed: see `load_target`; False where its weights are read or trained.
        say: told what takes long, and of a format that is not z-lab's DFlash.

    Raises:
        ModelNotFoundError: no such checkpoint.
        UnsupportedModelError: another format, or a variant that would be silently wrong.
        CheckpointError: tensors missing, left over, misshapen or not finite, or a broken draft
            vocabulary.
        PairMismatchError: made for another target.
    """
    name = str(source)
    folder = resolve_folder(name, argument="drafter", say=say)
    raw = read_config(folder, "drafter")
    drafter: LoadedDrafter
    if is_medusa(raw):
        drafter = load_medusa(folder, raw, target, name)
    elif is_pard(raw):
        drafter = load_pard(folder, raw, target, name)
    else:
        drafter = _load_dflash(folder, target, name, say)
    if say is not None and not isinstance(drafter, DFlashDrafter):
        say(f"{name}: {drafter.describe()}")
    if packed:
        drafter.pack()
    return drafter


def _load_dflash(
    folder: Path, target: Target, name: str, say: Callable[[str], None] | None
) -> DFlashDrafter:
    declared = read_declaration(folder, name)
    config = declared.config
    check_pair(config, target.shape, name)
    read = read_checkpoint(folder, declared, vocab_size=target.vocab_size, name=name)
    own = OwnEnds()
    if declared.format == SPECULATORS:
        own = own_ends(read, ends_of(target), name)
        if say is not None:
            say(_described(declared, own, target.name, name))
    # RoPE frequencies are buffers that are computed, not loaded: build them for real, and cast the
    # weights alone, since in bfloat16 they would turn far positions by whole radians.
    network = DFlashNetwork(config)
    weights = {key: tensor.to(target.dtype) for key, tensor in read.tensors.items()}
    network.load_state_dict(weights, assign=True)
    embedding = (
        None if own.embedding is None else own.embedding.rows.to(target.device, target.dtype)
    )
    return DFlashDrafter(
        network.to(target.device),
        target,
        name=name,
        draft_token_ids=read.draft_token_ids,
        embedding=embedding,
        head=None
        if own.head is None
        else head_of_rows(own.head.rows.to(target.device, target.dtype)),
    )


def head_of_rows(rows: torch.Tensor) -> nn.Linear:
    """A head of these rows [Vd, D]."""
    head = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
    head.weight = nn.Parameter(rows, requires_grad=False)
    return head


def _described(declared: DrafterDeclaration, own: OwnEnds, target_name: str, name: str) -> str:
    """One line about a drafter in speculators' format."""
    config, verifier = declared.config, declared.verifier
    made_for = "" if verifier is None else f", made for {verifier}"
    size = config.draft_vocab_size or config.vocab_size
    tokens = f"drafts {size} of {config.vocab_size} tokens"
    said = f"{name}: a drafter in speculators' format, {tokens}{made_for}"
    if not own.found:
        return said
    shares = [(end.key, end.num_differing, end.rows.shape[0]) for end in own.found]
    kept = " and ".join(f"{key} ({count} of {rows} rows differ)" for key, count, rows in shares)
    hint = f"; check that {target_name} is its target" if all(c == r for _, c, r in shares) else ""
    return f"{said}, with its own {kept}{hint}"


def read_target_shape(name: str, *, allow_untested: bool = False) -> TargetShape:
    """The sizes of a target, from its configuration alone.

    Args:
        name: a hub id, a local folder, or an embedded alias.
        allow_untested: see `load_target`.

    Raises:
        ModelNotFoundError, UnsupportedModelError, CheckpointError: see `load_target`.
    """
    folder = resolve_folder(name, argument="target", patterns=CONFIG_PATTERNS)
    config = _read_model_config(folder, name, allow_untested=allow_untested)
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


def describe_drafter(name: str, target: TargetShape) -> str:
    """What a drafter declares, without its weights, if it fits a target of this shape.

    Raises:
        ModelNotFoundError, UnsupportedModelError, CheckpointError, PairMismatchError: see
            `load_drafter`.
    """
    folder = resolve_folder(name, argument="drafter", patterns=CONFIG_PATTERNS)
    raw, source = read_config(folder, "drafter"), f"{name}/config.json"
    if is_medusa(raw):
        return parse_medusa_config(raw, target, source).describe()
    if is_pard(raw):
        return parse_pard_config(raw, source).describe(target)
    config = read_drafter_config(name)
    check_pair(config, target, name)
    size = config.draft_vocab_size
    vocabulary = "" if size is None else f"draft vocabulary {size}, "
    return (
        f"block size {config.block_size}, {config.num_layers} layers, {vocabulary}"
        f"features of target layers {', '.join(map(str, config.target_layer_ids))}; fits"
    )


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


def _read_model_config(folder: Path, name: str, *, allow_untested: bool = False) -> Any:
    """The configuration of the target, or of its text part."""
    raw = read_config(folder, "target")
    if is_medusa(raw) and not raw.get("model_type"):
        raise _no_target(f"the Medusa heads {name}")
    check_model_type(raw.get("model_type"), name, allow_untested=allow_untested)
    architectures = str(raw.get("architectures"))
    if "dflash_config" in raw or any(name in architectures for name in (DFLASH, DFLASH2)):
        raise _no_target(f"the DFlash drafter {name}")
    if (folder / "generation_config.json").exists():
        # transformers passes over a broken one, and the stop tokens in it would be lost.
        read_config(folder, "target", "generation_config.json")
    whole = parse_model_config(folder, raw, f"target {name}")
    config = text_config(whole)
    config.dtype = config.dtype or whole.dtype  # declared for the whole checkpoint alone
    check_architecture(config, name, allow_untested=allow_untested)
    return config


def _no_target(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        "target",
        expected="a causal language model",
        got=what,
        remedy="Give it as --drafter, and the model that it drafts for as --target.",
    )
