"""What a report says, section by section: words, tables, and which charts go where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddtree.bench.report_tables import (
    Table,
    calibration_table,
    card_table,
    depth_table,
    disagreement_table,
    drafting,
    headline_table,
    paper_table,
    prediction_table,
    rank_table,
    stages_table,
    suite_table,
    temperature_label,
    tokens_table,
    with_interval,
)
from ddtree.bench.summary import ArmRow, AtTemperature, Summary

_FORMED = (
    "Speed-up: a prompt's tokens per second, prefill included, by those of plain decoding (ar) on "
    "the same prompt in the same run; a suite's is the mean over its prompts, the turns of a "
    "conversation one by one. Of totals: all tokens of a suite by all its seconds, relative to "
    "those of ar.",
    "tau: tokens that rounds delivered, the bonus token included and the prefill's left out, by "
    "rounds, both summed over a suite. Whatever stands for several suites is the mean of theirs. "
    "Arms whose rounds nobody sees have none.",
)
_PAPER = (
    "Methods by suites: speed-up and tau, with intervals for the average. All rows are of the "
    "prompts with an odd index. The tree's budgets are chosen by mean speed-up on the prompts with "
    "an even index alone: one for all suites, and one for each; @ says which."
)
_BUDGETS = (
    "Against the budget B, nodes of the tree besides the root: each suite, and the mean over "
    "suites with its interval. auto stands at the mean size of its trees, rounds without a draft "
    "included, and the chain (dflash) at its nodes; the labels say how many."
)
_ACCEPTANCE = (
    "All suites together. A round delivers what it accepted and the bonus token. Drafted is the "
    "share of rounds in which the drafter was asked; the others count as having accepted nothing. "
    "Rank 0 is the drafter's most probable token of its depth."
)
_CALIBRATION = (
    "Every node of every tree, in bins of the probability that its path had in the tree: mean "
    "prediction against the share that was accepted. ece, the expected calibration error, is the "
    "mean distance of the two, weighted by nodes. Promised are the tokens per round that the "
    "probabilities add up to. Trees of fixed size have the drafter's own probabilities, those of "
    "auto are corrected by what earlier rounds taught."
)
_STAGES = (
    "Mean milliseconds per round, the prefill left out. Other is what a generation took outside of "
    "its stages: the loop and the text."
)
_COSTS = (
    "The verify stage, median and quartiles: against N, rows of the forward (the nodes and the "
    "root), all arms together; and against T, tokens in the cache, for each arm of a fixed size. "
    "Lines are the cost profile that was measured before the run."
)
_MODEL = (
    "A round is predicted to take the cost profile's drafter pass, where the drafter was asked, "
    "and its verify forward of N rows at context T; its speed-up over rounds is tau x predicted "
    "plain round / predicted round, with tau as measured. With prefill: the same rounds behind the "
    "prefill as it was measured, which no method makes shorter. All suites together, by totals."
)
_AGREE = (
    "A turn is a prompt, or one message of a conversation, at one temperature. In float32 a "
    "difference is an error, of ours or of an outside arm; in half precision rows that are "
    "computed together round otherwise, and close scores can change places."
)


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a report.

    Args:
        title: its heading.
        paragraphs: before the rest.
        tables: in order.
        plots: names of charts, behind the tables.
        says_why: whether the words are wanted without a table or chart.
    """

    title: str
    paragraphs: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    plots: tuple[str, ...] = ()
    says_why: bool = False


def report_title(summary: Summary) -> str:
    """Of the whole report."""
    drafter, target = summary.card.get("drafter"), summary.card.get("target")
    named = f"Benchmark: target {target}"
    return f"{named}, drafter {drafter}" if drafter else named


def report_sections(summary: Summary, plots: Sequence[str]) -> tuple[Section, ...]:
    """All sections that have something to show.

    Args:
        summary: the numbers.
        plots: names of the charts that were drawn; each goes to the section of its first word.
    """
    every = summary.temperatures
    drafted = [at for at in every if drafting(at)]
    sections = (
        Section(
            title="Headline",
            paragraphs=opening(summary),
            tables=tuple(map(headline_table, every)),
            plots=_named(plots, "headline"),
        ),
        Section(
            title="By suite",
            paragraphs=(*_FORMED, _intervals(summary)),
            tables=tuple(
                table
                for at in every
                for table in (suite_table(at, "speedup"), suite_table(at, "tau"))
            ),
        ),
        Section(
            title="The paper's layout",
            says_why=bool(_left_out(summary)),
            paragraphs=(_PAPER, *_left_out(summary)),
            tables=tuple(paper_table(at) for at in every if at.paper.rows),
        ),
        Section(title="Budgets", paragraphs=(_BUDGETS,), plots=_named(plots, "budget")),
        Section(
            title="Acceptance",
            paragraphs=(_ACCEPTANCE,),
            tables=tuple(
                make(at) for make in (tokens_table, depth_table, rank_table) for at in drafted
            ),
            plots=_named(plots, "acceptance"),
        ),
        Section(
            title="Calibration",
            paragraphs=(_CALIBRATION,),
            tables=tuple(map(calibration_table, drafted)),
            plots=_named(plots, "calibration"),
        ),
        Section(
            title="Where a round's time goes",
            paragraphs=(_STAGES,),
            tables=tuple(stages_table(at) for at in every if at.rounds),
            plots=_named(plots, "stages"),
        ),
        Section(
            title="What a verify forward costs",
            paragraphs=(_COSTS,),
            plots=_named(plots, "cost"),
        ),
        Section(
            title="The cost model beside the measurement",
            paragraphs=(_MODEL, *(_difference(at) for at in every if at.predictions)),
            tables=tuple(prediction_table(at) for at in every if at.predictions),
            plots=_named(plots, "prediction"),
        ),
        Section(
            title="Agreement",
            says_why=True,
            paragraphs=(f"{_agreement_line(summary)} {_AGREE}",),
            tables=(disagreement_table(summary),) if summary.disagreements else (),
        ),
        Section(title="Card", tables=(card_table(summary.card),)),
    )
    return tuple(s for s in sections if s.tables or s.plots or s.says_why)


def opening(summary: Summary) -> tuple[str, ...]:
    """What a run found, in sentences: the fastest arm of each temperature, and agreement."""
    said = []
    for at in summary.temperatures:
        best = max(at.rows[1:], key=_mean_speedup, default=None)
        if best is None or best.mean is None:
            continue
        said.append(
            f"At {temperature_label(at.temperature)} the fastest arm is {best.arm.name}: "
            f"{with_interval(best.mean.speedup, 'x')} the speed of plain decoding, mean over "
            f"{_plural(len(at.suites), 'suite')} with {_plural(best.mean.num_prompts, 'prompt')}."
        )
    if any(at.paper.rows for at in summary.temperatures) and len(summary.arms) > 2:
        said.append(
            "The fastest of several is a little lucky too: for budgets that were chosen on other "
            "prompts than they are reported on, see the paper's layout below."
        )
    return (*said, _agreement_line(summary))


def _mean_speedup(row: ArmRow) -> float:
    return 0.0 if row.mean is None else row.mean.speedup.value


def _intervals(summary: Summary) -> str:
    b = summary.bootstrap
    return (
        f"In brackets: {b.level:.0%} intervals by the paired bootstrap (percentiles). A suite's "
        "prompts are drawn with replacement, as many as it has, and the figure is formed anew; a "
        "prompt brings all its arms and turns along. For the mean over suites every suite is drawn "
        f"for itself. {b.num_resamples} draws, seed {b.seed}. They speak of other prompts like "
        "these, not of other machines or drafters, and are somewhat narrow with few prompts (about "
        "90% with ten). A suite of one prompt has no interval."
    )


def _left_out(summary: Summary) -> tuple[str, ...]:
    suites = dict.fromkeys(suite for at in summary.temperatures for suite in at.paper.left_out)
    if not suites:
        return ()
    return (
        f"Left out: {', '.join(suites)}. With one prompt only no budget can be chosen on some "
        "prompts and reported on others.",
    )


def _difference(at: AtTemperature) -> str:
    """What parts prediction and measurement, in a sentence."""
    plain = at.predictions[0]
    drift = plain.measured_ms / plain.predicted_ms - 1
    said = (
        f"At {temperature_label(at.temperature)} plain rounds took {abs(drift):.0%} "
        f"{'more' if drift >= 0 else 'less'} than the profile says (walk, commit, and the "
        "machine's drift since it was measured)"
    )
    arms = {r.arm for r in drafting(at)}
    hosts = [r.ms.total - r.ms.draft - r.ms.verify for r in at.rounds if r.arm in arms]
    if hosts:
        said += (
            f"; rounds of arms that draft also build, walk and commit, which takes "
            f"{min(hosts):.2f} to {max(hosts):.2f} ms and is not in the model"
        )
    best = max(at.predictions, key=lambda p: p.measured_rounds_speedup)
    return (
        f"{said}; the prefill takes {best.arm} from {best.measured_rounds_speedup:.2f}x over its "
        f"rounds to {best.measured_speedup:.2f}x over everything."
    )


def _agreement_line(summary: Summary) -> str:
    turns = _plural(summary.num_records, "turn")
    if not summary.disagreements:
        return f"All arms said the same tokens on all {turns}."
    return (
        f"All arms said the same tokens on {summary.num_agreed} of {turns}; the others are "
        "listed under Agreement."
    )


def _named(plots: Sequence[str], section: str) -> tuple[str, ...]:
    return tuple(name for name in plots if name.partition("-")[0] == section)


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
