"""`ddtree bench` for a person: suites in, a progress bar, results.json and its report out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from ddtree.bench.arms import DRAFTING_METHODS, TREE_METHODS
from ddtree.bench.outside import PROMPT_LOOKUP_TOKENS
from ddtree.bench.records import RESULTS_FILE, PromptRecord, Run
from ddtree.bench.runner import Bench, Plan, TurnKey, measure, plan_prompts, warm_up
from ddtree.bench.workloads import Suite
from ddtree.draft import Drafter
from ddtree.errors import listed
from ddtree.journal import Journal, write_whole
from ddtree.models.loading import LoadedDrafter
from ddtree.progress import stage_progress
from ddtree.provenance import drafter_digest, origin
from ddtree.tracing.recording import card_of
from ddtree.tracing.trace_file import TraceWriter

_CARD = "bench.json"
_TOLD_DIFFERENCES = 8


@dataclass(frozen=True, kw_only=True)
class BenchJob:
    """What to measure, and where to put it.

    Args:
        bench: pair, arms and options.
        suites: on what.
        out: folder for the results; gone on with if it is there.
        trace: file for all rounds of our own arms; None writes none.
    """

    bench: Bench
    suites: tuple[Suite, ...]
    out: Path
    trace: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Session:
    """A process that measured for a run: after a kill there is more than one."""

    command: str
    commit: str | None
    date: str


def run_bench(job: BenchJob, console: Console) -> Run:
    """Measure, and write results.json.

    Goes on where an earlier run stopped: measured.jsonl holds what is measured already. A larger
    `limit` adds prompts to it, a smaller one leaves some out of the results.

    Raises:
        UserError: see `plan_prompts` and `Journal`.
    """
    plan = plan_prompts(job.bench, job.suites)
    for suite, ids in plan.left_out.items():
        if ids:
            console.print(
                f"{suite}: left out {len(ids)} prompts too long for the context: {listed(ids)}",
                style="yellow",
                markup=False,
            )
    now = origin()
    described = _description(job, now)
    wanted = {
        TurnKey(each.suite, each.prompt.id, turn, temperature)
        for each in plan.prompts
        for turn in range(len(each.prompt.turns))
        for temperature in job.bench.config.temperatures
    }
    journal = Journal(
        job.out / "measured.jsonl", card=_CARD, description=described, parse=PromptRecord.parse
    )
    sessions = Journal(
        job.out / "sessions.jsonl",
        card=_CARD,
        description=described,
        parse=lambda line: Session(**json.loads(line)),
    )
    with closing(journal), closing(sessions):
        if any(arm.method in DRAFTING_METHODS for arm in job.bench.arms):
            job.bench.pair.measure(lambda message: console.print(message, style="dim"))
        done = {TurnKey.of(record): record for record in journal.records}
        if not wanted <= done.keys():
            sessions.append(Session(**{key: now[key] for key in ("command", "commit", "date")}))  # type: ignore[arg-type]
            _measure(job, plan, journal, done, console)
        run = Run(
            card={**now, **_card(job, plan), "sessions": [asdict(s) for s in sessions.records]},
            arms=job.bench.arms,
            prompts=tuple(r for r in journal.records if TurnKey.of(r) in wanted),
        )
    write_whole(job.out / RESULTS_FILE, run.as_json())
    return run


def show_disagreement(run: Run, console: Console, *, exact: bool) -> None:
    """Say where arms did not say the same; that they did is the report's to say.

    Args:
        run: whole.
        console: to say it on.
        exact: whether a difference is a fault, as in float32, or may be rounding.
    """
    differing = [record for record in run.prompts if record.disagreeing]
    if not differing:
        return
    counts = Counter(name for record in differing for name in record.disagreeing)
    by_arm = ", ".join(f"{arm} {count}" for arm, count in counts.items())
    said = f"differ from ar on {len(differing)} of {len(run.prompts)} turns: {by_arm}."
    style = "bold red" if exact else "yellow"
    why = "FAILED: arms" if exact else f"Rounding in {run.card['dtype']}: arms"
    console.print(f"{why} {said}", style=style, markup=False)
    for record in differing[:_TOLD_DIFFERENCES]:
        for name in record.disagreeing:
            index = _first_difference(record.arms[0].token_ids, record.arm(name).token_ids)
            console.print(
                f"  {record.suite} {record.id}, turn {record.turn}, temperature "
                f"{record.temperature:g}: {name} at new token {index}",
                style=style,
                markup=False,
            )


def _measure(
    job: BenchJob,
    plan: Plan,
    journal: Journal[PromptRecord],
    done: Mapping[TurnKey, PromptRecord],
    console: Console,
) -> None:
    """Measure what is not measured yet, with a bar."""
    bench = job.bench
    total = sum(map(bench.num_generations, plan.prompts))
    ids = {(each.suite, each.prompt.id) for each in plan.prompts}
    # An earlier run may have measured more prompts than this one wants.
    num_done = sum(len(record.arms) for key, record in done.items() if key[:2] in ids)
    if num_done:
        console.print(f"{num_done} of {total} texts are there already.")
    with _traces(job) as traces, stage_progress(console, "texts") as progress:
        console.print("Warming up every arm.", style="dim")
        warm_up(bench, plan.prompts[0])
        task = progress.add_task("", total=total, completed=num_done)

        def tell(key: TurnKey, arm: str) -> None:
            progress.update(task, advance=1, description=key.suite)

        for record in measure(bench, plan.prompts, done, tell=tell, traces=traces):
            journal.append(record)


@contextmanager
def _traces(job: BenchJob) -> Iterator[TraceWriter | None]:
    """The file of traces, if one is wanted."""
    if job.trace is None:
        yield None
        return
    with TraceWriter(job.trace, card_of(job.bench.pair)) as writer:
        yield writer


def _card(job: BenchJob, plan: Plan) -> dict[str, object]:
    """What a reader needs to judge or repeat the numbers, besides the origin."""
    bench, pair = job.bench, job.bench.pair
    drafts = "experience" in vars(pair)
    return {
        "target": pair.target.name,
        "drafter": None if pair.drafter is None else _name(pair.drafter),
        "dtype": _dtype(job),
        "device": str(pair.target.device),
        "seed": bench.config.seed,
        "options": {
            "methods": list(dict.fromkeys(arm.method for arm in bench.arms)),
            "budgets": list(
                dict.fromkeys(arm.budget for arm in bench.arms if arm.method in TREE_METHODS)
            ),
            "temperatures": list(bench.config.temperatures),
            "max_new_tokens": bench.config.max_new_tokens,
            "limit": bench.config.limit,
            "assistant": None if bench.assistant is None else bench.assistant.name,
            "prompt_lookup_tokens": PROMPT_LOOKUP_TOKENS,
        },
        "suites": {
            suite.name: {
                "source": suite.source,
                "num_prompts": sum(each.suite == suite.name for each in plan.prompts),
                "sha256": suite.sha256,
                "left_out": list(plan.left_out[suite.name]),
            }
            for suite in job.suites
        },
        "cost_profile": asdict(pair.experience.profile) if drafts else None,
    }


def _description(job: BenchJob, now: Mapping[str, object]) -> dict[str, object]:
    """What decides the results; how many prompts are measured does not, so it may be changed.

    Neither does the commit: a run of hours would be lost to a typo mended in between. Each
    process that measured is noted with its own commit instead.
    """
    bench, pair = job.bench, job.bench.pair
    return {
        "target": pair.target.name,
        "drafter": None if pair.drafter is None else _identity(pair.drafter),
        "dtype": _dtype(job),
        "device": str(pair.target.device),
        "machine": now["machine"],
        "versions": now["versions"],
        "arms": [asdict(arm) for arm in bench.arms],
        "assistant": None if bench.assistant is None else bench.assistant.name,
        "temperatures": bench.config.temperatures,
        "max_new_tokens": bench.config.max_new_tokens,
        "seed": bench.config.seed,
        "suites": {suite.name: suite.sha256 for suite in job.suites},
    }


def _identity(drafter: Drafter) -> dict[str, object]:
    """The drafter by its content, so that a folder that was trained on is told apart."""
    return {"name": _name(drafter), "sha256": drafter_digest(drafter)}


def _name(drafter: Drafter) -> str:
    return drafter.name if isinstance(drafter, LoadedDrafter) else type(drafter).__name__


def _dtype(job: BenchJob) -> str:
    return job.bench.pair.target.dtype_name.removeprefix("torch.")


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    shared = min(len(ours), len(theirs))
    return next((i for i in range(shared) if ours[i] != theirs[i]), shared)
