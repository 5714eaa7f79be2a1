"""Two runs on the same prompts: what changed from the first to the second, with intervals.

Pairs by suite, id, turn and temperature. What has no pair is refused, never compared unpaired: the
difference between two draws of prompts would drown that between two programs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ddtree.bench.measures import Sums, find, speedup_of, tau
from ddtree.bench.records import PromptRecord, Run
from ddtree.bench.statistics import Bootstrap, Estimate, Stratum, difference_of_ratios, ratio

MEAN = "mean over suites"
# A prompt's turns in the first run, and the same turns in the second.
_Pair = tuple[Sequence[PromptRecord], Sequence[PromptRecord]]


@dataclass(frozen=True, kw_only=True)
class Change:
    """A figure in both runs, and the second less the first."""

    before: float
    after: float
    change: Estimate


@dataclass(frozen=True, kw_only=True)
class ChangeRow:
    """One arm on one suite, or its mean over suites.

    Args:
        suite: its name, or `MEAN`.
        arm: its name in both runs.
        figure: speed-up over the own run's plain decoding, tau, or tokens per second.
    """

    suite: str
    arm: str
    figure: Change


@dataclass(frozen=True, kw_only=True)
class ChangesAt:
    """What changed at one temperature.

    Args:
        temperature: 0 is greedy.
        speedups, taus: of the arms that both runs have; plain decoding is left out.
        plain_speeds: tokens per second of plain decoding, over all prompts of a suite.
        notes: what was paired, and what was refused.
    """

    temperature: float
    speedups: tuple[ChangeRow, ...]
    taus: tuple[ChangeRow, ...]
    plain_speeds: tuple[ChangeRow, ...]
    notes: tuple[str, ...]


def changes_between(before: Run, after: Run, bootstrap: Bootstrap) -> tuple[ChangesAt, ...]:
    """What changed from one run to another, for each temperature that both have."""
    common = {r.temperature for r in before.prompts} & {r.temperature for r in after.prompts}
    return tuple(_changes_at(before, after, t, bootstrap) for t in sorted(common))


def differing_conditions(before: Run, after: Run) -> tuple[str, ...]:
    """What the cards say differently, a line each: figures may differ because of it."""
    found = []
    for name in ("target", "drafter", "dtype", "device", "machine", "versions", "seed"):
        found.append((name, before.card.get(name), after.card.get(name)))
    for name in ("max_new_tokens", "prompt_lookup_tokens", "assistant"):
        found.append((name, _option(before, name), _option(after, name)))
    ours, theirs = _suites(before), _suites(after)
    found += [(f"prompts of {name}", ours[name], theirs[name]) for name in ours if name in theirs]
    return tuple(f"{name}: {a} | {b}" for name, a, b in found if a != b)


def _suites(run: Run) -> dict[str, object]:
    """Digests of the suites' prompts."""
    suites = run.card.get("suites")
    if not isinstance(suites, Mapping):
        return {}
    return {name: suite.get("sha256") for name, suite in suites.items()}


def _option(run: Run, name: str) -> object:
    options = run.card.get("options")
    return options.get(name) if isinstance(options, Mapping) else None


def _changes_at(before: Run, after: Run, temperature: float, bootstrap: Bootstrap) -> ChangesAt:
    suites, notes = _paired_suites(before, after, temperature)
    plain = before.arms[0].name, after.arms[0].name
    theirs = {arm.name for arm in after.arms[1:]}
    arms = [arm.name for arm in before.arms[1:] if arm.name in theirs]

    def rows(name: str, first: Sums, second: Sums) -> list[ChangeRow]:
        return _rows(suites, name, _both(first, second, name), bootstrap)

    return ChangesAt(
        temperature=temperature,
        speedups=tuple(
            row for arm in arms for row in rows(arm, speedup_of(plain[0]), speedup_of(plain[1]))
        ),
        taus=tuple(row for arm in arms for row in rows(arm, tau, tau)),
        plain_speeds=tuple(rows(plain[0], _speed, _speed)),
        notes=notes,
    )


def _paired_suites(
    before: Run, after: Run, temperature: float
) -> tuple[dict[str, list[_Pair]], tuple[str, ...]]:
    """Pairs of each suite, by id, and what is to be said about them."""
    first, second = _by_suite(before, temperature), _by_suite(after, temperature)
    paired: dict[str, list[_Pair]] = {}
    notes = []
    for suite in first:
        ours, theirs = first[suite], second.get(suite, {})
        shared = [key for key in ours if key in theirs]
        if not shared:
            why = "no prompt is in both runs" if theirs else "the second run does not have it"
            notes.append(f"{suite}: refused, {why}.")
            continue
        by_id: dict[str, list[tuple[str, int]]] = {}
        for key in shared:
            by_id.setdefault(key[0], []).append(key)
        paired[suite] = [
            ([ours[k] for k in keys], [theirs[k] for k in keys]) for keys in by_id.values()
        ]
        same = sum(ours[k].arms[0].token_ids == theirs[k].arms[0].token_ids for k in shared)
        notes.append(
            f"{suite}: {len(shared)} turns paired, of {len(ours)} and {len(theirs)}; plain "
            f"decoding said the same on {same}."
        )
    notes += [
        f"{suite}: refused, the first run does not have it."
        for suite in second
        if suite not in first
    ]
    return paired, tuple(notes)


def _by_suite(run: Run, temperature: float) -> dict[str, dict[tuple[str, int], PromptRecord]]:
    found: dict[str, dict[tuple[str, int], PromptRecord]] = {}
    # In the order of the suite, so that the same prompts are drawn whatever was measured first.
    for record in sorted(run.prompts, key=lambda r: (r.index, r.turn)):
        if record.temperature == temperature:
            found.setdefault(record.suite, {})[record.id, record.turn] = record
    names = dict.fromkeys(record.suite for record in run.prompts)
    return {name: found[name] for name in names if name in found}


def _both(first: Sums, second: Sums, arm: str) -> Callable[[_Pair], tuple[float, ...] | None]:
    """Rows of four: what a prompt adds in the first run, then in the second."""

    def sums(pair: _Pair) -> tuple[float, ...] | None:
        # A turn that one run lacks must not weigh in the other.
        turns = [t for t in zip(*pair, strict=True) if find(t[0], arm) and find(t[1], arm)]
        ours, theirs = first([t[0] for t in turns], arm), second([t[1] for t in turns], arm)
        return None if ours is None or theirs is None else (*ours, *theirs)

    return sums


def _speed(turns: Sequence[PromptRecord], arm: str) -> tuple[float, ...] | None:
    own = [record for turn in turns if (record := find(turn, arm)) is not None]
    if not own:
        return None
    return sum(len(record.token_ids) for record in own), sum(record.elapsed_s for record in own)


def _rows(
    suites: Mapping[str, Sequence[_Pair]],
    arm: str,
    sums: Callable[[_Pair], tuple[float, ...] | None],
    bootstrap: Bootstrap,
) -> list[ChangeRow]:
    """A row for each suite that has the arm, and their mean where there are several."""
    strata = []
    for suite, pairs in suites.items():
        rows = [row for pair in pairs if (row := sums(pair)) is not None]
        if rows:
            strata.append(Stratum(name=suite, sums=np.array(rows, np.float64)))
    groups = [(stratum.name, [stratum]) for stratum in strata]
    if len(strata) > 1:
        groups.append((MEAN, strata))
    return [
        ChangeRow(suite=name, arm=arm, figure=_change(group, bootstrap)) for name, group in groups
    ]


def _change(strata: Sequence[Stratum], bootstrap: Bootstrap) -> Change:
    def mean_of(columns: slice) -> float:
        totals = [s.sums[:, columns].sum(axis=0, keepdims=True) for s in strata]
        return float(np.mean([ratio(total)[0] for total in totals]))

    return Change(
        before=mean_of(slice(0, 2)),
        after=mean_of(slice(2, 4)),
        change=bootstrap.estimate(strata, difference_of_ratios),
    )
