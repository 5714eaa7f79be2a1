"""Where the files of a model are: an alias's folder, a local one, or the hub's snapshot."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from ddtree.errors import CacheWriteError, CheckpointError, ModelNotFoundError, first_line
from ddtree.models import zoo
from ddtree.models.drafter_weights import REFUSED_FILES
from ddtree.models.medusa import WEIGHT_FILES as MEDUSA_FILES

_TEXT_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
# Refused files are fetched too: what is not there cannot be refused.
_PATTERNS = (*_TEXT_FILES, "*.safetensors", *MEDUSA_FILES, *REFUSED_FILES)
CONFIG_PATTERNS = ("config.json", "generation_config.json")
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)


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
            got=f"{name!r} ({first_line(error)})",
            remedy="Check the id and the network (HF_ENDPOINT, HF_TOKEN), or give a local folder.",
        ) from error


def read_config(folder: Path, argument: str, file: str = "config.json") -> dict[str, Any]:
    """A parsed JSON file of a model folder.

    Raises:
        ModelNotFoundError: no such file.
        CheckpointError: not a JSON object.
    """
    path = folder / file
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelNotFoundError(
            argument,
            expected=f"a folder with a {file}",
            got=str(folder),
            remedy="Give the folder that holds config.json and *.safetensors.",
        ) from error
    except OSError as error:
        raise ModelNotFoundError(
            argument,
            expected=f"a readable {file}",
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
