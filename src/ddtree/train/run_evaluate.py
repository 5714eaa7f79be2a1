"""Stage "evaluate" for a person: prompts in, progress and tables on the terminal, files out."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from ddtree.draft import Drafter
from ddtree.errors import OptionError
from ddtree.journal import Journal, write_whole
from ddtree.models.drafter import DFlashDrafter
from ddtree.pair import Pair
from ddtree.progress import stage_progress
from ddtree.provenance import drafter_digest
from ddtree.report import versions
from ddtree.train import plots
from ddtree.train.accuracy import CalibrationCurve
from ddtree.train.evaluate import (
    CHAIN,
    PLAIN,
    EvaluateConfig,
    PromptResult,
    SuitePrompt,
    check_prompts,
    evaluate,
    read_suites,
)
from ddtree.train.evaluation import Evaluation, as_json, summarise

_Rows = Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class EvaluateJob:
    """What to evaluate, and where to put it.

    Args:
        pair: with the drafter.
        files: of held-out prompts, each a suite.
        out: folder for the results; gone on with if it is there.
        config: see `EvaluateConfig`.
    """

    pair: Pair
    files: Sequence[Path]
    out: Path
    config: EvaluateConfig


def run_evaluate(job: EvaluateJob, console: Console) -> Evaluation:
    """Measure a drafter and write evaluation.json, evaluation.md and evaluation.png.

    Goes on where an earlier run stopped: measured.jsonl holds what is measured already.

    Raises:
        UserError: see `read_suites`, `check_prompts`, `Journal` and `plots.check_installed`.
    """
    plots.check_installed()
    every = read_suites(job.files, None)
    limit = job.config.limit
    prompts = [prompt for prompt in every if limit is None or prompt.index < limit]
    check_prompts(job.pair, prompts, job.config)
    description = _description(job, every)
    journal = Journal(
        job.out / "measured.jsonl",
        card="evaluate.json",
        description=description,
        parse=PromptResult.parse,
    )
    with closing(journal):
        if journal.records:
            console.print(f"{len(journal.records)} prompts are there already.")
        _measure(job, prompts, journal, console)
        suites = list(dict.fromkeys(prompt.suite for prompt in prompts))
        wanted = {(prompt.suite, prompt.index) for prompt in prompts}
        records = [r for r in journal.records if (r.suite, r.index) in wanted]
        evaluation = summarise(records, suites)
    drafter = getattr(job.pair.drafter, "name", type(job.pair.drafter).__name__)
    card = {"drafter": drafter, "limit": job.config.limit, **description, "versions": versions()}
    _write(job.out, evaluation, card)
    show(evaluation, console)
    console.print(f"Written to {job.out}: evaluation.json, evaluation.md, evaluation.png.")
    return evaluation


def parse_budgets(text: str) -> tuple[int, ...]:
    """Budgets as the command line has them.

    Raises:
        OptionError: something else.

    >>> parse_budgets("8,16")
    (8, 16)
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise OptionError(
            "budgets",
            expected="whole numbers with commas between them",
            got=repr(text),
            remedy="For example --budgets 8,16,32.",
        ) from error


def show(evaluation: Evaluation, console: Console) -> None:
    """The tables for the terminal."""
    console.print(_rich("tau, tokens per round", _tau_rows(evaluation)))
    console.print(_rich("accuracy by depth", _depth_rows(evaluation)))
    style = "green" if evaluation.agree else "red"
    for line in _agreement(evaluation):
        console.print(line, style=style, markup=False)


def _description(job: EvaluateJob, every: Sequence[SuitePrompt]) -> dict[str, object]:
    """What decides the results; how many prompts are measured does not, so it may be raised."""
    texts = "\n".join(f"{p.suite}\t{p.index}\t{p.prompt}" for p in every).encode()
    target, drafter = job.pair.target, job.pair.drafter
    assert drafter is not None, "check_prompts wants one"
    return {
        "target": target.name,
        "dtype": target.dtype_name,
        **_identity(drafter),
        "prompts_sha256": hashlib.sha256(texts).hexdigest(),
        **{key: value for key, value in asdict(job.config).items() if key != "limit"},
    }


def _identity(drafter: Drafter) -> dict[str, object]:
    if not isinstance(drafter, DFlashDrafter):
        digest = drafter_digest(drafter)
        sha256 = {} if digest is None else {"drafter_sha256": digest}
        return {"drafter_kind": type(drafter).__name__, **sha256}
    return {"drafter_config": asdict(drafter.config), "drafter_sha256": drafter_digest(drafter)}


def _measure(
    job: EvaluateJob, prompts: Sequence[SuitePrompt], journal: Journal[PromptResult], out: Console
) -> None:
    """Measure what is not measured yet, with a bar."""
    done = frozenset((record.suite, record.index) for record in journal.records)
    with stage_progress(out, "prompts") as progress:
        # An earlier run may have measured more prompts than this one wants.
        num_done = sum((prompt.suite, prompt.index) in done for prompt in prompts)
        task = progress.add_task("", total=len(prompts), completed=num_done)
        for result in evaluate(job.pair, prompts, job.config, done=done):
            journal.append(result)
            progress.update(task, advance=1, description=result.suite)


def _write(out: Path, evaluation: Evaluation, card: Mapping[str, object]) -> None:
    title = f"{card['drafter']} drafting for {card['target']}"
    write_whole(out / "evaluation.json", as_json(evaluation, card))
    write_whole(out / "evaluation.md", _markdown(evaluation, card, title))
    write_whole(out / "evaluation.png", plots.plot_evaluation(evaluation, title))


def _markdown(evaluation: Evaluation, card: Mapping[str, object], title: str) -> str:
    hidden = ("drafter", "target", "drafter_config")
    parts = [
        f"# {title}",
        " ".join(_agreement(evaluation)),
        "## tau",
        "Tokens per round, bonus token included, the prefill's token left out: tokens by rounds, "
        "both summed over the prompts of a suite. The last row is the headline.",
        _table(_tau_rows(evaluation)),
        "The mean of each prompt's own tau, and how often the most probable token of depth 1 was "
        "right along the responses:",
        _table(_prompt_rows(evaluation)),
        "## Accuracy by depth",
        "Share of positions whose token is among the k most probable of its depth, all suites "
        "together. Along: positions with every token of the responses as the root once. Rounds: "
        "positions behind the roots of the chain's rounds. Error: the expected calibration error, "
        "along responses, of the best 16 tokens, and of the best one alone.",
        _table(_depth_rows(evaluation)),
        "## Calibration",
        "Along responses, all depths: mean predicted probability of the tokens in a bin, and the "
        "share of them that was said.",
        _table(_bin_rows(evaluation)),
        "## Card",
        "\n".join(f"- {key}: {value}" for key, value in card.items() if key not in hidden),
    ]
    return "\n\n".join(parts) + "\n"


def _agreement(evaluation: Evaluation) -> list[str]:
    if evaluation.agree:
        num_prompts = sum(suite.num_prompts for suite in evaluation.suites)
        said = "those of plain decoding"
        if evaluation.num_plain < num_prompts:
            said = f"{said} on {evaluation.num_plain}; older versions did not run it"
        return [f"All arms said the same tokens on {num_prompts} of {num_prompts} prompts: {said}."]
    return [
        f"FAILED: on prompt {d.index} of {d.suite} {_called(d.arm)} differs from "
        f"{_called(d.reference)} at new token {d.first_difference}."
        for d in evaluation.disagreements
    ]


def _called(arm: str) -> str:
    return {CHAIN: "the chain", PLAIN: "plain decoding"}.get(arm, f"the tree of budget {arm}")


def _tau_rows(evaluation: Evaluation) -> _Rows:
    return [
        ["suite", "prompts", *_arm_names(evaluation)],
        *([s.name, str(s.num_prompts), *map(_two, s.taus)] for s in evaluation.suites),
        ["mean over suites", "", *map(_two, evaluation.taus)],
    ]


def _prompt_rows(evaluation: Evaluation) -> _Rows:
    return [
        ["suite", *_arm_names(evaluation), "depth 1"],
        *([s.name, *map(_two, s.prompt_taus), _three(s.along.top_1[0])] for s in evaluation.suites),
    ]


def _depth_rows(evaluation: Evaluation) -> _Rows:
    along, rounds = evaluation.along, evaluation.in_rounds
    tops = ["top 1", "top 5", "top 16"]
    rows = [["depth", "along", *tops, "rounds", *tops, "error", "best"]]
    for i in range(len(along.top_1)):
        row = [str(i + 1)]
        for part in (along, rounds):
            shares = (part.top_1[i], part.top_5[i], part.top_16[i])
            row += [str(part.num_positions[i]), *map(_three, shares)]
        curves = (evaluation.calibration.by_depth[i], evaluation.first_calibration.by_depth[i])
        rows.append([*row, *(_error(curve) for curve in curves)])
    pooled = (evaluation.calibration.pooled, evaluation.first_calibration.pooled)
    return [*rows, ["all", *[""] * 8, *(_error(curve) for curve in pooled)]]


def _bin_rows(evaluation: Evaluation) -> _Rows:
    curve = evaluation.calibration.pooled
    bins = zip(curve.predicted, curve.observed, curve.num_tokens, strict=True)
    rows = [[_fine(p), _fine(o), str(n)] for p, o, n in bins]
    return [["predicted", "observed", "tokens"], *rows]


def _arm_names(evaluation: Evaluation) -> list[str]:
    return [evaluation.arms[0], *(f"B={arm}" for arm in evaluation.arms[1:])]


def _rich(title: str, rows: _Rows) -> Table:
    # Eleven columns must fit into a terminal of 80.
    table = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    for place, heading in enumerate(rows[0]):
        table.add_column(heading, justify="right" if place else "left")
    for row in rows[1:]:
        table.add_row(*row)
    return table


def _table(rows: _Rows) -> str:
    ruled = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(row) + " |" for row in ruled)


def _error(curve: CalibrationCurve) -> str:
    return _number(curve.error, ".4f")


def _two(value: float) -> str:
    return _number(value, ".2f")


def _three(value: float) -> str:
    return _number(value, ".3f")


def _fine(value: float) -> str:
    return _number(value, ".2g")


def _number(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)
