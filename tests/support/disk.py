"""A full disk, for files of some names."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import IO, Any

import pytest


class _Full(io.RawIOBase):
    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fill_disk(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """From here on there is no room for files of this name; opening them still works."""
    really_open = Path.open

    def opened(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> IO[Any]:
        if path.name != name or mode[0] not in "wa":
            return really_open(path, mode, *args, **kwargs)
        full = io.BufferedWriter(_Full())
        return full if "b" in mode else io.TextIOWrapper(full, encoding="utf-8")

    monkeypatch.setattr(Path, "open", opened)
