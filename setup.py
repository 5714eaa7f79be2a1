"""The compiled core of `ddtree.tree`; everything else about the package is in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import Extension, setup

SOURCES = ["native/_native.c", "native/ancestor_mask.c", "native/build_tree.c"]

setup(
    ext_modules=[
        Extension(
            "ddtree.tree._native",
            SOURCES,
            depends=[str(path) for path in Path("native").glob("*.h")],
            extra_compile_args=["/std:c11"] if sys.platform == "win32" else ["-std=c11", "-O3"],
            py_limited_api=True,
            optional=True,  # without a compiler there is a pure Python builder
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
