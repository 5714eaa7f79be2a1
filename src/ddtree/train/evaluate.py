"""Stage "evaluate": what a drafter is worth on held-out prompts, measured with the decoder itself.

Every prompt is decoded plainly, by the chain and by trees of several budgets, and all must say the
same. What the drafter proposed is
overheard from outside, so nothing here simulates a round. The features that pass by serve a second
look: the drafter is asked at every position of the response, which weighs easy and hard places
alike, while rounds start only where the round before ended. Makes no claim about speed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from ddtree.config import MAX_BUDGET, DecodeConfig
from ddtree.draft import Drafter
from ddtree.errors import OptionError
from ddtree.journal import tuples_of
from ddtree.overhear import OverheardDrafter, propose_along
from ddtree.pair import Pair
from ddtree.prompt import check_fits, encode
from ddtree.train.accuracy import (
    NUM_RANKS,
    BinCounts,
    HitCounts,
    count_bins,
    count_hits,
)
from ddtree.train.prompts import read_prompts
from ddtree.types import Generation, Method, StageSeconds

CHAIN = "chain"
PLAIN: Method = "ar"


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Options of the stage.

    Args:
        budgets: of the trees, from low to high; the chain is always measured.
        max_new_tokens: length limit, >= 2: the first token comes with the prefill, not by a round.
        temperature: 0 is greedy.
        seed: of every prompt, as `ddtree generate --seed` takes it.
        limit: the first prompts of each file; None takes all.

    Raises:
        OptionError: an option outside its range.
    """

    budgets: tuple[int, ...] = (8, 16, 32)
    max_new_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    limit: int | None = None

    def __post_init__(self) -> None:
        _check_budgets(self.budgets)
        # The decoder's own checks, for what the two have in common.
        DecodeConfig(
            max_new_tokens=self.max_new_tokens, temperature=self.temperature, seed=self.seed
        )
        for name, low in (("max_new_tokens", 2), ("limit", 1)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise OptionError(
                    name,
                    expected=f"a whole number >= {low}",
                    got=value,
                    remedy=f"{low} is the least.",
                )


def _check_budgets(budgets: object) -> None:
    fine = (
        isinstance(budgets, tuple)
        and len(budgets) > 0
        and all(isinstance(b, int) and 1 <= b <= MAX_BUDGET for b in budgets)
        and list(budgets) == sorted(set(budgets))
    )
    if not fine:
        raise OptionError(
            "budgets",
            expected=f"whole numbers from 1 to {MAX_BUDGET}, each higher than the one before",
            got=repr(budgets),
            remedy="For example --budgets 8,16,32.",
        )


@dataclass(frozen=True, kw_only=True)
class SuitePrompt:
    """A held-out prompt.

    Args:
        suite: name of its file.
        index: its place in the file, from 0.
        prompt: the user message.
    """

    suite: str
    index: int
    prompt: str


@dataclass(frozen=True, kw_only=True)
class ArmResult:
    """What one way of drafting did on one prompt.

    Args:
        name: "chain", or the budget of the tree.
        accepted: drafted tokens that each round delivered; the bonus token comes on top.
        first_difference: the first new token that differs from the reference's; None if all are
            equal.
        seconds: time per stage, with the overhearing: no measure of speed.
    """

    name: str
    accepted: tuple[int, ...]
    first_difference: int | None
    seconds: StageSeconds

    @property
    def num_rounds(self) -> int:
        """Verify forwards."""
        return len(self.accepted)

    @property
    def num_tokens(self) -> int:
        """Tokens that the rounds delivered; the prefill's is not among them."""
        return sum(self.accepted) + self.num_rounds


@dataclass(frozen=True, kw_only=True)
class PromptResult:
    """What was measured on one prompt.

    Args:
        suite: see `SuitePrompt`.
        index: see `SuitePrompt`.
        num_prompt_tokens: chat template included.
        token_ids: the response, as the chain said it.
        arms: the chain, then the trees.
        in_rounds: hits by depth, of the chain's rounds.
        along: hits by depth, with every token of the response but the last as the root.
        bins: the tokens proposed along the response, all ranks.
        first_bins: the same for rank 0 alone.
        reference: what the arms were compared with: "ar", plain decoding, or "chain" in results of
            older versions.
    """

    suite: str
    index: int
    num_prompt_tokens: int
    token_ids: tuple[int, ...]
    arms: tuple[ArmResult, ...]
    in_rounds: HitCounts
    along: HitCounts
    bins: BinCounts
    first_bins: BinCounts
    reference: str = CHAIN

    @classmethod
    def parse(cls, line: str) -> PromptResult:
        """From a line of JSON, as `dataclasses.asdict` gives it."""
        raw = tuples_of(json.loads(line))
        arms = [ArmResult(**{**a, "seconds": StageSeconds(**a["seconds"])}) for a in raw["arms"]]
        hits = {name: HitCounts(**raw[name]) for name in ("in_rounds", "along")}
        bins = {name: BinCounts(**raw[name]) for name in ("bins", "first_bins")}
        return cls(**{**raw, "arms": tuple(arms), **hits, **bins})


def read_suites(files: Sequence[Path], limit: int | None) -> list[SuitePrompt]:
    """The prompts of some files, each file a suite with the file's name.

    Raises:
        OptionError: two files of one name.
        PromptError: see `read_prompts`.
    """
    names = [file.name.split(".")[0] for file in files]
    if len(set(names)) < len(names):
        raise OptionError(
            "prompts",
            expected="files with names of their own",
            got=", ".join(names),
            remedy="Rename one: a suite is called by its file's name.",
        )
    return [
        SuitePrompt(suite=name, index=index, prompt=read.prompt)
        for name, file in zip(names, files, strict=True)
        for index, read in enumerate(islice(read_prompts([file]), limit))
    ]


def evaluate(
    pair: Pair,
    prompts: Sequence[SuitePrompt],
    config: EvaluateConfig,
    *,
    done: frozenset[tuple[str, int]] = frozenset(),
) -> Iterator[PromptResult]:
    """Measure prompt after prompt: the first of every suite, then the second, and so on.

    Args:
        pair: with a drafter.
        prompts: of all suites.
        config: see `EvaluateConfig`.
        done: suite and index of what is measured already.

    Raises:
        UserError: see `check_prompts`; before any work.
    """
    waiting = [prompt for prompt in prompts if (prompt.suite, prompt.index) not in done]
    # In turns, so that a run that is stopped early has seen every suite.
    waiting.sort(key=lambda prompt: prompt.index)
    encoded = check_prompts(pair, waiting, config)
    assert pair.drafter is not None, "check_prompts wants one"
    for prompt, ids in zip(waiting, encoded, strict=True):
        yield _measure(pair, pair.drafter, prompt, ids, config)


def check_prompts(
    pair: Pair, prompts: Sequence[SuitePrompt], config: EvaluateConfig
) -> list[list[int]]:
    """The token ids of each prompt, chat template included.

    Raises:
        OptionError: the pair has no drafter.
        PromptError: the target has no chat template.
        ContextLengthError: a prompt that does not fit.
    """
    if pair.drafter is None:
        raise OptionError(
            "drafter",
            expected="a drafter to evaluate",
            got=f"none, and none is known for {pair.target.name}",
            remedy="Give a DFlash checkpoint as the drafter.",
        )
    encoded = [encode(prompt.prompt, pair.target, raw=False) for prompt in prompts]
    for ids in encoded:
        check_fits(len(ids), config.max_new_tokens, pair.target)
    return encoded


def _measure(
    pair: Pair, drafter: Drafter, prompt: SuitePrompt, prompt_ids: list[int], config: EvaluateConfig
) -> PromptResult:
    """Decode one prompt in every way, and count."""
    num_depths = drafter.num_depths
    plain = _generate(pair, prompt_ids, PLAIN, 0, config)
    overheard = OverheardDrafter(drafter)
    # A chain has L nodes at most; a larger budget only asks for more ranks to look at.
    chain_budget = max(num_depths, NUM_RANKS)
    chain = _generate(Pair(pair.target, overheard), prompt_ids, "dflash", chain_budget, config)
    arms = [_arm(CHAIN, chain, plain)]
    for budget in config.budgets:
        tree = _generate(pair, prompt_ids, "ddtree", budget, config)
        arms.append(_arm(str(budget), tree, plain))
    text = [*prompt_ids, *chain.token_ids]
    along = propose_along(
        drafter,
        torch.cat(overheard.features),
        text,
        len(prompt_ids),
        num_ranks=NUM_RANKS,
    )
    return PromptResult(
        suite=prompt.suite,
        index=prompt.index,
        num_prompt_tokens=len(prompt_ids),
        token_ids=chain.token_ids,
        arms=tuple(arms),
        in_rounds=count_hits(overheard.proposals, text, num_depths),
        along=count_hits(along, text, num_depths),
        bins=count_bins(along, text, num_depths, num_ranks=NUM_RANKS),
        first_bins=count_bins(along, text, num_depths, num_ranks=1),
        reference=PLAIN,
    )


def _generate(
    pair: Pair, prompt_ids: list[int], method: Method, budget: int, config: EvaluateConfig
) -> Generation:
    decode = DecodeConfig(
        method=method,
        budget=budget,
        temperature=config.temperature,
        seed=config.seed,
        max_new_tokens=config.max_new_tokens,
        lookup=False,  # the drafter is evaluated, and not the text
    )
    *_, generation = pair.run(prompt_ids, decode)
    assert isinstance(generation, Generation)
    return generation


def _arm(name: str, generation: Generation, reference: Generation) -> ArmResult:
    ours, theirs = generation.token_ids, reference.token_ids
    shared = min(len(ours), len(theirs))
    index = next((i for i in range(shared) if ours[i] != theirs[i]), shared)
    return ArmResult(
        name=name,
        accepted=tuple(r.num_tokens - 1 for r in generation.rounds if r.tree is not None),
        first_difference=None if ours == theirs else index,
        seconds=generation.seconds,
    )
