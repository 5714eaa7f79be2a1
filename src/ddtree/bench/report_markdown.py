"""A report as Markdown; its charts are files beside it."""

from __future__ import annotations

from collections.abc import Sequence

from ddtree.bench.plots import Plot
from ddtree.bench.report_sections import Section
from ddtree.bench.report_tables import Table


def render(title: str, sections: Sequence[Section], plots: Sequence[Plot], folder: str) -> str:
    """The whole file.

    Args:
        title: of the report.
        sections: in order.
        plots: that sections name.
        folder: where the charts are, relative to the file.
    """
    titles = {plot.name: plot.title for plot in plots}
    parts = [f"# {_plain(title)}"]
    for section in sections:
        parts += [f"## {section.title}", *map(_plain, section.paragraphs)]
        parts += [part for table in section.tables for part in (f"### {table.title}", _rows(table))]
        images = [f"![{titles[name]}]({folder}/{name}.svg)" for name in section.plots]
        parts += ["\n".join(images)] if images else []
    return "\n\n".join(parts) + "\n"


def _rows(table: Table) -> str:
    ruled = ["---" if i < table.num_words else "---:" for i in range(len(table.headings))]
    rows = [table.headings, ruled, *table.rows]
    return "\n".join("| " + " | ".join(_cell(text) for text in row) + " |" for row in rows)


def _cell(text: str) -> str:
    """Names of prompts and commands are anybody's: they must not end the cell or the row."""
    return _plain(" ".join(text.split())).replace("|", "\\|")


def _plain(text: str) -> str:
    """Text that is no markup."""
    for mark in "\\`*_<":
        text = text.replace(mark, "\\" + mark)
    return text
