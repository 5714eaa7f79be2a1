"""From an id, an alias, a folder or a loaded model to a `Target` and a drafter, or a clear error.

Nothing is guessed: a tensor that is missing, left over or of the wrong shape is an error that names
it, and so is a drafter that was made for another target.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    StrictDataclassError,
)
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ddtree.errors import (
    CacheWriteError,
    CheckpointError,
    ModelNotFoundError,
    OptionError,
    PairMismatchError,
    UnsupportedModelError,
)
from ddtree.models import zoo
from ddtree.models.drafter import DFlashDrafter, DFlashNetwork
from ddtree.models.drafter_config import DrafterConfig, parse_drafter_config
from ddtree.models.target import (
    SUPPORTED_MODEL_TYPES,
    Target,
    TargetShape,
    pick_device,
    pick_dtype,
)

# Tensors and files of variants that would load without them and be silently wrong.
_REFUSED_TENSORS = ("attention_sink_bias", "qkv_proj", "g_proj", "aux_hidden_norms")
_REFUSED_FILES = ("mask_embedding.pt",)
# Refused files are fetched too: what is not there cannot be refused.
_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", *_REFUSED_FILES)
_CONFIG_PATTERNS = ("config.json",)
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)
# How transformers fails on values that it does not check itself.
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError)


def load_target(
    source: str | Path | PreTrainedModel,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    device: str = "auto",
    dtype: str = "auto",
    say: Callable[[str], None] | None = None,
) -> Target:
    """Load a target model and its tokenizer.

    Args:
        source: a hub id, a local folder, an embedded alias, or a loaded model (taken as it is:
            `device` and `dtype` must then stay "auto").
        tokenizer: used in place of the one beside the model.
        device: "auto", "cpu", "cuda", "cuda:1", "mps".
        dtype: "auto", "float32", "bfloat16", "float16".
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
    return Target(model, tokenizer or _read_tokenizer(folder), name=name)


def load_drafter(
    source: str | Path, target: Target, *, say: Callable[[str], None] | None = None
) -> DFlashDrafter:
    """Load a DFlash drafter in z-lab's format and bind it to its target.

    Args:
        source: a hub id, a local folder, or an embedded alias.
        target: on whose device and in whose dtype the drafter will run.
        say: told what takes long.

    Raises:
        ModelNotFoundError: no such checkpoint.
        UnsupportedModelError: another format, refused by name.
        CheckpointError: tensors missing, left over or misshapen.
        PairMismatchError: made for another target.
    """
    name = str(source)
    folder = resolve_folder(name, argument="drafter", say=say)
    config = parse_drafter_config(read_config(folder, "drafter"), f"{name}/config.json")
    check_pair(config, target.shape, name)
    for refused in _REFUSED_FILES:
        if (folder / refused).exists():
            raise _refused(refused, name)
    with torch.device("meta"):
        network = DFlashNetwork(config)
    tensors = _read_tensors(folder, name)
    _check_tensors(tensors, network, name)
    # RoPE frequencies are buffers that are computed, not loaded: build them for real, and cast the
    # weights alone, since in bfloat16 they would turn far positions by whole radians.
    network = DFlashNetwork(config)
    weights = {key: tensor.to(target.dtype) for key, tensor in tensors.items()}
    network.load_state_dict(weights, assign=True)
    return DFlashDrafter(network.to(target.device), target, name=name)


def read_target_shape(name: str) -> TargetShape:
    """The sizes of a target, from its configuration alone.

    Raises:
        ModelNotFoundError, UnsupportedModelError, CheckpointError: see `load_target`.
    """
    folder = resolve_folder(name, argument="target", patterns=_CONFIG_PATTERNS)
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
    folder = resolve_folder(name, argument="drafter", patterns=_CONFIG_PATTERNS)
    return parse_drafter_config(read_config(folder, "drafter"), f"{name}/config.json")


def resolve_folder(
    name: str,
    *,
    argument: str,
    say: Callable[[str], None] | None = None,
    patterns: Sequence[str] = _PATTERNS,
) -> Path:
    """The local folder of a model: an alias's, the folder itself, or the hub's snapshot.

    Args:
        name: what the user gave.
        argument: "target" or "drafter", for messages and aliases.
        say: told what takes long.
        patterns: files wanted from the hub.

    Raises:
        ModelNotFoundError: nothing there, or the hub cannot be reached.
        CacheWriteError: no room or no permission for what is fetched.
        DownloadError: see `zoo.target_folder`.
    """
    if zoo.is_embedded(name):
        if argument == "drafter":
            return zoo.drafter_folder(name)
        return zoo.target_folder(name, say=say)
    try:
        if Path(name).is_dir():
            return Path(name)
    except OSError as error:
        raise ModelNotFoundError(
            argument,
            expected="a folder that can be read",
            got=f"{name!r:.200} ({error.strerror})",
            remedy="Check the spelling and the permissions.",
        ) from error
    looks_local = name.startswith((".", "/", "~")) or name.count("/") != 1
    if looks_local:
        raise ModelNotFoundError(
            argument,
            expected="a hub id (owner/name), a folder, or an embedded alias "
            f"({', '.join(zoo.EMBEDDED)})",
            got=repr(name),
            remedy="Check the spelling; a relative folder is looked up from here.",
        )
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        if isinstance(error, OSError) and error.errno in _UNWRITABLE:
            raise CacheWriteError(
                str(error.filename or "the cache of huggingface_hub"),
                expected="a writable folder with room for the model",
                got=str(error.strerror),
                remedy="Free some space, or set HF_HOME to a folder on another disk.",
            ) from error
        raise ModelNotFoundError(
            argument,
            expected="a model that the hub or the local cache has",
            got=f"{name!r} ({_first_line(error)})",
            remedy="Check the id and the network (HF_ENDPOINT, HF_TOKEN), or give a local folder.",
        ) from error


def read_config(folder: Path, argument: str) -> dict[str, Any]:
    """The parsed `config.json` of a folder.

    Raises:
        ModelNotFoundError: no such file.
        CheckpointError: not a JSON object.
    """
    path = folder / "config.json"
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelNotFoundError(
            argument,
            expected="a folder with a config.json",
            got=str(folder),
            remedy="Give the folder that holds config.json and *.safetensors.",
        ) from error
    except OSError as error:
        raise ModelNotFoundError(
            argument,
            expected="a readable config.json",
            got=f"{path} ({error.strerror})",
            remedy="Check the permissions of the folder.",
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(
            str(path), expected="JSON", got=str(error), remedy="Download the file again."
        ) from error
    if not isinstance(parsed, dict):
        raise CheckpointError(
            str(path),
            expected="a JSON object",
            got=type(parsed).__name__,
            remedy="Download the file again.",
        )
    return parsed


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
        raise UnsupportedModelError(
            "target",
            expected=f"an architecture among {', '.join(SUPPORTED_MODEL_TYPES)}",
            got=f"{raw.get('model_type')!r} ({name})",
            remedy="Its attention or state may need a tree mask that is not tested yet.",
        )
    if "dflash_config" in raw or "DFlashDraftModel" in str(raw.get("architectures")):
        raise UnsupportedModelError(
            "target",
            expected="a causal language model",
            got=f"the DFlash drafter {name}",
            remedy="Give it as --drafter, and the model that it drafts for as --target.",
        )
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
            attn_implementation="sdpa",
            output_loading_info=True,
        )
    except (OSError, SafetensorError, RuntimeError, ImportError, *_MALFORMED) as error:
        raise CheckpointError(
            f"target {name}",
            expected="readable weights (*.safetensors) of the declared shapes",
            got=f"{type(error).__name__}: {_first_line(error)}",
            remedy="Download the checkpoint again, or check config.json against it.",
        ) from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            raise CheckpointError(
                f"target {name}",
                expected="exactly the tensors of its architecture",
                got=f"{kind.replace('_', ' ')}: {_listed(map(str, info[kind]))}",
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
            got=_first_line(error),
            remedy="Download them again, or remove them to work with token ids alone.",
        ) from error


def _read_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files, an optional `model.` prefix removed."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"drafter {name}",
            expected="*.safetensors beside config.json",
            got=f"none in {folder}",
            remedy="Download the checkpoint again; other weight formats are not read.",
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118, a safetensors handle is not a dict
                    tensor_name = key.removeprefix("model.")
                    if tensor_name in tensors:
                        raise CheckpointError(
                            str(file),
                            expected="each tensor once",
                            got=f"{key} again",
                            remedy="Keep either the whole file or its parts, not both.",
                        )
                    tensors[tensor_name] = opened.get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                str(file),
                expected="a readable safetensors file",
                got=_first_line(error),
                remedy="It may be truncated: download it again.",
            ) from error
    return tensors


def _check_tensors(tensors: Mapping[str, Tensor], network: DFlashNetwork, name: str) -> None:
    wanted = {key: tuple(value.shape) for key, value in network.state_dict().items()}
    found = {key: tuple(value.shape) for key, value in tensors.items()}
    for key in found:
        if any(part in key for part in _REFUSED_TENSORS) and key not in wanted:
            raise _refused(key, name)
    missing = [f"{key} {list(wanted[key])}" for key in wanted if key not in found]
    extra = [f"{key} {list(found[key])}" for key in found if key not in wanted]
    wrong = [
        f"{key} {list(found[key])} instead of {list(wanted[key])}"
        for key in wanted
        if key in found and found[key] != wanted[key]
    ]
    quantised = [k for k, t in tensors.items() if not t.is_floating_point() or t.itemsize < 2]
    for kind, names in (
        ("missing", missing),
        ("left over", extra),
        ("misshapen", wrong),
        ("quantised", quantised),
    ):
        if names:
            raise CheckpointError(
                f"drafter {name}",
                expected="exactly the tensors that its config.json implies",
                got=f"{len(names)} {kind}: {_listed(names)}",
                remedy="The checkpoint and its config.json do not belong together.",
            )


def _refused(what: str, name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"drafter {name}",
        expected="a plain DFlash checkpoint",
        got=what,
        remedy="This variant would load and be silently wrong, so it is refused.",
    )


def _listed(names: Any, limit: int = 8) -> str:
    items = list(names)
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip() if lines else type(error).__name__
