"""What the target says at the rows of a step, by each request's own rule (DESIGN 5).

    token at position t = argmax over v of ( processed_logits(v) + G_t(v) )

Logits are processed as vLLM processes those of plain decoding, in its order; then its random
numbers give way to noise by seed and position. That noise does not know how many rows were
verified, so a request's text does not either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor
from vllm.sampling_params import SamplingType
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.sample.logits_processor import (
    LogitBiasLogitsProcessor,
    LogitsProcessors,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

from ddtree.serving.kept import best_kept
from ddtree.serving.row_logits import RowLogits
from ddtree.serving.row_paths import RequestRule, StepRows

# What they do is done here from the sampling parameters, at every row.
_KNOWN = (MinTokensLogitsProcessor, LogitBiasLogitsProcessor, MinPLogitsProcessor)

NOT_CHOSEN = -1


@dataclass(frozen=True)
class Chosen:
    """What the target says at the rows of a step.

    Args:
        token_ids: [M], `NOT_CHOSEN` at rows that the walk does not come to, if they were left out.
        processed: [M, V], what the choice was made from, without the noise; None if not kept.
    """

    token_ids: Int64[Tensor, " M"]
    processed: Float32[Tensor, "M V"] | None = None


def unsupported_processors(processors: LogitsProcessors) -> list[str]:
    """Names of logits processors that know one row per request, and would be left out here."""
    return [type(found).__name__ for found in processors.all if type(found) not in _KNOWN]


@torch.inference_mode()
def choose_rows(
    logits: Float[Tensor, "M V"],
    rows: StepRows,
    metadata: SamplingMetadata,
    rules: Sequence[RequestRule],
    *,
    keep_processed: bool = False,
) -> Chosen:
    """Choose at every row; waits for no device.

    Args:
        logits: of the target, a grammar's bans included; left as they are.
        rows: which they are.
        metadata: vLLM's of the step's R requests.
        rules: of the same requests; their noise of decided positions is forgotten.
        keep_processed: the log-probabilities asked for are those of processed logits.
    """
    step = _Step(logits, rows, metadata, rules, keep_processed)
    return Chosen(step.choose(range(rows.num_rows)), step.processed)


@torch.inference_mode()
def choose_visited_rows(
    logits: Float[Tensor, "M V"],
    rows: StepRows,
    metadata: SamplingMetadata,
    rules: Sequence[RequestRule],
    *,
    keep_processed: bool = False,
) -> Chosen:
    """As `choose_rows`, but only where the walk comes: level by level, which is for CPUs.

    Rows that are nothing but an argmax are chosen at all the same: that takes no longer.
    """
    step = _Step(logits, rows, metadata, rules, keep_processed)
    simple = [m for m in range(rows.num_rows) if not step.is_busy(m)]
    token_ids = [NOT_CHOSEN] * rows.num_rows
    level = [m for m in rows.root_rows.tolist() if step.is_busy(m)]
    for visited in (simple, level):
        _choose_into(token_ids, step, visited)
    while level:
        found = (rows.children.get((m, token_ids[m])) for m in level)
        level = [child for child in found if child is not None]
        _choose_into(token_ids, step, level)
    return Chosen(torch.tensor(token_ids, dtype=torch.int64, device=logits.device), step.processed)


def _choose_into(token_ids: list[int], step: _Step, rows: Sequence[int]) -> None:
    if rows:
        for row, token in zip(rows, step.choose(rows).tolist(), strict=True):
            token_ids[row] = token


class _Step:
    """Chooses at rows of one step, all at once or some after others."""

    def __init__(
        self,
        logits: Tensor,
        rows: StepRows,
        metadata: SamplingMetadata,
        rules: Sequence[RequestRule],
        keep_processed: bool,
    ) -> None:
        self._logits = logits
        self._metadata = metadata
        self._rules = rules
        self._request_of_row: list[int] = rows.request_of_row.tolist()
        self._depths: list[int] = rows.depths.tolist()
        self._row_logits = RowLogits(rows, metadata, rules)
        self._random = frozenset(
            i
            for i, rule in enumerate(rules)
            if rule.sampling_params.sampling_type != SamplingType.GREEDY
        )
        self._busy = self._row_logits.requests | self._random
        for i in self._random:
            rules[i].noise.forget_before(rules[i].num_tokens)
        self.processed: Float32[Tensor, "M V"] | None = None
        if keep_processed:
            self.processed = logits.to(torch.float32, copy=True)

    def is_busy(self, row: int) -> bool:
        """Whether more than an argmax is to be done at a row."""
        return self._request_of_row[row] in self._busy

    def choose(self, rows: Sequence[int]) -> Int64[Tensor, " A"]:
        """The tokens at some rows of the step, at least one."""
        busy = [i for i, m in enumerate(rows) if self.is_busy(m)]
        if not busy:
            return _argmax(self._at(rows))
        token_ids = self._logits.new_empty(len(rows), dtype=torch.int64)
        if len(busy) < len(rows):
            simple = [i for i, m in enumerate(rows) if not self.is_busy(m)]
            token_ids[self._ids(simple)] = _argmax(self._at([rows[i] for i in simple]))
        token_ids[self._ids(busy)] = self._choose_busy([rows[i] for i in busy])
        return token_ids

    def _choose_busy(self, rows: Sequence[int]) -> Int64[Tensor, " A"]:
        logits_AV = self._at(rows)
        if logits_AV.data_ptr() == self._logits.data_ptr():
            logits_AV = logits_AV.clone()
        self._row_logits.change(logits_AV, rows)
        random = [i for i, m in enumerate(rows) if self._request_of_row[m] in self._random]
        if len(random) == len(rows):
            token_ids = self._draw(logits_AV, rows)
        else:
            token_ids = _argmax(logits_AV)
            if random:
                index = self._ids(random)
                drawn_AV = logits_AV[index]
                token_ids[index] = self._draw(drawn_AV, [rows[i] for i in random])
                logits_AV[index] = drawn_AV
        if self.processed is not None:
            self.processed[self._ids(rows)] = logits_AV
        return token_ids

    def _draw(self, logits_AV: Float32[Tensor, "A V"], rows: Sequence[int]) -> Int64[Tensor, " A"]:
        """Where temperature, min-p, top-k and top-p come last; what they do is written back."""
        requests = [self._request_of_row[m] for m in rows]
        logits_AV.div_(self._metadata.temperature[self._ids(requests)][:, None])
        self._keep_by_min_p(logits_AV, requests)
        cut = [i for i, r in enumerate(requests) if self._cuts(r)]
        search = self.processed is None and logits_AV.is_cpu
        if cut and not search:
            index = self._ids(cut)
            kept = self._keep_exactly(logits_AV[index], [requests[i] for i in cut])
            logits_AV[index] = kept
        scores_AV = self._noise(rows).add_(logits_AV)
        token_ids = _argmax(scores_AV)
        if cut and search:
            for i in cut:
                token_ids[i] = self._best_kept(logits_AV[i], scores_AV[i], requests[i])
        return token_ids

    def _keep_by_min_p(self, logits_AV: Tensor, requests: Sequence[int]) -> None:
        min_ps = [self._rules[r].sampling_params.min_p for r in requests]
        low = [i for i, min_p in enumerate(min_ps) if min_p > 0]
        if not low:
            return
        index = self._ids(low)
        probs_AV = logits_AV[index].softmax(dim=-1)
        device = probs_AV.device
        least = async_tensor_h2d([min_ps[i] for i in low], dtype=torch.float32, device=device)
        border = probs_AV.amax(dim=-1, keepdim=True) * least[:, None]
        logits_AV[index] = logits_AV[index].masked_fill_(probs_AV < border, -torch.inf)

    def _cuts(self, request: int) -> bool:
        params = self._rules[request].sampling_params
        cuts: bool = params.top_p < 1 or 0 < params.top_k < self._logits.shape[1]
        return cuts

    def _keep_exactly(
        self, logits_AV: Float32[Tensor, "A V"], requests: Sequence[int]
    ) -> Float32[Tensor, "A V"]:
        """Top-k and top-p by vLLM's own function; may write into the logits."""
        index = self._ids(requests)
        top_k, top_p = self._metadata.top_k, self._metadata.top_p
        kept: Tensor = apply_top_k_top_p(
            logits_AV,
            None if top_k is None else top_k[index],
            None if top_p is None else top_p[index],
        )
        return kept

    def _best_kept(self, logits_V: Tensor, scores_V: Tensor, request: int) -> int:
        params = self._rules[request].sampling_params
        vocab_size = self._logits.shape[1]
        return best_kept(
            logits_V,
            scores_V,
            top_k=min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size,
            top_p=params.top_p,
            keep_exactly=lambda row_V: self._keep_exactly(row_V[None], [request])[0],
        )

    def _noise(self, rows: Sequence[int]) -> Float32[Tensor, "A V"]:
        """Of each row's position; rows of one request and depth have one drawn row of it."""
        _, vocab_size = self._logits.shape
        drawn = []
        for m in rows:
            rule = self._rules[self._request_of_row[m]]
            position = rule.num_tokens + self._depths[m]
            drawn.append(rule.noise.row(position, vocab_size, self._logits.device))
        return torch.stack(drawn)

    def _at(self, rows: Sequence[int]) -> Float32[Tensor, "A V"]:
        """The logits of these rows; no copy, but the step's own, if they are all in float32."""
        if len(rows) == self._logits.shape[0]:
            return self._logits.to(torch.float32)
        return self._logits[self._ids(rows)].to(torch.float32)

    def _ids(self, values: Sequence[int]) -> Int64[Tensor, " X"]:
        ids: Tensor = async_tensor_h2d(list(values), dtype=torch.int64, device=self._logits.device)
        return ids


def _argmax(logits_AV: Float32[Tensor, "A V"]) -> Int64[Tensor, " A"]:
    """As vLLM takes it: on a CPU by a kernel of its own."""
    token_ids: Tensor = Sampler.greedy_sample(logits_AV)
    return token_ids.to(torch.int64)
