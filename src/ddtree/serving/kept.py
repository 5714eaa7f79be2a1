"""The best of the tokens that top-k and top-p keep, found without sorting a vocabulary.

On a CPU a sort of 49,152 logits takes 4 to 9 ms, more than all else of a decision together. But the
best of all tokens is nearly always kept, and whether one token is kept is a count (top-k) or a sum
(top-p). Where the sum is too near the border for rounding not to matter, the sorting itself
decides: the answer is always the one that sorting gives.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float32
from torch import Tensor

# Sets what is not kept to -inf. The readable twin that defines the answer.
KeepExactly = Callable[[Tensor], Tensor]

# Sums of one distribution in two orders, in float32, differ by less.
_ROUNDING = 1e-4
# A token that is not kept rules out all below it; after so many, sorting is no slower.
_MOST_TRIES = 8


def best_kept(
    logits_V: Float32[Tensor, " V"],
    scores_V: Float32[Tensor, " V"],
    *,
    top_k: int,
    top_p: float,
    keep_exactly: KeepExactly,
) -> int:
    """The kept token of the highest score.

    Args:
        logits_V: on the CPU; what top-k and top-p look at.
        scores_V: what is compared among the tokens that they keep. Mutated.
        top_k: from 1 to V; V keeps all. Ties with the k-th highest stay.
        top_p: 0 < p <= 1; 1 keeps all. The least probable tokens whose mass is at most 1 - p go.
        keep_exactly: what sorts; given a copy of the logits, it may write into it.

    Returns:
        As `keep_exactly(logits).isneginf()` and an argmax would say. The first one of ties.
    """
    given_V = logits_V
    if top_k < logits_V.shape[0] and top_p < 1:
        lowest = torch.topk(logits_V, top_k, sorted=True).values[-1]
        logits_V = logits_V.masked_fill(logits_V < lowest, -torch.inf)
        scores_V.masked_fill_(logits_V == -torch.inf, -torch.inf)
        top_k = logits_V.shape[0]
    probs_V = logits_V.softmax(dim=0) if top_p < 1 else None
    for _ in range(_MOST_TRIES):
        token = int(scores_V.argmax())
        logit = float(logits_V[token])
        if probs_V is None:
            kept = int(torch.count_nonzero(logits_V > logit)) < top_k
        else:
            surely = _in_nucleus(logits_V, probs_V, token, 1 - top_p)
            if surely is None:
                break
            kept = surely
        if kept:
            return token
        scores_V.masked_fill_(logits_V <= logit, -torch.inf)
    # Which of several ties go depends on all logits that are sorted.
    gone = keep_exactly(given_V.clone()) == -torch.inf
    return int(scores_V.masked_fill_(gone, -torch.inf).argmax())


def _in_nucleus(
    logits_V: Float32[Tensor, " V"], probs_V: Float32[Tensor, " V"], token: int, tail: float
) -> bool | None:
    """Whether the mass of the tokens up to this one is more than the tail; None if it is close."""
    own = float(probs_V[token])
    if own > tail + _ROUNDING:
        return True
    logit = float(logits_V[token])
    # Ties may stand on either side of it.
    least = own + float(torch.dot(probs_V, (logits_V < logit).float()))
    if least > tail + _ROUNDING:
        return True
    most = float(torch.dot(probs_V, (logits_V <= logit).float()))
    return False if most < tail - _ROUNDING else None
