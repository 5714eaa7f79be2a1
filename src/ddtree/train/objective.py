"""What a drafter is trained for: to say, in slot k, the token at anchor + k.

Cross-entropy against the text, or against the target's own distribution at that place, or a mixture
of both, over the draft vocabulary. Early depths count more, since a miss there ends the round: by
a fixed decay, or by how far the drafter itself would get.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

NOT_IN_VOCABULARY = -1


@dataclass(frozen=True)
class Objective:
    """Loss and hits of one step.

    Args:
        loss: scalar, the weighted mean over labels.
        hits: [L], labels that were the drafter's first choice.
        counts: [L], labels there were.
    """

    loss: Float[Tensor, ""]
    hits: Int64[Tensor, " L"]
    counts: Int64[Tensor, " L"]


def depth_weights(num_depths: int, gamma: float) -> Float[Tensor, " L"]:
    """exp(-(k - 1) / gamma) for k = 1 .. L.

    >>> depth_weights(2, 4.0)
    tensor([1.0000, 0.7788])
    """
    return torch.tensor([math.exp(-k / gamma) for k in range(num_depths)])


def reach_weights(
    logits: Float[Tensor, "M Vd"],
    labels: Int64[Tensor, " M"],
    valid: Bool[Tensor, "*B L"],
    share: float,
) -> Float[Tensor, " M"]:
    """How far the drafter would get: the product, over the labels before, of (1 - s) + s p.

    Args:
        logits: of the drafter, for the labels that are valid, in their order; no gradient follows.
        labels: rows of the draft vocabulary, -1 where it lacks the token, which ends the way.
        valid: which labels of each block there are.
        share: s; with 1 a label weighs the probability that all before it are accepted, with 0 it
            weighs 1.
    """
    chosen = logits.detach().gather(1, labels.clamp(min=0)[:, None])[:, 0]
    probs = (chosen - logits.detach().logsumexp(1)).exp() * (labels != NOT_IN_VOCABULARY)
    passed = torch.ones(valid.shape, device=logits.device)
    passed[valid] = (1 - share) + share * probs.float()
    before = torch.cat([torch.ones_like(passed[..., :1]), passed[..., :-1]], dim=-1)
    return before.cumprod(-1)[valid]


def usual_gamma(block_size: int) -> float:
    """The decay that DFlash's authors use for blocks of 8, 10 and 16; half the block elsewhere."""
    return {8: 4.0, 10: 5.0, 16: 7.0}.get(block_size, block_size / 2)


def in_draft_vocabulary(
    token_ids: Int64[Tensor, "*M"], draft_index: Int64[Tensor, " V"] | None
) -> Int64[Tensor, "*M"]:
    """Row of the draft vocabulary of each token, -1 where it has none."""
    return token_ids if draft_index is None else draft_index[token_ids]


def objective(
    logits: Float[Tensor, "M Vd"],
    labels: Int64[Tensor, " M"],
    top_ids: Int64[Tensor, "M k"],
    top_log_probs: Float[Tensor, "M k"],
    depths: Int64[Tensor, " M"],
    num_depths: int,
    weights: Float[Tensor, " M"],
    soft_share: float,
) -> Objective:
    """Loss over M labels; ids are rows of the draft vocabulary, -1 where it lacks the token.

    Args:
        logits: of the drafter.
        labels: tokens of the text.
        top_ids: the target's favourites at the same places.
        top_log_probs: their log-probabilities; renormalised over those that can be drafted.
        depths: 0-based depth of each label.
        num_depths: L.
        weights: of each label.
        soft_share: 0 trains on the text alone, 1 on the target's distribution alone.
    """
    log_probs = torch.log_softmax(logits, dim=-1)
    ids, shares = _targets(labels, top_ids, top_log_probs, soft_share)
    each = -(log_probs.gather(1, ids.clamp(min=0)) * shares).sum(1)
    weight = weights * (shares.sum(1) > 0)
    loss = (each * weight).sum() / weight.sum().clamp(min=1e-6)
    hit = logits.detach().argmax(1) == labels
    return Objective(
        loss=loss,
        hits=torch.bincount(depths[hit], minlength=num_depths),
        counts=torch.bincount(depths, minlength=num_depths),
    )


def _targets(
    labels: Tensor, top_ids: Tensor, top_log_probs: Tensor, soft_share: float
) -> tuple[Tensor, Tensor]:
    """Ids [M, 1 + k] and the share of the loss that each has; what cannot be drafted has none."""
    known = top_ids != NOT_IN_VOCABULARY
    probs = top_log_probs.exp() * known
    soft = soft_share * probs / probs.sum(1, keepdim=True).clamp(min=1e-6)
    hard = (1 - soft_share) * (labels != NOT_IN_VOCABULARY).to(soft.dtype)
    return torch.cat([labels[:, None], top_ids], 1), torch.cat([hard[:, None], soft], 1)


def chain_tau(hits: Bool[Tensor, "M L"]) -> float:
    """Tokens per round of chains that start at M anchors: the bonus token and the run of hits.

    >>> chain_tau(torch.tensor([[True, False, True], [False, True, True]]))
    1.5
    """
    return 1.0 + float(hits.long().cumprod(1).sum(1).float().mean())
