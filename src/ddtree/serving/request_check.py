"""Refuses a request with wrong options where it comes in, before an engine hears of it.

vLLM has one official place where an extension may look at a request in the API server's process:
the class of a custom logits processor is shown its parameters, and a ValueError becomes an HTTP
400. `ddtree serve` names this class in `--logits-processors`. It changes no logits.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor

from ddtree.serving.options import request_options


class RequestCheck(LogitsProcessor):
    """Looks at `vllm_xargs`; see the module."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Refuse wrong options of ours.

        Args:
            sampling_params: vLLM's `SamplingParams` of one request.

        Raises:
            OptionError: see `request_options`.
        """
        request_options(sampling_params.extra_args)

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        """Arguments as vLLM's; none is used."""

    def apply(self, logits: Tensor) -> Tensor:
        """Logits as they are."""
        return logits

    def is_argmax_invariant(self) -> bool:
        """It changes nothing."""
        return True

    def update_state(self, batch_update: Any) -> None:
        """There is no state."""
