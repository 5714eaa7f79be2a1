"""Builders and budgets side by side over a trace: what they would have needed, and what it took.

Several arms of a benchmark say one text; a text counts once, whoever recorded it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from ddtree.budget import Builder
from ddtree.errors import TraceError
from ddtree.tracing.replay import Replay, first_difference, replay
from ddtree.tracing.trace import TracedGeneration
from ddtree.tracing.trace_file import Trace

# By which name a replay knows the builder of a recorded method.
BUILDER_OF = {"ddtree": "tree", "dflash": "chain"}


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """One text with one builder and budget.

    Args:
        id: of the generation whose marginals were read.
        replay: what came of it.
        recorded: the rounds of a real run with this builder and budget, or None.
    """

    id: str
    replay: Replay
    recorded: Replay | None

    @property
    def first_difference(self) -> int | None:
        """Index of the first round that is not as it was in the real run, if there is one."""
        if self.recorded is None:
            return None
        return first_difference(self.replay.rounds, self.recorded.rounds)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """All texts of one temperature with one builder and budget.

    Args:
        temperature: that they were decoded with.
        builder: its name.
        budget: B.
        texts: a replay each.
        kept_ranks: K, where fewer ranks than B were recorded: the best over those; else None.
        is_coupled: whether some text was drafted by coupled drafting, with weights that a real run
            of this builder and budget would have learnt otherwise.
    """

    temperature: float
    builder: str
    budget: int
    texts: tuple[Replayed, ...]
    kept_ranks: int | None
    is_coupled: bool

    @property
    def total(self) -> Replay:
        """The rounds of all texts."""
        return _joined([text.replay for text in self.texts])

    @property
    def recorded(self) -> Replay | None:
        """The rounds of the real runs; None where there is none with this builder and budget."""
        found = [text.recorded for text in self.texts if text.recorded is not None]
        return _joined(found) if found else None

    @property
    def differing(self) -> tuple[Replayed, ...]:
        """Texts whose replay is not what really happened."""
        return tuple(text for text in self.texts if text.first_difference is not None)


def outcomes(
    trace: Trace, builders: Mapping[str, Builder], budgets: Sequence[int]
) -> tuple[Outcome, ...]:
    """Replay every text of a trace with every builder and budget.

    Args:
        trace: see `read_trace`.
        builders: by name; "tree" and "chain" are those of recorded methods.
        budgets: each >= 0.

    Raises:
        TraceError: there is nothing to replay.
        BuilderError: a tree that could not be verified.
    """
    groups: dict[float, dict[tuple[object, ...], list[TracedGeneration]]] = {}
    for traced in trace.generations:
        said = (traced.prompt_ids, traced.token_ids, traced.max_new_tokens, traced.finish_reason)
        by_text = groups.setdefault(_temperature(traced), {})
        by_text.setdefault(said, []).append(traced)
    found = []
    for temperature, by_text in sorted(groups.items()):
        for name, builder in builders.items():
            for budget in budgets:
                outcome = _outcome(temperature, name, builder, budget, list(by_text.values()))
                if outcome.texts:
                    found.append(outcome)
    if not found:
        raise TraceError(
            "trace",
            expected="a generation that was drafted: its drafter's marginals are replayed",
            got=f"none among {len(trace.generations)}",
            remedy="Record with a drafter and a budget > 0: `ddtree generate --trace FILE`.",
        )
    return tuple(found)


def outcome_json(outcome: Outcome) -> dict[str, object]:
    """For programs."""
    recorded = outcome.recorded
    return {
        "temperature": outcome.temperature,
        "builder": outcome.builder,
        "budget": outcome.budget,
        "kept_ranks": outcome.kept_ranks,
        "is_coupled": outcome.is_coupled,
        **_replay_json(outcome.total),
        "recorded": None if recorded is None else _replay_json(recorded),
        "agrees": None if recorded is None else not outcome.differing,
        "texts": [
            {
                "id": text.id,
                **_replay_json(text.replay),
                "agrees": None if text.recorded is None else text.first_difference is None,
            }
            for text in outcome.texts
        ],
    }


def show(found: Sequence[Outcome], console: Console) -> None:
    """For people: a table, and what is to be known about it."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    several = len({outcome.temperature for outcome in found}) > 1
    if several:
        table.add_column("temp", justify="right")
    table.add_column("builder", overflow="fold")
    for heading in ("budget", "rounds", "tau", "nodes", "recorded"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("rounds of 1, 2, ..", overflow="fold")
    for outcome in found:
        total = outcome.total
        cells = [
            outcome.builder,
            f"{outcome.budget}{'*' if outcome.kept_ranks is not None else ''}",
            str(len(total.rounds)),
            _number(total.acceptance_length),
            _number(_nodes_per_round(total), digits=1),
            _recorded_text(outcome),
            " ".join(map(str, _histogram(total)[1:])),
        ]
        table.add_row(*([f"{outcome.temperature:g}"] if several else []), *cells)
    console.print(table)
    for line in _notes(found):
        console.print(line, style="dim", soft_wrap=True, markup=False, highlight=False)


def _outcome(
    temperature: float,
    name: str,
    builder: Builder,
    budget: int,
    by_text: Sequence[Sequence[TracedGeneration]],
) -> Outcome:
    texts, kept, is_coupled = [], [], False
    for generations in by_text:
        real = [g for g in generations if _ran(g, name, budget)]
        sources = [*real, *sorted(generations, key=lambda g: -g.num_ranks)]
        usable = [g for g in sources if g in real or g.num_ranks > 0 or budget == 0]
        if not usable:
            continue
        recorded = Replay(rounds=tuple(r.round for r in real[0].rounds)) if real else None
        # Method dflash, whose builder the chain is, drafts by the drafter alone.
        done = replay(usable[0], builder, budget, lookup=name != "chain")
        texts.append(Replayed(id=usable[0].id, replay=done, recorded=recorded))
        if not real and usable[0].num_ranks < budget and name != "chain":
            kept.append(usable[0].num_ranks)
        is_coupled |= not real and temperature > 0 and usable[0].options.get("coupled") is True
    return Outcome(
        temperature=temperature,
        builder=name,
        budget=budget,
        texts=tuple(texts),
        kept_ranks=min(kept, default=None),
        is_coupled=is_coupled,
    )


def _ran(traced: TracedGeneration, name: str, budget: int) -> bool:
    options = traced.options
    return BUILDER_OF.get(str(options["method"])) == name and options.get("budget") == budget


def _temperature(traced: TracedGeneration) -> float:
    value = traced.options.get("temperature", 0.0)
    return float(value) if isinstance(value, int | float) else math.nan


def _joined(replays: Sequence[Replay]) -> Replay:
    return Replay(rounds=tuple(done for one in replays for done in one.rounds))


def _histogram(done: Replay) -> list[int]:
    """Entry i counts the rounds that delivered i tokens; entry 0 is always 0."""
    counts: list[int] = np.bincount([r.num_tokens for r in done.rounds]).tolist()
    return counts if done.rounds else []


def _nodes_per_round(done: Replay) -> float:
    return done.num_nodes / len(done.rounds) if done.rounds else math.nan


def _replay_json(done: Replay) -> dict[str, object]:
    tau, nodes = done.acceptance_length, _nodes_per_round(done)
    return {
        "num_rounds": len(done.rounds),
        "num_tokens": done.num_tokens,
        "acceptance_length": None if math.isnan(tau) else tau,
        "nodes_per_round": None if math.isnan(nodes) else nodes,
        "acceptance_histogram": _histogram(done),
    }


def _recorded_text(outcome: Outcome) -> str:
    recorded = outcome.recorded
    if recorded is None:
        return "-"
    tau = _number(recorded.acceptance_length)
    return f"{tau} differs" if outcome.differing else f"{tau} agrees"


def _notes(found: Sequence[Outcome]) -> list[str]:
    by_temperature = {o.temperature: 0 for o in found}
    for o in found:
        by_temperature[o.temperature] = max(by_temperature[o.temperature], len(o.texts))
    num_texts = sum(by_temperature.values())
    texts = "1 text" if num_texts == 1 else f"{num_texts} texts"
    notes = [
        f"{texts}; nodes is per round; recorded: tau of the real run, and whether it agrees with "
        "the replay round for round."
    ]
    kept = {outcome.kept_ranks for outcome in found if outcome.kept_ranks is not None}
    if kept:
        notes.append(
            f"* only the best {min(kept)} ranks of a depth were recorded, and trees are made of "
            "those; `--trace-ranks` records more."
        )
    if any(outcome.is_coupled for outcome in found):
        notes.append(
            "Coupled drafting learns from its rounds: where no real run is beside it, a replay has "
            "what the recorded run had learnt, and a real run may need a round more or less."
        )
    notes.extend(
        f"{outcome.builder} {outcome.budget}: generation {text.id} differs from the real run first "
        f"in round {text.first_difference}."
        for outcome in found
        for text in outcome.differing
    )
    return notes


def _number(value: float, digits: int = 2) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"
