"""What an evaluation found: one number per arm, then suites, depths and calibration.

Sums up the results of single prompts; measures nothing itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from ddtree.train.accuracy import BinCounts, Calibration, DepthAccuracy, HitCounts
from ddtree.train.evaluate import PLAIN, PromptResult


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """A prompt on which an arm said something else than the reference; in float32 a failure."""

    suite: str
    index: int
    arm: str
    reference: str
    first_difference: int


@dataclass(frozen=True, kw_only=True)
class SuiteResult:
    """One suite.

    Args:
        name: of its file.
        num_prompts: measured.
        taus: by arm: tokens by rounds, both summed over the prompts; NaN without rounds.
        prompt_taus: by arm: the mean of each prompt's own tau.
        along: accuracy by depth at every position of the responses.
    """

    name: str
    num_prompts: int
    taus: tuple[float, ...]
    prompt_taus: tuple[float, ...]
    along: DepthAccuracy


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What a drafter is worth on some suites.

    tau counts the bonus token and leaves out the prefill's, as `Generation.acceptance_length` does.

    Args:
        arms: names, the chain first.
        taus: by arm, the headline: mean over suites of the suite's tau.
        suites: in the order of the files.
        in_rounds: accuracy by depth where the chain's rounds stood, all suites together.
        along: accuracy by depth at every position of the responses, all suites together.
        calibration: of the best `NUM_RANKS` tokens of every depth along the responses.
        first_calibration: of the most probable token of every depth alone.
        num_plain: prompts whose arms were compared with plain decoding; older versions compared
            them with the chain.
        disagreements: must be empty in float32.
    """

    arms: tuple[str, ...]
    taus: tuple[float, ...]
    suites: tuple[SuiteResult, ...]
    in_rounds: DepthAccuracy
    along: DepthAccuracy
    calibration: Calibration
    first_calibration: Calibration
    num_plain: int
    disagreements: tuple[Disagreement, ...]

    @property
    def agree(self) -> bool:
        """Whether all arms said the same tokens on all prompts."""
        return not self.disagreements


def summarise(results: Sequence[PromptResult], suites: Sequence[str]) -> Evaluation:
    """Sum up at least one result.

    Args:
        results: in any order.
        suites: the order of the suites.
    """
    results = sorted(results, key=lambda r: (suites.index(r.suite), r.index))
    summaries = tuple(_suite(name, [r for r in results if r.suite == name]) for name in suites)
    arms = tuple(arm.name for arm in results[0].arms)
    return Evaluation(
        arms=arms,
        taus=tuple(_mean(suite.taus[i] for suite in summaries) for i in range(len(arms))),
        suites=summaries,
        in_rounds=HitCounts.total([r.in_rounds for r in results]).accuracy(),
        along=HitCounts.total([r.along for r in results]).accuracy(),
        calibration=BinCounts.total([r.bins for r in results]).calibration(),
        first_calibration=BinCounts.total([r.first_bins for r in results]).calibration(),
        num_plain=sum(r.reference == PLAIN for r in results),
        disagreements=tuple(
            Disagreement(
                suite=r.suite,
                index=r.index,
                arm=arm.name,
                reference=r.reference,
                first_difference=arm.first_difference,
            )
            for r in results
            for arm in r.arms
            if arm.first_difference is not None
        ),
    )


def as_json(evaluation: Evaluation, card: Mapping[str, object]) -> str:
    """One JSON object, with what was measured and how; what is NaN here is null there."""
    content = {"card": card, "agree": evaluation.agree, **asdict(evaluation)}
    return json.dumps(_without_nan(content), indent=1) + "\n"


def _suite(name: str, results: Sequence[PromptResult]) -> SuiteResult:
    by_arm = list(zip(*(r.arms for r in results), strict=True))
    return SuiteResult(
        name=name,
        num_prompts=len(results),
        taus=tuple(
            _tau(sum(a.num_tokens for a in arms), sum(a.num_rounds for a in arms))
            for arms in by_arm
        ),
        prompt_taus=tuple(_mean(_tau(a.num_tokens, a.num_rounds) for a in arms) for arms in by_arm),
        along=HitCounts.total([r.along for r in results]).accuracy(),
    )


def _tau(num_tokens: int, num_rounds: int) -> float:
    return num_tokens / num_rounds if num_rounds else math.nan


def _mean(values: Iterable[float]) -> float:
    """The mean of what is a number: a text that the prefill ended has no rounds and no tau."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _without_nan(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
