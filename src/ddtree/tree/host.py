"""The builder that decoding uses on the host: the compiled one where it was built.

Which one that is cannot change a tree, only its time; `ddtree doctor` says it.
"""

from __future__ import annotations

from ddtree.tree import native, reference

build_tree = native.build_tree if native.AVAILABLE else reference.build_tree


def describe() -> str:
    """Which builder it is, for people, and how to get the faster one."""
    if native.AVAILABLE:
        return "compiled"
    return "pure Python: no compiled core; install a C compiler and reinstall"
