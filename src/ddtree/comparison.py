"""The three methods side by side on one prompt: do they agree, and how fast is each?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ddtree.config import AUTO, DecodeConfig
from ddtree.pair import Pair
from ddtree.prompt import Prompt, encode
from ddtree.types import METHODS, Generation, Method

_WARM_UP_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Where two methods first differ.

    Args:
        method: the method that differs from `ar`.
        index: of the first differing new token.
        expected_id: what `ar` said there; None if it had ended.
        got_id: what the method said there; None if it had ended.
        gap: by how much the rule's best score beats its second there. In bfloat16 and float16 a
            small gap means rounding; in float32 any divergence is a bug or an exact tie.
    """

    method: Method
    index: int
    expected_id: int | None
    got_id: int | None
    gap: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One generation per method, `ar` first, and what was found to differ."""

    generations: tuple[Generation, ...]
    divergences: tuple[Divergence, ...]

    @property
    def agree(self) -> bool:
        """Whether all methods said the same tokens."""
        return not self.divergences

    def speedup(self, generation: Generation) -> float:
        """Tokens per second over those of `ar` in this comparison."""
        return generation.tokens_per_s / self.generations[0].tokens_per_s


def compare(
    pair: Pair,
    prompt: Prompt,
    config: DecodeConfig | None = None,
    *,
    raw: bool = False,
    say: Callable[[str], None] | None = None,
) -> Comparison:
    """Run ar, dflash and ddtree one after another, after a short warm-up of each.

    Args:
        pair: with a drafter.
        prompt: text, chat messages or token ids.
        config: `method` is ignored; a number as `budget` is the tree's, and the chain then has all
            of its L nodes. With "auto" both are cut where another node stops paying.
        raw: take a text prompt as it is.
        say: told what runs now.

    Raises:
        UserError: as `Pair.generate`.
    """
    config = config or DecodeConfig()
    prompt_ids = encode(prompt, pair.target, raw=raw)
    chain = config
    if config.budget != AUTO and pair.drafter is not None:
        chain = replace(config, budget=max(config.budget, pair.drafter.num_depths))
    arms = [replace(chain if method == "dflash" else config, method=method) for method in METHODS]
    for arm in arms:
        pair.run(prompt_ids, arm)  # checks the options of every arm before any work
    tell = say or (lambda message: None)
    if config.budget == AUTO and pair.drafter is not None:
        pair.measure(tell)
    tell("warming up")
    for arm in arms:
        short = min(config.max_new_tokens, _WARM_UP_TOKENS)
        least = min(config.min_new_tokens, short)
        _generate(pair, prompt_ids, replace(arm, max_new_tokens=short, min_new_tokens=least))
    generations: list[Generation] = []
    for arm in arms:
        tell(f"running {arm.method} ({len(generations) + 1} of {len(arms)})")
        generations.append(_generate(pair, prompt_ids, arm))
    found = [_divergence(pair, prompt_ids, config, generations[0], g) for g in generations[1:]]
    return Comparison(
        generations=tuple(generations), divergences=tuple(d for d in found if d is not None)
    )


def _generate(pair: Pair, prompt_ids: list[int], config: DecodeConfig) -> Generation:
    *_, generation = pair.run(prompt_ids, config)
    assert isinstance(generation, Generation)
    return generation


def _divergence(
    pair: Pair,
    prompt_ids: list[int],
    config: DecodeConfig,
    baseline: Generation,
    other: Generation,
) -> Divergence | None:
    if baseline.token_ids == other.token_ids:
        return None
    shared = min(baseline.num_tokens, other.num_tokens)
    index = next((i for i in range(shared) if baseline.token_ids[i] != other.token_ids[i]), shared)
    prefix = [*prompt_ids, *baseline.token_ids[:index]]
    return Divergence(
        method=other.method,
        index=index,
        expected_id=baseline.token_ids[index] if index < baseline.num_tokens else None,
        got_id=other.token_ids[index] if index < other.num_tokens else None,
        gap=_gap(pair, prefix, len(prompt_ids), config),
    )


@torch.inference_mode()
def _gap(pair: Pair, prefix: list[int], num_prompt_tokens: int, config: DecodeConfig) -> float:
    """Best minus second-best score of the rule for the token after this prefix."""
    target = pair.target
    ids = torch.tensor(prefix, dtype=torch.int64, device=target.device)
    logits = target.prefill(ids, target.new_cache(len(prefix))).logits[0]
    scores = pair.rule(config, num_prompt_tokens).scores(logits, prefix)
    best, second = scores.topk(2).values.tolist()
    return float(best - second)
