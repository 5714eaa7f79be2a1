"""The compiled cores; everything else about the package is in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import Extension, setup

HEADERS = [str(path) for path in Path("native").glob("*.h")]
C11 = ["/std:c11"] if sys.platform == "win32" else ["-std=c11", "-O3"]
# Compiled for OpenMP but not linked to it, see native/_linear.c; Linux alone allows that.
OPENMP = ["-fopenmp"] if sys.platform == "linux" else []


def extension(name: str, sources: list[str], options: list[str]) -> Extension:
    """One that an installation can do without."""
    files = [f"native/{source}" for source in sources]
    return Extension(
        name, files, depends=HEADERS, extra_compile_args=options, py_limited_api=True, optional=True
    )


setup(
    ext_modules=[
        extension("ddtree.tree._native", ["_native.c", "ancestor_mask.c", "build_tree.c"], C11),
        extension("ddtree.models._linear", ["_linear.c", "linear.c"], [*C11, *OPENMP]),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
