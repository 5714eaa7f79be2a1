"""`import ddtree` is light, and every public name is there when asked for."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import pytest

import ddtree

LIGHT = """
import sys
import ddtree
assert ddtree.__version__ and dir(ddtree)
heavy = {"torch", "transformers", "numpy", "tokenizers", "typer"} & set(sys.modules)
print(sorted(heavy))
"""


def test_importing_the_package_loads_neither_torch_nor_transformers() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
    assert done.stderr == ""


@pytest.mark.parametrize("name", ddtree.__all__)
def test_every_public_name_resolves_whatever_was_imported_before(name: str) -> None:
    for module in ddtree._HOME.values():
        import_module(module)
    found = getattr(ddtree, name)
    assert found.__name__ == name
    assert found.__module__.startswith("ddtree.")
    assert found.__doc__
    assert name in dir(ddtree)


def test_the_public_names_are_those_with_a_home() -> None:
    assert sorted(ddtree.__all__) == sorted(ddtree._HOME)
    assert len(set(ddtree.__all__)) == len(ddtree.__all__)


def test_an_unknown_name_is_an_attribute_error_that_repeats_it() -> None:
    with pytest.raises(AttributeError, match="'ddtree' has no attribute 'lod'"):
        ddtree.lod  # noqa: B018


def test_the_version_is_that_of_the_installed_package() -> None:
    try:
        installed = version("ddtree")
    except PackageNotFoundError:
        pytest.skip("ddtree runs from its source and is not installed")
    assert ddtree.__version__ == installed
