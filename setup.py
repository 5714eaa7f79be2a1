"""The compiled cores; everything else about the package is in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import Extension, setup

HEADERS = [str(path) for path in Path("native").glob("*.h")]
C11 = ["/std:c11"] if sys.platform == "win32" else ["-std=c11", "-O3"]
# Compiled for OpenMP but not linked to it, see native/_kernels.c; Linux alone allows that.
OPENMP = ["-fopenmp"] if sys.platform == "linux" else []

TREES = ["_native.c", "ancestor_mask.c", "build_tree.c", "calibration.c", "gumbel.c"]
KERNELS = [
    "_kernels.c",
    "attention.c",
    "elementwise.c",
    "linear.c",
    "paged_attention.c",
    "paged_tile.c",
]


def extension(name: str, sources: list[str], options: list[str]) -> Extension:
    """One that an installation can do without."""
    files = [f"native/{source}" for source in sources]
    return Extension(
        name, files, depends=HEADERS, extra_compile_args=options, py_limited_api=True, optional=True
    )


setup(
    ext_modules=[
        extension("ddtree.tree._native", TREES, C11),
        extension("ddtree.models._kernels", KERNELS, [*C11, *OPENMP]),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
