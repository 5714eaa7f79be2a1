"""Made-up benchmark runs: what a pair might have done on a machine that obeys its cost profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from ddtree.bench.records import (
    BIN_EDGES,
    NUM_BINS,
    Arm,
    ArmRecord,
    PromptRecord,
    RoundRecord,
    Run,
)
from ddtree.costs import CostProfile
from ddtree.types import StageSeconds

PROFILE = CostProfile(
    contexts=(64, 512),
    rows=(1, 2, 4, 8, 12, 17, 25, 33, 49),
    verify=(
        (0.030, 0.031, 0.033, 0.037, 0.042, 0.048, 0.062, 0.079, 0.115),
        (0.032, 0.033, 0.035, 0.039, 0.045, 0.052, 0.067, 0.085, 0.123),
    ),
    draft=0.011,
)
DEPTHS = 7
PREFILL_S = 0.08


@dataclass(frozen=True, kw_only=True)
class Made:
    """What to make up.

    Args:
        suites: number of prompts of each.
        temperatures: of every prompt.
        budgets: of the trees, besides ar, dflash and ddtree-auto.
        turns: of conversations, by suite; else 1.
        outside: names of outside arms, which are greedy only.
        tokens: of every text.
        noise: standard deviation of the logarithm of a stage's time.
        seed: other numbers, another run.
    """

    suites: Mapping[str, int]
    temperatures: Sequence[float] = (0.0,)
    budgets: Sequence[int] = (8, 16)
    turns: Mapping[str, int] | None = None
    outside: Sequence[str] = ()
    tokens: int = 40
    noise: float = 0.05
    seed: int = 0

    @property
    def arms(self) -> tuple[Arm, ...]:
        return (
            Arm(name="ar", method="ar"),
            Arm(name="dflash", method="dflash"),
            *(Arm(name=f"ddtree-{b}", method="ddtree", budget=b) for b in self.budgets),
            Arm(name="ddtree-auto", method="ddtree", budget="auto"),
            *(Arm(name=name, method=name) for name in self.outside),
        )


def make_run(made: Made) -> Run:
    """A whole run, the same every time."""
    rng = np.random.default_rng(made.seed)
    prompts = [
        _prompt(made, suite, index, turn, temperature, rng)
        for temperature in made.temperatures
        for suite, num_prompts in made.suites.items()
        for index in range(num_prompts)
        for turn in range((made.turns or {}).get(suite, 1))
    ]
    card = {
        "command": "ddtree bench --out made-up",
        "commit": "0123456789ab",
        "versions": {"ddtree": "0", "torch": "2"},
        "machine": "2 cores, made up",
        "date": "2026-01-02T03:04:05+00:00",
        "target": "made-up-target",
        "drafter": "made-up-drafter",
        "dtype": "float32",
        "options": {"max_new_tokens": made.tokens, "seed": made.seed},
        "suites": {name: {"num_prompts": n, "sha256": "0" * 8} for name, n in made.suites.items()},
        "cost_profile": asdict(PROFILE),
    }
    return Run(card=card, arms=made.arms, prompts=tuple(prompts))


def _prompt(
    made: Made, suite: str, index: int, turn: int, temperature: float, rng: np.random.Generator
) -> PromptRecord:
    names = [arm.name for arm in made.arms if temperature == 0 or arm.name not in made.outside]
    token_ids = tuple(int(t) for t in rng.integers(0, 1000, made.tokens))
    num_prompt_tokens = int(rng.integers(30, 200)) + 200 * turn
    # How well the drafter knows this prompt: suites differ, prompts too.
    skill = 0.45 + 0.06 * (len(suite) % 5) + 0.08 * rng.standard_normal() - 0.12 * temperature
    arms = [
        _arm(arm, token_ids, num_prompt_tokens, float(np.clip(skill, 0.1, 0.95)), made.noise, rng)
        for arm in made.arms
        if arm.name in names
    ]
    return PromptRecord(
        suite=suite,
        id=f"{suite}/{index}",
        index=index,
        turn=turn,
        temperature=temperature,
        num_prompt_tokens=num_prompt_tokens,
        order=tuple(rng.permutation(names).tolist()),
        arms=tuple(arms),
    )


def _arm(
    arm: Arm,
    token_ids: tuple[int, ...],
    context: int,
    skill: float,
    noise: float,
    rng: np.random.Generator,
) -> ArmRecord:
    if arm.method not in ("ar", "dflash", "ddtree"):
        seconds = 0.034 * len(token_ids) / (1 + skill / 2)
        return ArmRecord(
            arm=arm.name,
            token_ids=token_ids,
            elapsed_s=seconds,
            prefill_s=None,
            rounds=(),
            node_bins=(),
        )
    rounds: list[RoundRecord] = []
    bins = np.zeros((NUM_BINS, 3))
    left = len(token_ids) - 1
    while left > 0:
        done = _round(arm, context, left, skill, noise, bins, rng)
        rounds.append(done)
        context += done.tokens
        left -= done.tokens
    spent = sum(done.seconds.total for done in rounds)
    return ArmRecord(
        arm=arm.name,
        token_ids=token_ids,
        elapsed_s=PREFILL_S + spent + 0.0002 * len(rounds),
        prefill_s=PREFILL_S,
        rounds=tuple(rounds),
        node_bins=tuple((int(n), float(p), int(h)) for n, p, h in bins),
    )


def _round(
    arm: Arm,
    context: int,
    left: int,
    skill: float,
    noise: float,
    bins: np.ndarray,
    rng: np.random.Generator,
) -> RoundRecord:
    def took(seconds: float) -> float:
        return float(seconds * np.exp(noise * rng.standard_normal()))

    nodes = {"ar": 0, "dflash": DEPTHS}.get(arm.method, arm.budget)
    if nodes == "auto":
        nodes = int(rng.integers(4, 17)) if rng.random() < 0.8 else 0
    assert isinstance(nodes, int)
    width = 1 if arm.method == "dflash" else max(1, nodes // 4)
    ranks: list[int] = []
    for depth in range(1, DEPTHS + 1 if nodes else 1):
        # A wide tree also has what is not the most probable.
        if rng.random() >= min(0.97, skill * 0.93**depth * (1 + 0.12 * np.log2(width))):
            break
        ranks.append(int(min(width - 1, rng.geometric(0.75) - 1)))
    accepted = ranks[: left - 1]
    probabilities = skill ** np.linspace(1, 6, nodes)
    hits = np.arange(nodes) < len(accepted)
    rows = np.stack([np.ones(nodes), probabilities, hits], axis=1)
    np.add.at(bins, np.searchsorted(BIN_EDGES, probabilities, side="right"), rows)
    return RoundRecord(
        context=context,
        nodes=nodes,
        promised=1 + float(probabilities.sum()),
        tokens=len(accepted) + 1,
        ranks=tuple(accepted),
        seconds=StageSeconds(
            draft=took(PROFILE.draft) if nodes else 0.0,
            build=took(2e-5 * nodes),
            verify=took(PROFILE.verify_s(nodes + 1, context)),
            walk=took(0.0004),
            commit=took(0.0006 if nodes else 0.0001),
        ),
    )
