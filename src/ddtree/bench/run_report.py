"""`ddtree bench report`: a report from the results in a folder; no model is needed."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from ddtree.bench import plots, report_html, report_markdown
from ddtree.bench.records import RESULTS_FILE, read_run
from ddtree.bench.report_sections import opening, report_sections, report_title
from ddtree.bench.report_tables import Table, headline_table
from ddtree.bench.statistics import Bootstrap
from ddtree.bench.summary import Summary, summarise
from ddtree.errors import CheckpointError
from ddtree.journal import write_whole, writing

PLOTS_FOLDER = "plots"


def rebuild(folder: Path, console: Console) -> None:
    """Write report.json, report.md with its plots, and report.html beside results.json.

    The same results give the same bytes.

    Args:
        folder: of a finished run.
        console: for the headline.

    Raises:
        CheckpointError: no results there, or results without a prompt.
        BackendError: no matplotlib.
        CacheWriteError: the folder cannot be written.
    """
    plots.check_installed()
    run = read_run(folder)
    if not run.prompts:
        raise CheckpointError(
            str(folder / RESULTS_FILE),
            expected="results of at least one prompt",
            got="none",
            remedy="Run `ddtree bench --out FOLDER` first, to its end.",
        )
    summary = summarise(run, Bootstrap())
    drawn = plots.draw_all(summary)
    title = report_title(summary)
    sections = report_sections(summary, [plot.name for plot in drawn])
    write_whole(folder / "report.json", summary.as_json())
    beside = folder / PLOTS_FOLDER
    with writing(beside):
        beside.mkdir(exist_ok=True)
    for plot in drawn:
        write_whole(beside / f"{plot.name}.svg", plots.on_paper(plot))
    write_whole(folder / "report.md", report_markdown.render(title, sections, drawn, PLOTS_FOLDER))
    write_whole(folder / "report.html", report_html.render(title, sections, drawn))
    show_headline(summary, console)
    console.print(f"Written to {folder}: report.html, report.md, report.json.", markup=False)


def show_headline(summary: Summary, console: Console) -> None:
    """Means over suites and what they amount to."""
    for at in summary.temperatures:
        console.print(rich_table(headline_table(at)))
        console.print()
    for line in opening(summary):
        console.print(line, markup=False, highlight=False)


def rich_table(table: Table) -> RichTable:
    """For a terminal of 80 columns."""
    rich = RichTable(
        title=table.title,
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        title_justify="left",
    )
    for place, heading in enumerate(table.headings):
        rich.add_column(heading, justify="left" if place < table.num_words else "right")
    for row in table.rows:
        rich.add_row(*map(escape, row))
    return rich
