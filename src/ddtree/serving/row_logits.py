"""What a request asks to be done to the target's logits before a token is chosen, row by row.

The order is vLLM's (`vllm/v1/sample/sampler.py`): allowed tokens, bad words, minimum length,
biases, penalties, thinking budget. There a request has one row and its output so far; here it has a
row per node, and what counts as output at a row ends with the row's own path. A grammar's bans are
in the logits already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor
from vllm._custom_ops import apply_repetition_penalties
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.sample.metadata import SamplingMetadata

from ddtree.serving.row_paths import RequestRule, StepRows


@dataclass(frozen=True)
class _Text:
    """What P penalised requests have said, prompt and output, before a step.

    Args:
        token_ids: [P, X], padded with token 0.
        counts: [P, V], how often each token is in the output.
        in_prompt: [P, V].
    """

    token_ids: Int64[Tensor, "P X"]
    counts: Float32[Tensor, "P V"]
    in_prompt: Bool[Tensor, "P V"]


class RowLogits:
    """Changes logits at rows of one step.

    Args:
        rows: of the step.
        metadata: of the step's R requests.
        rules: of the same requests.
    """

    def __init__(
        self, rows: StepRows, metadata: SamplingMetadata, rules: Sequence[RequestRule]
    ) -> None:
        self._rows = rows
        self._metadata = metadata
        self._rules = rules
        self._request_of_row: list[int] = rows.request_of_row.tolist()
        self._depths: list[int] = rows.depths.tolist()
        params = [rule.sampling_params for rule in rules]
        self._allowed = frozenset(i for i, p in enumerate(params) if p.allowed_token_ids)
        self._bad_words = frozenset(metadata.bad_words_token_ids)
        self._min_tokens = frozenset(
            i for i, p in enumerate(params) if len(rules[i].output_token_ids) < p.min_tokens
        )
        self._biased = frozenset(i for i, p in enumerate(params) if p.logit_bias)
        self._penalised = tuple(
            i
            for i, p in enumerate(params)
            if p.presence_penalty != 0 or p.frequency_penalty != 0 or p.repetition_penalty != 1
        )
        self._budgeted = frozenset(
            i for i, p in enumerate(params) if p.thinking_token_budget is not None
        )
        self._text: _Text | None = None  # from the first penalised row that is asked for

    @cached_property
    def requests(self) -> frozenset[int]:
        """Those that ask for any change."""
        return frozenset().union(
            self._allowed,
            self._bad_words,
            self._min_tokens,
            self._biased,
            self._penalised,
            self._budgeted,
        )

    def change(self, logits_AV: Float32[Tensor, "A V"], rows: Sequence[int]) -> None:
        """Do what is asked.

        Args:
            logits_AV: of A rows. Mutated.
            rows: [A], which rows of the step they are. A root is to come once in a step: a
                thinking budget counts how often it is asked.
        """
        self._hold_to_allowed(logits_AV, rows)
        self._ban(logits_AV, list(self._endings_of_bad_words(rows)))
        self._hold_back_stop_tokens(logits_AV, rows)
        self._add_biases(logits_AV, rows)
        self._penalise(logits_AV, rows)
        self._force_end_of_thinking(logits_AV, rows)

    def _places(self, rows: Sequence[int], requests: frozenset[int]) -> list[tuple[int, int, int]]:
        """(place among these rows, row of the step, request), of the rows of these requests."""
        if not requests:
            return []
        of_row = self._request_of_row
        return [(i, m, of_row[m]) for i, m in enumerate(rows) if of_row[m] in requests]

    def _ids(self, values: Sequence[int]) -> Int64[Tensor, " X"]:
        device = self._metadata.repetition_penalties.device
        ids: Tensor = async_tensor_h2d(list(values), dtype=torch.int64, device=device)
        return ids

    def _hold_to_allowed(self, logits_AV: Tensor, rows: Sequence[int]) -> None:
        places = self._places(rows, self._allowed)
        if not places:
            return
        index = self._ids([i for i, _, _ in places])
        banned = self._metadata.allowed_token_ids_mask[self._ids([r for _, _, r in places])]
        logits_AV[index] = logits_AV[index].masked_fill_(banned, -torch.inf)

    def _endings_of_bad_words(self, rows: Sequence[int]) -> Iterator[tuple[int, int]]:
        for i, row, request in self._places(rows, self._bad_words):
            words = self._metadata.bad_words_token_ids[request]
            longest = max((len(word) for word in words), default=1)
            past = self._end_of_output(row, request, longest - 1)
            for *beginning, last in words:
                if past[len(past) - len(beginning) :] == beginning:
                    yield i, last

    def _end_of_output(self, row: int, request: int, count: int) -> list[int]:
        """The last tokens behind the prompt at a row; fewer where there are not so many."""
        path = self._rows.path(row)
        output = self._rules[request].output_token_ids
        missing = max(count - len(path), 0)
        before = list(output[max(len(output) - missing, 0) :])
        return (before + path)[-count:] if count else []

    def _ban(self, logits_AV: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        if pairs:
            index = self._ids([i for i, _ in pairs]), self._ids([token for _, token in pairs])
            logits_AV.index_put_(index, logits_AV.new_full((), -torch.inf))

    def _hold_back_stop_tokens(self, logits_AV: Tensor, rows: Sequence[int]) -> None:
        pairs: list[tuple[int, int]] = []
        for i, row, request in self._places(rows, self._min_tokens):
            rule = self._rules[request]
            params = rule.sampling_params
            if len(rule.output_token_ids) + self._depths[row] >= params.min_tokens:
                continue
            stop_ids = sorted(params.all_stop_token_ids)
            if params.structured_outputs is not None:
                self._ban_unless_all(logits_AV[i], stop_ids)
            else:
                pairs += [(i, token) for token in stop_ids]
        self._ban(logits_AV, pairs)

    def _ban_unless_all(self, logits_V: Float32[Tensor, " V"], token_ids: Sequence[int]) -> None:
        """A grammar that allows nothing but to stop goes before a minimum length, as in vLLM."""
        index = self._ids(token_ids)
        held_back = logits_V.index_fill(0, index, -torch.inf)
        nothing_left = held_back.isneginf().all()
        logits_V.copy_(torch.where(nothing_left, logits_V, held_back))

    def _add_biases(self, logits_AV: Tensor, rows: Sequence[int]) -> None:
        places = self._places(rows, self._biased)
        if not places:
            return
        index, token_ids, values = [], [], []
        for i, _, request in places:
            bias = self._rules[request].sampling_params.logit_bias or {}
            index += [i] * len(bias)
            token_ids += list(bias)
            values += list(bias.values())
        at = self._ids(index), self._ids(token_ids)
        logits_AV[at] += async_tensor_h2d(values, dtype=torch.float32, device=logits_AV.device)

    def _penalise(self, logits_AV: Tensor, rows: Sequence[int]) -> None:
        places = self._places(rows, frozenset(self._penalised))
        if not places:
            return
        text = self._text_so_far(logits_AV.shape[1])
        requests = self._ids([request for _, _, request in places])
        known = self._ids([self._penalised.index(request) for _, _, request in places])
        paths = self._padded([self._rows.path(row) for _, row, _ in places], -1)
        # The penalised tokens alone. A token that is there twice is changed twice in the same way.
        ids_AX = torch.cat([text.token_ids[known], paths.clamp(min=0)], dim=1)
        counts_AX = text.counts[known[:, None], ids_AX]
        for said in paths.unbind(dim=1):
            counts_AX += ids_AX == said[:, None]
        in_output = counts_AX > 0
        at = self._ids([i for i, _, _ in places])[:, None], ids_AX
        changed = logits_AV[at]
        metadata = self._metadata
        apply_repetition_penalties(
            changed,
            text.in_prompt[known[:, None], ids_AX],
            in_output,
            metadata.repetition_penalties[requests],
        )
        changed -= metadata.frequency_penalties[requests][:, None] * counts_AX
        changed -= metadata.presence_penalties[requests][:, None] * in_output
        logits_AV.index_put_(at, changed)

    def _text_so_far(self, vocab_size: int) -> _Text:
        """What the penalised requests have said before this step."""
        if self._text is None:
            outputs = [list(self._rules[r].output_token_ids) for r in self._penalised]
            prompts = self._metadata.prompt_token_ids[self._ids(self._penalised)]
            said = self._padded(outputs, vocab_size)
            token_ids = torch.cat([prompts, said], dim=1)
            self._text = _Text(
                token_ids=token_ids.masked_fill(token_ids == vocab_size, 0),
                counts=_count(said, vocab_size),
                in_prompt=_count(prompts, vocab_size) > 0,
            )
        return self._text

    def _padded(self, lists: Sequence[Sequence[int]], padding: int) -> Int64[Tensor, "A X"]:
        longest = max(map(len, lists))
        padded = [[*ids, *[padding] * (longest - len(ids))] for ids in lists]
        return self._ids([t for ids in padded for t in ids]).view(len(lists), longest)

    def _force_end_of_thinking(self, logits_AV: Tensor, rows: Sequence[int]) -> None:
        """vLLM's own holder, which knows one row per request: such requests get no draft."""
        places = self._places(rows, self._budgeted)
        holder = self._metadata.thinking_budget_state_holder
        if not places or holder is None or not holder.has_tracked_requests():
            return
        assert all(self._depths[row] == 0 for _, row, _ in places), "a thinking budget and a draft"
        no_drafts: list[list[int]] = [[] for _ in self._rules]
        holder.update_state(self._metadata.output_token_ids, no_drafts)
        index = self._ids([i for i, _, _ in places])
        requests = self._ids([request for _, _, request in places])
        by_request = logits_AV.new_zeros((len(self._rules), logits_AV.shape[1]))
        by_request[requests] = logits_AV[index]
        by_request = holder.apply_to_logits(by_request, True, no_drafts)
        logits_AV[index] = by_request[requests]


def _count(token_ids: Int64[Tensor, "P X"], vocab_size: int) -> Float32[Tensor, "P V"]:
    """How often each token occurs in each row; V itself, which pads rows, is not counted."""
    counts = torch.zeros((token_ids.shape[0], vocab_size + 1), device=token_ids.device)
    ones = torch.ones_like(token_ids, dtype=counts.dtype)
    return counts.scatter_add_(1, token_ids, ones)[:, :vocab_size]
