"""What draft trees did, for Prometheus: beside vLLM's own metrics, at the same address.

vLLM counts draft tokens as if they were a chain; its totals stay right with trees, and its counts
per position say how many drafts had, and how many accepted, so many tokens. The histograms here
are exact: the number of drafts of just n tokens is the difference of two such counts. Steps in
which nothing was drafted are not seen.

Registered as a plugin of vLLM's for metrics (`vllm.stat_logger_plugins`), which is made in the
process of the API server; it does nothing unless the engine runs a worker of ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from ddtree.serving.plugin import runs_our_worker

_PREFIX = "ddtree:"
_LABELS = ("model_name", "engine")
_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)
_NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class TreeMetrics(AggregateStatLoggerBase):
    """vLLM's stat logger of draft trees; see the module.

    Args:
        vllm_config: of the engine.
        engine_indexes: engines that report here.
    """

    def __init__(self, vllm_config: Any, engine_indexes: Sequence[int] | None = None) -> None:
        self._is_active = runs_our_worker(vllm_config)
        if not self._is_active:
            return
        _unregister()
        self._model_name = str(vllm_config.model_config.served_model_name)
        self._rounds = Counter(f"{_PREFIX}rounds", "Drafts that were verified.", _LABELS)
        self._drafted = Counter(
            f"{_PREFIX}drafted_tokens", "Tokens of drafts that were verified.", _LABELS
        )
        self._accepted = Counter(
            f"{_PREFIX}accepted_tokens", "Draft tokens that the target accepted.", _LABELS
        )
        self._length = Histogram(
            f"{_PREFIX}acceptance_length",
            "Tokens that a verified draft brought, the bonus token included.",
            _LABELS,
            buckets=_LENGTHS,
        )
        self._nodes = Histogram(
            f"{_PREFIX}tree_nodes", "Nodes of a verified draft.", _LABELS, buckets=_NODES
        )
        self._budget = Gauge(
            f"{_PREFIX}budget",
            "Mean nodes per drafted request of the last step that had drafts.",
            _LABELS,
            multiprocess_mode="mostrecent",
        )
        for index in engine_indexes or (0,):
            self._show_zeros(index)

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Count a step. Arguments as vLLM's."""
        stats = None if scheduler_stats is None else scheduler_stats.spec_decoding_stats
        if not self._is_active or stats is None or stats.num_drafts == 0:
            return
        labels = self._labels(engine_idx)
        self._rounds.labels(*labels).inc(stats.num_drafts)
        self._drafted.labels(*labels).inc(stats.num_draft_tokens)
        self._accepted.labels(*labels).inc(stats.num_accepted_tokens)
        self._budget.labels(*labels).set(stats.num_draft_tokens / stats.num_drafts)
        length, nodes = self._length.labels(*labels), self._nodes.labels(*labels)
        for accepted in drafts_of(stats.num_drafts, stats.num_accepted_tokens_per_pos):
            length.observe(accepted + 1)
        for drafted in drafts_of(stats.num_drafts, stats.num_draft_tokens_per_pos):
            nodes.observe(drafted)

    def log_engine_initialized(self) -> None:
        """Nothing to say at the start."""

    def _labels(self, engine_index: int) -> tuple[str, str]:
        return self._model_name, str(engine_index)

    def _show_zeros(self, engine_index: int) -> None:
        """A metric is there from the start, not from the first draft on."""
        for metric in (self._rounds, self._drafted, self._accepted):
            metric.labels(*self._labels(engine_index))
        for histogram in (self._length, self._nodes):
            histogram.labels(*self._labels(engine_index))
        self._budget.labels(*self._labels(engine_index))


def drafts_of(num_drafts: int, num_per_position: Sequence[int]) -> Iterator[int]:
    """How many tokens each draft had, shortest first.

    Args:
        num_drafts: drafts of a step.
        num_per_position: of these, how many had a token at the first place, the second, ...

    >>> list(drafts_of(3, [2, 1, 1]))
    [0, 1, 3]
    """
    at_least = (num_drafts, *num_per_position, 0)
    for length in range(len(at_least) - 1):
        yield from (length for _ in range(at_least[length] - at_least[length + 1]))


def _unregister() -> None:
    """Drop the metrics of an engine that this process had before, as vLLM does with its own."""
    for collector, names in list(REGISTRY._collector_to_names.items()):
        if any(name.startswith(_PREFIX) for name in names):
            REGISTRY.unregister(collector)
