"""The decoding rule: which token the target says at a row (DESIGN 5).

    token at position t = argmax over v of ( processed_logits(v) + G_t(v) )

Greedy is the same rule with G = 0. The rule sees one row at a time, with the tokens of that row's
own path, and knows no tree: the walk asks it and follows, so `ar`, `dflash` and `ddtree` cannot
differ.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ddtree.config import DecodeConfig
from ddtree.errors import OptionError
from ddtree.sampling.noise import Noise
from ddtree.sampling.processors import History, LogitsProcessor, Processor, processors_for

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

    def scores(
        self, logits_V: Float[Tensor, " V"], token_ids: Sequence[int]
    ) -> Float[Tensor, " V"]:
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
        min_p: keep the tokens at least p times as probable as the most probable one, or None.
        typical_p: keep the tokens nearest to the expected surprise whose mass reaches p, or None.
        seed: 0 <= seed < 2**64.
    """

    temperature: float
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: int = 0

    @cached_property
    def noise(self) -> Noise:
        """Of this seed; rows that are drawn for a draft are there for the walk."""
        return Noise(self.seed)

    def scores(
        self, logits_V: Float[Tensor, " V"], token_ids: Sequence[int]
    ) -> Float[Tensor, " V"]:
        """What the rule takes the argmax of: processed logits plus the noise of this position."""
        processed = process_logits(
            logits_V,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            typical_p=self.typical_p,
        )
        position = len(token_ids)
        # Nothing is chosen in front of a row that is asked for.
        self.noise.forget_before(position)
        return processed + self.noise.row(position, processed.shape[0], processed.device)

    def chooser(self, logits_NV: Float[Tensor, "N V"]) -> Chooser:
        """See `DecodingRule.chooser`. Rows are processed when asked for: most never are."""
        return lambda row, token_ids: int(self.scores(logits_NV[row], token_ids).argmax())


class Processed:
    """Processors, then a rule. Follows one text, so it is made anew for each generation.

    Args:
        processors: change the logits, in this order.
        then: decides.
        num_prompt_tokens: so many tokens of the text are the prompt.
    """

    def __init__(
        self, processors: Sequence[Processor], then: Greedy | Sampling, *, num_prompt_tokens: int
    ) -> None:
        self.processors = tuple(processors)
        self.then = then
        self._num_prompt_tokens = num_prompt_tokens
        self._history: History | None = None

    def scores(
        self, logits_V: Float[Tensor, " V"], token_ids: Sequence[int]
    ) -> Float[Tensor, " V"]:
        """What the rule takes the argmax of behind these tokens; leaves no trace in the rule."""
        history = self._new_history(logits_V)
        history.follow(token_ids)
        return self._scores(logits_V, history, token_ids)

    def chooser(self, logits_NV: Float[Tensor, "N V"]) -> Chooser:
        """See `DecodingRule.chooser`. What is known of the text is kept from call to call.

        Raises:
            OptionError: by the chooser, where no token is left to choose.
        """
        if self._history is None:
            self._history = self._new_history(logits_NV[0])
        history = self._history

        def choose(row: int, token_ids: Sequence[int]) -> int:
            history.follow(token_ids)
            best, token = self._scores(logits_NV[row], history, token_ids).max(dim=0)
            if not float(best) > -torch.inf:
                raise _nothing_left(len(token_ids))
            return int(token)

        return choose

    def _new_history(self, logits_V: Float[Tensor, " V"]) -> History:
        return History(
            num_prompt_tokens=self._num_prompt_tokens,
            vocab_size=logits_V.shape[0],
            device=logits_V.device,
        )

    def _scores(
        self, logits_V: Float[Tensor, " V"], history: History, token_ids: Sequence[int]
    ) -> Float[Tensor, " V"]:
        processed = logits_V.float()
        for processor in self.processors:
            processed = processor(processed, history)
        return self.then.scores(processed, token_ids)


Rule = Greedy | Sampling | Processed


def sampling_of(rule: Rule) -> Sampling | None:
    """The part of a rule that draws; None where it is greedy."""
    then = rule.then if isinstance(rule, Processed) else rule
    return then if isinstance(then, Sampling) else None


def rule_for(
    config: DecodeConfig,
    *,
    num_prompt_tokens: int = 0,
    stop_token_ids: Collection[int] = (),
    device: torch.device | str = "cpu",
    logits_processor: Sequence[LogitsProcessor] = (),
    grammar: Processor | None = None,
) -> Rule:
    """The decoding rule that these options name, for one text.

    Args:
        config: its `bad_words` are tokens by now (`processors.words_as_tokens`).
        num_prompt_tokens: what penalties of the new text and `min_new_tokens` do not count.
        stop_token_ids: what `min_new_tokens` holds back.
        device: where the logits will be.
        logits_processor: a user's own, in transformers' protocol.
        grammar: of `json_schema` or `regex` (`grammar.Grammars`).

    >>> rule_for(DecodeConfig())
    Greedy()
    """
    assert (grammar is None) == (config.json_schema is None and config.regex is None)
    then: Greedy | Sampling = Greedy()
    if config.temperature > 0:
        then = Sampling(
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            min_p=config.min_p,
            typical_p=config.typical_p,
            seed=config.seed,
        )
    processors = processors_for(
        config,
        stop_token_ids=stop_token_ids,
        device=device,
        own=logits_processor,
        grammar=grammar,
    )
    if not processors:
        return then
    return Processed(processors, then, num_prompt_tokens=num_prompt_tokens)


def process_logits(
    logits_V: Float[Tensor, " V"],
    *,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    typical_p: float | None = None,
) -> Float[Tensor, " V"]:
    """Temperature, top-k, top-p, min-p, typical-p, as Hugging Face's processors do in this order.

    Args:
        logits_V: the target's logits at one row, any float dtype.
        temperature: > 0.
        top_k: tokens below the k-th highest logit become -inf; ties with it stay.
        top_p: the least probable tokens whose total mass is at most 1 - p become -inf; the most
            probable token always stays.
        min_p: tokens less than p times as probable as the most probable one become -inf.
        typical_p: tokens are taken in the order of how near their surprise is to the expected one,
            until their mass reaches p; the others become -inf.

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
    if min_p is not None and min_p > 0.0:
        probs = logits.softmax(dim=-1)
        logits = logits.masked_fill(probs < min_p * probs.max(), -torch.inf)
    if typical_p is not None and typical_p < 1.0:
        logits = logits.masked_fill(_atypical(logits, typical_p), -torch.inf)
    return logits


def _atypical(logits_V: Float[Tensor, " V"], mass: float) -> Bool[Tensor, " V"]:
    """Tokens outside the typical set of this mass (Meister et al., 2022)."""
    log_probs = logits_V.log_softmax(dim=-1)
    entropy = -(log_probs * log_probs.exp()).nansum()
    distance = (-log_probs - entropy).abs()
    ascending, order = distance.sort()
    reached = logits_V[order].softmax(dim=-1).cumsum(dim=-1)
    last = (reached < mass).sum().clamp(max=reached.shape[0] - 1)
    return distance > ascending[last]


def _nothing_left(position: int) -> OptionError:
    return OptionError(
        "logits",
        expected=f"a token that may come at position {position}",
        got="none: all are banned, or their scores are NaN",
        remedy="Ban fewer tokens: see logit_bias, bad_words, suppress_tokens, min_new_tokens, "
        "json_schema, regex and your logits_processor.",
    )
