"""The decoding rule: which token the target says at a row (DESIGN 5).

    token at position t = argmax over v of ( processed_logits(v) + G_t(v) )

Greedy is the same rule with G = 0. The rule sees one row at a time and knows no tree: the walk
asks it and follows, so `ar`, `dflash` and `ddtree` cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from ddtree.config import DecodeConfig
from ddtree.sampling.noise import gumbel_noise

# Given a row of the verified logits and all tokens up to that row, the token chosen there.
Chooser = Callable[[int, Sequence[int]], int]


@runtime_checkable
class DecodingRule(Protocol):
    """Anything that decides tokens from target logits."""

    def chooser(self, logits_NV: Float[Tensor, "N V"]) -> Chooser:
        """Prepare to choose at rows of these logits.

        The returned function takes a row index and the token ids up to and including that row's
        (prompt first), and returns the token for the next position, `len(token_ids)`.
        """
        ...


@dataclass(frozen=True)
class Greedy:
    """The most probable token: the rule at temperature 0."""

    def scores(self, logits_V: Float[Tensor, " V"], position: int) -> Float[Tensor, " V"]:
        """What the rule takes the argmax of: the logits themselves, in float32."""
        return logits_V.float()

    def chooser(self, logits_NV: Float[Tensor, "N V"]) -> Chooser:
        """See `DecodingRule.chooser`. All rows are decided in one device call."""
        chosen = logits_NV.argmax(dim=-1).tolist()
        return lambda row, token_ids: int(chosen[row])


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling by Gumbel-max with noise by seed and position.

    Args:
        temperature: > 0, divides the logits.
        top_k: keep the k most probable tokens, or None.
        top_p: keep the fewest most probable tokens whose mass reaches p, or None.
        seed: 0 <= seed < 2**64.
    """

    temperature: float
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def scores(self, logits_V: Float[Tensor, " V"], position: int) -> Float[Tensor, " V"]:
        """What the rule takes the argmax of: processed logits plus the noise of this position."""
        processed = process_logits(
            logits_V, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p
        )
        return processed + gumbel_noise(self.seed, position, processed.shape[0], processed.device)

    def chooser(self, logits_NV: Float[Tensor, "N V"]) -> Chooser:
        """See `DecodingRule.chooser`. Rows are processed when asked for: most never are."""
        return lambda row, token_ids: int(self.scores(logits_NV[row], len(token_ids)).argmax())


def rule_for(config: DecodeConfig) -> Greedy | Sampling:
    """The decoding rule that these options name.

    >>> rule_for(DecodeConfig())
    Greedy()
    """
    if config.temperature == 0:
        return Greedy()
    return Sampling(
        temperature=config.temperature, top_k=config.top_k, top_p=config.top_p, seed=config.seed
    )


def process_logits(
    logits_V: Float[Tensor, " V"],
    *,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Float[Tensor, " V"]:
    """Temperature, then top-k, then top-p, as Hugging Face's processors do in this order.

    Args:
        logits_V: the target's logits at one row, any float dtype.
        temperature: > 0.
        top_k: tokens below the k-th highest logit become -inf; ties with it stay.
        top_p: the least probable tokens whose total mass is at most 1 - p become -inf; the most
            probable token always stays.

    Returns:
        [V] float32, shifted so that the highest is 0.

    >>> process_logits(torch.tensor([3.0, 1.0, 2.0]), temperature=0.5, top_k=2).tolist()
    [0.0, -inf, -2.0]
    """
    logits = logits_V.float()
    # The shift changes no choice and keeps a tiny temperature from overflowing to inf - inf.
    logits = (logits - logits.max()) / max(temperature, torch.finfo(torch.float32).tiny)
    if top_k is not None and top_k < logits.shape[0]:
        kth = torch.topk(logits, top_k).values[-1]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if top_p is not None and top_p < 1.0:
        ascending, order = torch.sort(logits)
        drop = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
        drop[-1] = False
        logits = logits.index_fill(0, order[drop], -torch.inf)
    return logits
