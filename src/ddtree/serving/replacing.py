"""Where a module makes an object of a class that it knows by name, let it make another one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def replaced(module: ModuleType, name: str, replacement: object) -> Iterator[None]:
    """A name of a module stands for something else until the block is left.

    >>> import math
    >>> with replaced(math, "pi", 3):
    ...     math.pi
    3
    >>> math.pi > 3
    True
    """
    original = getattr(module, name)
    setattr(module, name, replacement)
    try:
        yield
    finally:
        setattr(module, name, original)
