"""What each prompt adds to a figure: the sums that speed-up and tau are formed from.

Knows no intervals: `statistics` resamples the rows that come out here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ddtree.bench.records import ArmRecord, PromptRecord, Run
from ddtree.bench.statistics import Stratum

# All turns of one conversation, or the single record of a prompt.
Turns = Sequence[PromptRecord]
# From the turns of a prompt and an arm to what they add; None where the arm has nothing to add.
Sums = Callable[[Turns, str], tuple[float, ...] | None]


@dataclass(frozen=True, kw_only=True)
class SuitePrompts:
    """The prompts of one suite at one temperature.

    Args:
        suite: its name.
        prompts: by index; the turns of a conversation together, since they are no independent
            prompts.
    """

    suite: str
    prompts: tuple[tuple[PromptRecord, ...], ...]

    def half(self, odd: bool) -> SuitePrompts:
        """The prompts with an odd index, or those with an even one."""
        chosen = tuple(turns for turns in self.prompts if turns[0].index % 2 == odd)
        return SuitePrompts(suite=self.suite, prompts=chosen)

    def stratum(self, sums: Sums, arm: str) -> Stratum | None:
        """The rows of the prompts that have something to add; None where none has."""
        rows = [row for turns in self.prompts if (row := sums(turns, arm)) is not None]
        return Stratum(name=self.suite, sums=np.array(rows, np.float64)) if rows else None


def suites_at(run: Run, temperature: float) -> tuple[SuitePrompts, ...]:
    """The suites of a run at one temperature, in the order in which the run met them."""
    found: dict[str, dict[str, list[PromptRecord]]] = {}
    for record in run.prompts:
        if record.temperature == temperature:
            found.setdefault(record.suite, {}).setdefault(record.id, []).append(record)
    names = dict.fromkeys(record.suite for record in run.prompts)
    return tuple(
        SuitePrompts(suite=name, prompts=_in_order(found[name].values()))
        for name in names
        if name in found
    )


def speedup_of(baseline: str) -> Sums:
    """Rows [sum over turns of tokens/s by the baseline's tokens/s, turns]."""

    def sums(turns: Turns, arm: str) -> tuple[float, ...] | None:
        pairs = _pairs(turns, arm, baseline)
        ratios = [own.tokens_per_s / plain.tokens_per_s for own, plain in pairs]
        return (sum(ratios), len(ratios)) if ratios else None

    return sums


def totals_of(baseline: str) -> Sums:
    """Rows [tokens, seconds, tokens of the baseline, seconds of the baseline]."""

    def sums(turns: Turns, arm: str) -> tuple[float, ...] | None:
        pairs = _pairs(turns, arm, baseline)
        if not pairs:
            return None
        own, plain = zip(*pairs, strict=True)
        return (*_totals(own), *_totals(plain))

    return sums


def tau(turns: Turns, arm: str) -> tuple[float, ...] | None:
    """Rows [tokens delivered by rounds, rounds]."""
    own = [record for turn in turns if (record := find(turn, arm)) is not None and record.rounds]
    if not own:
        return None
    return sum(record.round_tokens for record in own), sum(len(record.rounds) for record in own)


def find(record: PromptRecord, arm: str) -> ArmRecord | None:
    """What an arm did with a prompt; None where it did not run."""
    return next((own for own in record.arms if own.arm == arm), None)


def _pairs(turns: Turns, arm: str, baseline: str) -> list[tuple[ArmRecord, ArmRecord]]:
    """An arm beside the baseline, where both said something."""
    both = [(find(turn, arm), find(turn, baseline)) for turn in turns]
    return [
        (own, plain)
        for own, plain in both
        if own is not None and plain is not None and own.token_ids and plain.token_ids
    ]


def _totals(records: Sequence[ArmRecord]) -> tuple[float, float]:
    return sum(len(r.token_ids) for r in records), sum(r.elapsed_s for r in records)


def _in_order(prompts: Iterable[list[PromptRecord]]) -> tuple[tuple[PromptRecord, ...], ...]:
    turns = (tuple(sorted(prompt, key=lambda record: record.turn)) for prompt in prompts)
    return tuple(sorted(turns, key=lambda prompt: prompt[0].index))
