"""ddtree: lossless speculative decoding with draft trees from one drafter pass.

Names come in the order in which data flows. Importing this package loads neither torch nor
transformers; the first use of a name does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddtree.comparison import Comparison, compare
    from ddtree.config import DecodeConfig
    from ddtree.draft import Drafter, DraftSession
    from ddtree.errors import UserError
    from ddtree.hf_generate import custom_generate
    from ddtree.models.loading import load_drafter, load_target
    from ddtree.models.packed import pack_linears
    from ddtree.pair import Pair, load
    from ddtree.tree.chain import build_chain
    from ddtree.tree.host import build_tree
    from ddtree.types import DraftTree, Generation, Marginals, Round, Transitions

__version__ = "0.1.0"

_HOME = {
    "load": "ddtree.pair",
    "load_target": "ddtree.models.loading",
    "load_drafter": "ddtree.models.loading",
    "pack_linears": "ddtree.models.packed",
    "Pair": "ddtree.pair",
    "DecodeConfig": "ddtree.config",
    "Drafter": "ddtree.draft",
    "DraftSession": "ddtree.draft",
    "Marginals": "ddtree.types",
    "Transitions": "ddtree.types",
    "build_tree": "ddtree.tree.host",
    "build_chain": "ddtree.tree.chain",
    "DraftTree": "ddtree.types",
    "Round": "ddtree.types",
    "Generation": "ddtree.types",
    "compare": "ddtree.comparison",
    "Comparison": "ddtree.comparison",
    "custom_generate": "ddtree.hf_generate",
    "UserError": "ddtree.errors",
}

__all__ = [  # noqa: RUF022, in the order of the data flow
    "load",
    "load_target",
    "load_drafter",
    "pack_linears",
    "Pair",
    "DecodeConfig",
    "Drafter",
    "DraftSession",
    "Marginals",
    "Transitions",
    "build_tree",
    "build_chain",
    "DraftTree",
    "Round",
    "Generation",
    "compare",
    "Comparison",
    "custom_generate",
    "UserError",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ddtree' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
