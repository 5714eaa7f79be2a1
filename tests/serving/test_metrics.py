"""Draft trees in Prometheus: exact, labelled as vLLM's, and silent for other workers."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's imports warn
    pytest.importorskip("vllm.v1.metrics.loggers", reason="needs vLLM: make serving-env")
pytestmark = pytest.mark.filterwarnings("ignore::Warning")

from prometheus_client import REGISTRY  # noqa: E402
from vllm.v1.metrics.loggers import AggregateStatLoggerBase, StatLoggerBase  # noqa: E402
from vllm.v1.metrics.stats import SchedulerStats  # noqa: E402
from vllm.v1.spec_decode.metrics import SpecDecodingStats  # noqa: E402

from ddtree.serving.metrics import TreeMetrics, drafts_of  # noqa: E402
from ddtree.serving.plugin import CPU_WORKER  # noqa: E402

ROOT = Path(__file__).parents[2]
LABELS = {"model_name": "tiny", "engine": "0"}


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    yield
    for collector, names in list(REGISTRY._collector_to_names.items()):
        if any(name.startswith("ddtree:") for name in names):
            REGISTRY.unregister(collector)


def engine(worker: str = CPU_WORKER, **additional: object) -> Any:
    return Namespace(
        parallel_config=Namespace(worker_cls=worker),
        model_config=Namespace(served_model_name="tiny"),
        additional_config=additional,
    )


def step(*drafts: tuple[int, int], num_spec_tokens: int = 16) -> SchedulerStats:
    """What vLLM's scheduler says of a step: nodes and accepted nodes of each request."""
    stats = SpecDecodingStats.new(num_spec_tokens)
    for num_nodes, num_accepted in drafts:
        stats.observe_draft(num_draft_tokens=num_nodes, num_accepted_tokens=num_accepted)
    return SchedulerStats(spec_decoding_stats=stats)


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"ddtree:{name}", {**LABELS, **labels})


def test_counts_and_histograms_are_those_of_the_drafts() -> None:
    metrics = TreeMetrics(engine(), [0])
    metrics.record(step((16, 3), (4, 0), (16, 16)), None)
    metrics.record(step((1, 1)), None)
    assert value("rounds_total") == 4
    assert value("drafted_tokens_total") == 37
    assert value("accepted_tokens_total") == 20
    assert value("acceptance_length_count") == 4
    assert value("acceptance_length_sum") == 4 + 1 + 17 + 2
    assert [value("acceptance_length_bucket", le=le) for le in ("1.0", "2.0", "4.0", "16.0")] == [
        1,
        2,
        3,
        3,
    ]
    assert value("tree_nodes_sum") == 37
    assert [value("tree_nodes_bucket", le=le) for le in ("1.0", "2.0", "4.0", "16.0")] == [
        1,
        1,
        2,
        4,
    ]
    assert value("budget") == 1
    metrics.record(step((16, 0), (4, 0)), None)
    assert value("budget") == 10


def test_a_step_without_drafts_changes_nothing() -> None:
    metrics = TreeMetrics(engine(), [0])
    metrics.record(None, None)
    metrics.record(SchedulerStats(), None)
    assert value("rounds_total") == 0
    assert value("budget") == 0


def test_each_engine_has_its_own_label() -> None:
    metrics = TreeMetrics(engine(), [0, 3])
    metrics.record(step((2, 1)), None, engine_idx=3)
    assert value("rounds_total") == 0
    assert value("rounds_total", engine="3") == 1


def test_a_second_engine_of_a_process_begins_anew() -> None:
    TreeMetrics(engine(), [0]).record(step((2, 1)), None)
    TreeMetrics(engine(), [0])
    assert value("rounds_total") == 0


def test_nothing_is_registered_for_another_worker() -> None:
    metrics = TreeMetrics(engine("vllm.v1.worker.cpu_worker.CPUWorker"), [0])
    metrics.record(step((2, 1)), None)
    assert value("rounds_total") is None


def test_a_worker_of_ones_own_is_known_by_its_options() -> None:
    TreeMetrics(engine("mine.Worker", ddtree={"budget": 3}), [0]).record(step((2, 1)), None)
    assert value("rounds_total") == 1


def test_it_is_what_vllm_takes_for_a_stat_logger() -> None:
    assert issubclass(TreeMetrics, AggregateStatLoggerBase | StatLoggerBase)
    metrics = TreeMetrics(engine(), [0])
    metrics.log()
    metrics.log_engine_initialized()
    metrics.record_sleep_state(1, 1)
    metrics.record_admission_rejection("max_num_queued_reqs")


def test_the_lengths_of_drafts_follow_from_counts_per_position() -> None:
    assert list(drafts_of(0, [])) == []
    assert list(drafts_of(2, [0, 0])) == [0, 0]
    assert list(drafts_of(5, [4, 4, 1])) == [0, 2, 2, 2, 3]


SEVERAL_SERVERS = """
import os
from prometheus_client import CollectorRegistry, multiprocess
from tests.serving.test_metrics import engine, step
from ddtree.serving.metrics import TreeMetrics
for num_nodes in (4, 8):
    if (server := os.fork()) == 0:
        TreeMetrics(engine(), [0]).record(step((num_nodes, 1)), None)
        os._exit(0)
    assert os.waitpid(server, 0)[1] == 0
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
labels = {"model_name": "tiny", "engine": "0"}
for name in ("rounds_total", "acceptance_length_sum", "tree_nodes_count", "budget"):
    print(registry.get_sample_value(f"ddtree:{name}", labels))
"""


def test_several_api_servers_are_one_to_prometheus(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SEVERAL_SERVERS],
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert [float(word) for word in done.stdout.split()[-4:]] == [2, 4, 2, 8]
