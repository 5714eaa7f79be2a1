"""The measuring itself: every arm on every prompt, side by side, in random order.

Arms take turns prompt by prompt, so that a drift of the machine hits all alike. Knows no folder
and no terminal.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ddtree.bench.arms import DRAFTING_METHODS, decode_config, is_outside
from ddtree.bench.outside import Assistant, run_outside
from ddtree.bench.records import Arm, ArmRecord, PromptRecord, record_generation
from ddtree.bench.workloads import BenchPrompt, Suite
from ddtree.config import DecodeConfig
from ddtree.decode import Stages
from ddtree.errors import ContextLengthError, OptionError
from ddtree.models.target import Target
from ddtree.pair import Pair
from ddtree.prompt import check_fits, encode
from ddtree.tracing.recording import NUM_RANKS, Recording
from ddtree.tracing.trace_file import TraceWriter
from ddtree.types import Generation

_WARM_UP_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Options of a run.

    Args:
        temperatures: each prompt is answered at each; 0 is greedy.
        max_new_tokens: length limit of an answer, >= 2: the first token is the prefill's.
        seed: of sampled answers, as `ddtree generate --seed` takes it, and of the order of arms.
        limit: the first prompts of each suite; None takes all.

    Raises:
        OptionError: an option outside its range.
    """

    temperatures: tuple[float, ...] = (0.0,)
    max_new_tokens: int = 128
    seed: int = 0
    limit: int | None = None

    def __post_init__(self) -> None:
        for temperature in self.temperatures:
            DecodeConfig(
                temperature=temperature, seed=self.seed, max_new_tokens=self.max_new_tokens
            )
        different = len(set(self.temperatures)) == len(self.temperatures)
        for name, expected, fine in (
            ("temperature", "one or more, all different", self.temperatures and different),
            ("max_new_tokens", "a whole number >= 2", self.max_new_tokens >= 2),
            ("limit", "a whole number >= 1", self.limit is None or self.limit >= 1),
        ):
            if not fine:
                raise OptionError(
                    name,
                    expected=expected,
                    got=getattr(self, name, self.temperatures),
                    remedy="For example --temperature 0,1 --max-new-tokens 128 --limit 10.",
                )


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What is measured.

    Args:
        pair: with a drafter, unless no arm drafts.
        arms: "ar" first.
        config: see `BenchConfig`.
        assistant: for the arm "assistant".
    """

    pair: Pair
    arms: tuple[Arm, ...]
    config: BenchConfig
    assistant: Assistant | None = None

    def arms_at(self, temperature: float) -> list[Arm]:
        """The arms that run there: transformers' own are greedy only, see `outside`."""
        return [arm for arm in self.arms if temperature == 0 or not is_outside(arm)]

    def num_generations(self, planned: PlannedPrompt) -> int:
        """Texts that a prompt takes: of all arms, turns and temperatures."""
        per_turn = sum(len(self.arms_at(t)) for t in self.config.temperatures)
        return len(planned.prompt.turns) * per_turn


@dataclass(frozen=True, kw_only=True)
class PlannedPrompt:
    """A prompt that will be run, and its place among the run's prompts of its suite, from 0."""

    suite: str
    index: int
    prompt: BenchPrompt


class TurnKey(NamedTuple):
    """What a record is about."""

    suite: str
    id: str
    turn: int
    temperature: float

    @property
    def name(self) -> str:
        """For the ids of traces."""
        return f"{self.suite}/{self.id}/{self.turn}/{self.temperature:g}"

    @classmethod
    def of(cls, record: PromptRecord) -> TurnKey:
        """The key of a record."""
        return cls(record.suite, record.id, record.turn, record.temperature)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The prompts of a run.

    Args:
        prompts: the first of every suite, then the second, and so on, so that a run that is stopped
            early has seen every suite.
        left_out: ids by suite that do not fit into the target's context with their answers.
    """

    prompts: tuple[PlannedPrompt, ...]
    left_out: Mapping[str, tuple[str, ...]]


def plan_prompts(bench: Bench, suites: Sequence[Suite]) -> Plan:
    """Choose the prompts, before any work.

    Raises:
        OptionError: an arm of ours that cannot run, see `Pair.run`.
        ContextLengthError: a suite of which no prompt fits.
        PromptError: see `encode`.
    """
    planned: list[PlannedPrompt] = []
    left_out: dict[str, tuple[str, ...]] = {}
    for suite in suites:
        fitting: list[PlannedPrompt] = []
        too_long: list[str] = []
        for prompt in suite.prompts:
            if len(fitting) == bench.config.limit:
                break
            if _fits(prompt, bench):
                place = len(fitting)
                fitting.append(PlannedPrompt(suite=suite.name, index=place, prompt=prompt))
            else:
                too_long.append(prompt.id)
        if not fitting:
            limit = bench.pair.target.context_limit
            raise ContextLengthError(
                f"suite {suite.name}",
                expected=f"prompts that fit into the context of {limit} with their answers",
                got="none that does",
                remedy="Lower --max-new-tokens, or leave the suite out.",
            )
        planned += fitting
        left_out[suite.name] = tuple(too_long)
    planned.sort(key=lambda each: each.index)  # stable: suites stay in order
    _check_arms(bench, planned[0])
    return Plan(prompts=tuple(planned), left_out=left_out)


def warm_up(bench: Bench, planned: PlannedPrompt) -> None:
    """Run every arm for a few tokens: allocations and first-call work are not measured."""
    prompt_ids = _encode(planned.prompt.turns[:1], [], bench.pair.target)
    short = min(_WARM_UP_TOKENS, bench.config.max_new_tokens)
    for temperature in bench.config.temperatures:
        for arm in bench.arms_at(temperature):
            _run_arm(bench, arm, prompt_ids, temperature, short)


def measure(
    bench: Bench,
    planned: Sequence[PlannedPrompt],
    done: Mapping[TurnKey, PromptRecord],
    *,
    tell: Callable[[TurnKey, str], None],
    traces: TraceWriter | None = None,
) -> Iterator[PromptRecord]:
    """Measure what is not measured yet, turn by turn.

    The answers of "ar" become the assistant's messages of the next turn; every arm gets the same
    prompt.

    Args:
        bench: what to measure.
        planned: on what, in this order.
        done: what an earlier run has measured.
        tell: told of every arm that has run, by its name.
        traces: takes the rounds of our own arms, whose times then include the hearing.
    """
    for each in planned:
        for temperature in bench.config.temperatures:
            answers: list[str] = []
            for turn in range(len(each.prompt.turns)):
                key = TurnKey(each.suite, each.prompt.id, turn, temperature)
                record = done.get(key)
                if record is None:
                    record = _measure_turn(bench, each, key, answers, tell, traces)
                    yield record
                answers.append(_text(record.arms[0].token_ids, bench.pair.target))


def generate(
    pair: Pair,
    prompt_ids: list[int],
    config: DecodeConfig,
    observe: Callable[[Stages], Stages] | None = None,
) -> Generation:
    """A generation of one of our own arms: all of them, and nothing else, go through here."""
    *_, generation = pair.run(prompt_ids, config, observe=observe)
    assert isinstance(generation, Generation)
    return generation


def _measure_turn(
    bench: Bench,
    planned: PlannedPrompt,
    key: TurnKey,
    answers: Sequence[str],
    tell: Callable[[TurnKey, str], None],
    traces: TraceWriter | None,
) -> PromptRecord:
    turns = planned.prompt.turns[: key.turn + 1]
    prompt_ids = _encode(turns, answers, bench.pair.target)
    arms = bench.arms_at(key.temperature)
    # By what is run and not by what has run: a resumed run has the order of an unbroken one.
    rng = random.Random(f"{bench.config.seed} {'|'.join(map(str, key))}")
    order = rng.sample(arms, len(arms))
    records: dict[str, ArmRecord] = {}
    for arm in order:
        traced = None if traces is None else _Traced(traces, f"{key.name}/{arm.name}")
        records[arm.name] = _run_arm(
            bench, arm, prompt_ids, key.temperature, bench.config.max_new_tokens, traced
        )
        tell(key, arm.name)
    return PromptRecord(
        suite=key.suite,
        id=key.id,
        index=planned.index,
        turn=key.turn,
        temperature=key.temperature,
        num_prompt_tokens=len(prompt_ids),
        order=tuple(arm.name for arm in order),
        arms=tuple(records[arm.name] for arm in arms),
    )


@dataclass(frozen=True)
class _Traced:
    """Where the trace of one generation goes, and under which id."""

    writer: TraceWriter
    id: str


def _run_arm(
    bench: Bench,
    arm: Arm,
    prompt_ids: list[int],
    temperature: float,
    max_new_tokens: int,
    traced: _Traced | None = None,
) -> ArmRecord:
    if is_outside(arm):
        return run_outside(
            arm,
            bench.pair.target,
            prompt_ids,
            max_new_tokens=max_new_tokens,
            assistant=bench.assistant,
        )
    config = _config(bench, arm, temperature, max_new_tokens)
    # A turn that was killed halfway is measured again, and has left its traces.
    if traced is None or traced.id in traced.writer.ids:
        generation = generate(bench.pair, prompt_ids, config)
    else:
        recording = Recording(bench.pair, config)
        generation = generate(bench.pair, prompt_ids, config, recording.observe)
        # Asking the drafter along a text serves all arms, since all have the same.
        first = next((a for a in bench.arms if a.method in DRAFTING_METHODS), None)
        num_ranks = NUM_RANKS if arm == first else None
        traced.writer.write(recording.traced(generation, id=traced.id, num_ranks=num_ranks))
    return record_generation(arm.name, generation, len(prompt_ids))


def _config(bench: Bench, arm: Arm, temperature: float, max_new_tokens: int) -> DecodeConfig:
    drafter = bench.pair.drafter
    return decode_config(
        arm,
        temperature=temperature,
        seed=bench.config.seed,
        max_new_tokens=max_new_tokens,
        num_depths=0 if drafter is None else drafter.num_depths,
    )


def _check_arms(bench: Bench, planned: PlannedPrompt) -> None:
    """Whether every arm can run; our own say so before any work."""
    prompt_ids = _encode(planned.prompt.turns[:1], [], bench.pair.target)
    for temperature in bench.config.temperatures:
        for arm in bench.arms_at(temperature):
            if not is_outside(arm):
                config = _config(bench, arm, temperature, bench.config.max_new_tokens)
                bench.pair.run(prompt_ids, config)


def _fits(prompt: BenchPrompt, bench: Bench) -> bool:
    """Whether the whole conversation, with answers of full length, fits into the context."""
    target, turns = bench.pair.target, prompt.turns
    prompt_ids = _encode(turns, [""] * (len(turns) - 1), target)
    try:
        check_fits(len(prompt_ids), len(turns) * bench.config.max_new_tokens, target)
    except ContextLengthError:
        return False
    return True


def _encode(turns: Sequence[str], answers: Sequence[str], target: Target) -> list[int]:
    """The user's messages with an answer behind each but the last."""
    messages = [{"role": "user", "content": turns[0]}]
    for answer, turn in zip(answers, turns[1:], strict=True):
        messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": turn})
    return encode(messages, target, raw=False)


def _text(token_ids: Sequence[int], target: Target) -> str:
    assert target.tokenizer is not None, "a chat template was used"
    text: str = target.tokenizer.decode(list(token_ids), skip_special_tokens=True)
    return text
