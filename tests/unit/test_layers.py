"""Imports point one way: down the table. A new file without a place in it fails."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import ddtree

SOURCE = Path(ddtree.__file__).parent

# From the bottom up. A module may import from its own layer and from those above it in this list.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("types",),
    ("host_marginals",),
    ("config",),
    (
        "attention",
        "attention.backends",
        "attention.grouped",
        "attention.masks",
        "attention.plain",
        "attention.split",
        "attention.visibility",
        "cache",
        "cache.batch",
        "cache.hf",
        "cache.recurrent",
        "cache.store",
        "models",
        "models.architectures",
        "models.delta_rule",
        "models.dflash2",
        "models.draft_vocabulary",
        "models.drafter",
        "models.drafter_checkpoint",
        "models.drafter_config",
        "models.drafter_export",
        "models.drafter_network",
        "models.drafter_weights",
        "models.folder",
        "models.fused",
        "models.gguf",
        "models.kernels",
        "models.loading",
        "models.medusa",
        "models.packed",
        "models.pard",
        "models.placement",
        "models.pretrained",
        "models.recurrent",
        "models.speculators",
        "models.speculators_tensors",
        "models.target",
        "models.text_part",
        "models.target_ends",
        "models.transitions",
        "models.zoo",
        "sampling",
        "sampling.calibration",
        "sampling.coupling",
        "sampling.grammar",
        "sampling.gumbel",
        "sampling.legality",
        "sampling.lookup",
        "sampling.mixture",
        "sampling.noise",
        "sampling.processors",
        "sampling.rule",
        "sampling.worth",
        "tree",
        "tree.batched",
        "tree.batched_plan",
        "tree.chain",
        "tree.geometry",
        "tree.host",
        "tree.native",
        "tree.reference",
    ),
    ("commit", "draft", "prefill", "stopping", "text", "verify", "walk"),
    ("overhear",),
    ("costs",),
    ("budget",),
    ("decode",),
    ("coupled", "logprobs", "lookup", "options", "prompt", "timing", "untested"),
    ("legal",),
    ("pair",),
    ("journal",),
    ("bench", "bench.records"),
    ("comparison", "hf_generate"),
    ("report", "train.precision"),
    (
        "doctor",
        "progress",
        "provenance",
        "train",
        "train.fit_config",
        "train.peers",
        "train.workers",
    ),
    ("convert", "tracing", "tracing.chrome_trace", "tracing.trace"),
    ("tracing.trace_file",),
    ("tracing.recording", "tracing.replay"),
    ("tracing.replay_report",),
    ("viewer", "viewer.layout", "viewer.scenes", "viewer.token_names"),
    ("viewer.tree_page", "viewer.tree_text"),
    ("train.network", "train.objective", "train.prompts", "train.samples", "train.schedule"),
    ("train.packing", "train.responses", "train.split", "train.target_source"),
    ("train.muon",),
    ("train.optimizers",),
    ("train.features", "train.first_layers", "train.fit", "train.respond"),
    ("train.accuracy", "train.checkpoint", "train.first_weights"),
    ("train.evaluate",),
    ("train.evaluation", "train.recipe"),
    ("train.plots",),
    ("train.run_evaluate", "train.run_features", "train.run_fit", "train.run_respond"),
    ("train.pipeline",),
    ("bench.statistics",),
    ("bench.measures",),
    ("bench.anatomy",),
    ("bench.summary",),
    ("bench.report_tables",),
    ("bench.panels", "bench.report_sections", "bench.run_pairs"),
    ("bench.plots",),
    ("bench.report_html", "bench.report_markdown"),
    ("bench.run_report",),
    ("bench.run_compare",),
    ("bench.arms", "bench.hub"),
    ("bench.outside", "bench.workloads"),
    ("bench.runner",),
    ("bench.run_bench",),
    (
        "serving",
        "serving.config_rules",
        "serving.device_steps",
        "serving.draft_head",
        "serving.inner_parts",
        "serving.kept",
        "serving.options",
        "serving.replacing",
        "serving.requests",
        "serving.step_costs",
        "serving.tree_rows",
        "serving.triton_kernels",
    ),
    (
        "serving.measuring",
        "serving.paged_attention",
        "serving.plugin",
        "serving.shared_budget",
        "serving.step",
        "serving.triton_attention",
    ),
    (
        "serving.compatibility",
        "serving.drafting",
        "serving.metrics",
        "serving.request_check",
        "serving.row_paths",
        "serving.tree_keys",
    ),
    ("serving.drafter_check", "serving.row_logits"),
    ("serving.launch",),
    ("serving.choosing",),
    ("serving.path_logprobs",),
    ("serving.proposer", "serving.runner"),
    ("serving.cpu", "serving.cuda"),
    ("cli", "cli.options", "cli.prompt", "cli.record", "cli.replay", "cli.sampling"),
    ("cli.bench", "cli.convert", "cli.serve", "cli.train", "cli.tree"),
    ("cli.app",),
)
RANKS = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
# `ddtree` itself re-exports from everywhere, lazily; below it, only this name is taken from it.
TAKEN_FROM_THE_PACKAGE = {"__version__"}


def modules() -> dict[str, str]:
    """The source of each module below `ddtree`, by its name without the prefix."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            found[name] = path.read_text()
    return found


def imports(source: str) -> Iterator[str]:
    """What a module imports of ours, wherever it stands: functions and TYPE_CHECKING included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "ddtree":
                    yield alias.name.removeprefix("ddtree").removeprefix(".")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            module = node.module.split(".")
            if module[0] == "ddtree":
                for alias in node.names:
                    full = ".".join([*module[1:], alias.name])
                    is_module = full in RANKS
                    is_name = alias.name in TAKEN_FROM_THE_PACKAGE and module == ["ddtree"]
                    if not is_name:
                        yield full if is_module else ".".join(module[1:])
        elif isinstance(node, ast.Name) and node.id in ("import_module", "__import__"):
            yield "a dynamic import"


def pointing_up(name: str, source: str) -> list[str]:
    """Imports of this module that are not at or below its layer; unknown names count."""
    return [other for other in imports(source) if RANKS.get(other, len(LAYERS)) > RANKS[name]]


def test_every_module_has_a_place_and_every_place_a_module() -> None:
    assert sorted(modules()) == sorted(RANKS)
    assert len(RANKS) == sum(map(len, LAYERS))


@pytest.mark.parametrize("name", RANKS)
def test_no_import_points_up(name: str) -> None:
    assert pointing_up(name, modules()[name]) == []


def test_no_two_modules_import_each_other() -> None:
    graph = {name: set(imports(source)) - {name} for name, source in modules().items()}
    order = list(TopologicalSorter(graph).static_order())
    assert set(order) == set(RANKS)


@pytest.mark.parametrize(
    "source",
    [
        "from ddtree.pair import Pair",
        "from ddtree import pair",
        "import ddtree.pair",
        "import ddtree",
        "from ddtree import load",
        "def f():\n    from ddtree.pair import Pair",
        "if TYPE_CHECKING:\n    from ddtree.pair import Pair",
        "try:\n    from ddtree import pair as p\nexcept ImportError:\n    pass",
        "from ddtree.train.loop import fit",
        "import_module('ddtree.pair')",
    ],
)
def test_an_import_that_points_up_is_seen_wherever_it_stands(source: str) -> None:
    assert pointing_up("decode", source)


@pytest.mark.parametrize(
    "source",
    [
        "from ddtree.walk import walk",
        "from ddtree import walk",
        "from ddtree import __version__",
        "from ddtree.models.target import Target",
        "import numpy",
        "from ddtree_extras import x",
    ],
)
def test_an_import_that_points_down_is_fine(source: str) -> None:
    assert pointing_up("decode", source) == []
