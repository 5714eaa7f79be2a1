"""The names by which vLLM finds us, and whether an engine is one of ours.

All that draft trees need is put in place by the worker that `--worker-cls` names, so there is
nothing to register in vLLM's processes (`vllm.general_plugins`). What vLLM loads besides, for every
server of an environment with ddtree in it, are the metrics (`metrics`), which are asleep where
another worker runs. This module imports nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddtree.serving.options import SECTION

CPU_WORKER = "ddtree.serving.cpu.TreeCPUWorker"
CUDA_WORKER = "ddtree.serving.cuda.TreeGPUWorker"
# For vLLM's `--logits-processors`.
REQUEST_CHECK = "ddtree.serving.request_check:RequestCheck"


def runs_our_worker(vllm_config: Any) -> bool:
    """Whether an engine's worker is one of ours, or made from one by someone who says so.

    Args:
        vllm_config: vLLM's. A worker of one's own, derived from ours, is seen by the section
            "ddtree" of its `additional_config`.
    """
    worker = str(vllm_config.parallel_config.worker_cls)
    options = vllm_config.additional_config
    return worker in (CPU_WORKER, CUDA_WORKER) or (
        isinstance(options, Mapping) and SECTION in options
    )


def without_request_check(logits_processors: object) -> list[object] | None:
    """What is left of vLLM's custom logits processors in a worker.

    vLLM refuses custom logits processors beside speculation when it makes a model runner. Ours
    changes no logits and has done its work where requests come in, so a worker takes it out first.

    Args:
        logits_processors: `model_config.logits_processors`.

    >>> without_request_check(["ddtree.serving.request_check:RequestCheck"]) is None
    True
    """
    if not isinstance(logits_processors, list | tuple):
        return None
    return [each for each in logits_processors if each != REQUEST_CHECK] or None
