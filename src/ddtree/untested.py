"""A target that is not in the table, held against plain decoding on the first prompt.

In plain decoding a forward has one row and transformers makes the mask, so what drafting could get
wrong is not in it. Knows no drafter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddtree.errors import UnsupportedModelError
from ddtree.models.target import Target
from ddtree.sampling.rule import Rule
from ddtree.types import Generation

# Roundings of the largest logit that a row among others may differ by; a wrong mask is far beyond.
_ROUNDINGS = {torch.float32: 1024, torch.bfloat16: 8, torch.float16: 32}
_STEPS = 8


def check_first_text(
    target: Target,
    rule: Rule,
    prompt_ids: Sequence[int],
    *,
    drafted: Generation,
    plain: Generation,
) -> None:
    """Whether a text with drafts is that of plain decoding.

    In bfloat16 and float16 a difference between two scores that rounding can exchange is allowed.

    Args:
        target: one that is not in the table.
        rule: a fresh one, of this request.
        prompt_ids: of both.
        drafted, plain: the same request by both ways.

    Raises:
        UnsupportedModelError: names the first difference.
    """
    ours, theirs = drafted.token_ids, plain.token_ids
    if ours == theirs:
        return
    shared = min(len(ours), len(theirs))
    index = next((i for i in range(shared) if ours[i] != theirs[i]), shared)
    gap, bound = _gap(target, rule, [*prompt_ids, *theirs[:index]])
    if target.dtype != torch.float32 and gap <= bound:
        return
    raise UnsupportedModelError(
        f"target {target.name}",
        expected="the text of plain decoding, as from every architecture that is tested",
        got=f"token {_at(ours, index)} for {_at(theirs, index)} at new position {index} with "
        f"method {drafted.method}, where its best two scores are {gap:.3g} apart",
        remedy=f"Do not use {target.config.model_type!r} with drafts; method ar alone is plain "
        "decoding.",
    )


@torch.inference_mode()
def check_side_by_side(target: Target, prompt_ids: Sequence[int]) -> None:
    """Whether a request beside a shorter one gets the logits that it gets alone.

    Args:
        target: one that is not in the table.
        prompt_ids: of a real request.

    Raises:
        UnsupportedModelError: says by how much they differ.
    """
    ids = torch.tensor(list(prompt_ids), dtype=torch.int64, device=target.device)
    alone = target.new_cache(len(ids) + _STEPS)
    both = target.new_batch_cache(2, len(ids) + _STEPS)
    logits = target.prefill(ids, alone).logits
    for row, part in enumerate((ids, ids[: (len(ids) + 1) // 2])):
        both.begin_filling(row)
        target.run_batch(part[None], both)
        both.lengths[row] = len(part)
    both.end_filling()
    root = torch.zeros(1, dtype=torch.int64, device=target.device)
    for _ in range(_STEPS):
        token = logits.argmax(dim=-1)
        logits = target.verify(token, root, root[None].bool(), alone).logits
        beside = target.run_batch(token.expand(2)[:, None], both).logits
        both.lengths += 1
        difference = float((beside[0] - logits[0]).abs().max())
        if not difference <= _bound(logits):
            raise UnsupportedModelError(
                f"target {target.name}",
                expected="the same logits beside another request as alone",
                got=f"others by up to {difference:.3g}",
                remedy=f"Do not use {target.config.model_type!r} for requests side by side.",
            )


def _bound(logits: Tensor) -> float:
    """How far rounding may move a logit."""
    largest = max(1.0, float(logits.abs().max()))
    return _ROUNDINGS[logits.dtype] * torch.finfo(logits.dtype).eps * largest


def _at(token_ids: Sequence[int], index: int) -> object:
    return token_ids[index] if index < len(token_ids) else "none"


@torch.inference_mode()
def _gap(target: Target, rule: Rule, prefix: list[int]) -> tuple[float, float]:
    """The best two scores' distance behind this prefix, and what rounding could make of it."""
    ids = torch.tensor(prefix, dtype=torch.int64, device=target.device)
    logits = target.prefill(ids, target.new_cache(len(prefix))).logits[0]
    best, second = rule.scores(logits, prefix).topk(2).values.tolist()
    return float(best - second), _bound(logits)
