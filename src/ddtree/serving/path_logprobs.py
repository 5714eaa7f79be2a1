"""Log-probabilities along the accepted paths, as vLLM gives them for plain decoding.

Only the rows that a walk came to are looked at. Knows no rule: what processed logits are was
settled when the tokens were chosen.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Float32, Int32, Int64
from torch import Tensor
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from ddtree.serving.choosing import Chosen


def wants_logprobs(metadata: SamplingMetadata) -> bool:
    """Whether a request of the step asks for log-probabilities."""
    return metadata.max_num_logprobs is not None or bool(metadata.logprob_token_ids)


def wants_processed(metadata: SamplingMetadata, sampler: Sampler) -> bool:
    """Whether they are those of processed logits, which choosing must keep then."""
    return wants_logprobs(metadata) and sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES


@torch.inference_mode()
def logprobs_along_paths(
    raw_logits: Float[Tensor, "M V"],
    chosen: Chosen,
    path_rows: Int64[Tensor, "R X"],
    token_ids: Int32[Tensor, "R X"] | Int64[Tensor, "R X"],
    *,
    metadata: SamplingMetadata,
    sampler: Sampler,
) -> LogprobsTensors | None:
    """What the requests' log-probabilities are at the rows that were walked.

    Args:
        raw_logits: as the target gave them, a grammar's bans included.
        chosen: with `processed` where `wants_processed` says so.
        path_rows: the rows of each request's walk, its root first, padded with any row.
        token_ids: what was chosen there, -1 where padded.
        metadata: of the R requests.
        sampler: vLLM's, which knows the mode.

    Returns:
        None where nobody asks. Else of R * X entries, request after request, which
        `RejectionSampler.parse_output` picks from by `token_ids`; padded ones are 0.
    """
    if not wants_logprobs(metadata):
        return None
    mode = sampler.logprobs_mode
    source = raw_logits
    if mode in PROCESSED_LOGPROBS_MODES:
        assert chosen.processed is not None, "processed logits were not kept"
        source = chosen.processed
    entries = torch.nonzero(token_ids.flatten() >= 0).flatten()
    logits_EV = source[path_rows.flatten()[entries]]
    if mode in ("raw_logits", "processed_logits"):
        values_EV = logits_EV.to(torch.float32)
    else:
        values_EV = sampler.compute_logprobs(logits_EV)
    said = token_ids.flatten()[entries].to(torch.int64)
    requests = (entries // token_ids.shape[1]).tolist()
    found = _gather(values_EV, said, requests, metadata, sampler)
    return LogprobsTensors(*(_spread(field, entries, token_ids.numel()) for field in found[:3]))


def _gather(
    values_EV: Float32[Tensor, "E V"],
    said: Int64[Tensor, " E"],
    requests: list[int],
    metadata: SamplingMetadata,
    sampler: Sampler,
) -> LogprobsTensors:
    """vLLM's own choice of columns; tokens asked for by name go before a number of best ones."""
    named = metadata.logprob_token_ids
    if not named:
        return sampler.gather_logprobs(values_EV, metadata.max_num_logprobs, said)
    of_entry = {e: named[r] for e, r in enumerate(requests) if r in named}
    found = sampler.gather_specific_token_logprobs(values_EV, of_entry, said)
    assert found is not None, "every request of a step says a token"
    return found


def _spread(field: Tensor, entries: Int64[Tensor, " E"], num_entries: int) -> Tensor:
    spread = field.new_zeros((num_entries, *field.shape[1:]))
    spread[entries] = field
    return spread
