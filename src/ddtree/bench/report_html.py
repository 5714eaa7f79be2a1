"""A report as one HTML file that asks for nothing else: style and charts are inside."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from ddtree.bench.panels import INK
from ddtree.bench.plots import Plot
from ddtree.bench.report_sections import Section
from ddtree.bench.report_tables import Table

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f23; --paper: #ffffff; --soft: #5b6470;
  --line: #d5dae0; --stripe: #f5f7f9; --accent: #0b5cad; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --paper: #14171b; --soft: #a4adb8;
  --line: #363d46; --stripe: #1c2026; --accent: #7ab8ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem; max-width: 76rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0.4rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2.6rem 0 0.6rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.6rem 0 0.4rem; }
p { max-width: 46rem; margin: 0.5rem 0; overflow-wrap: anywhere; }
nav { display: flex; flex-wrap: wrap; gap: 0.2rem 1rem; font-size: 0.9rem; }
a { color: var(--accent); }
.tables { display: flex; flex-wrap: wrap; gap: 0 2.5rem; }
.tables > div { max-width: 100%; }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; width: fit-content;
  max-width: 100%; }
table { border-collapse: collapse; font-size: 0.88rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.3rem 0.7rem; text-align: right; white-space: nowrap; vertical-align: top; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0;
  background: var(--paper); border-right: 1px solid var(--line); }
thead th { color: var(--soft); font-weight: 600; border-bottom: 1px solid var(--line); }
tbody tr:nth-child(even) td { background: var(--stripe); }
.words th, .words td { text-align: left; }
.words td:last-child { white-space: normal; overflow-wrap: anywhere; }
.charts { display: grid; gap: 1.2rem; margin-top: 1.4rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
figure { margin: 0; max-width: 40rem; }
figure svg { display: block; width: 100%; height: auto; }
@media (max-width: 40rem) { body { padding: 0.8rem; }
  th, td { padding: 0.25rem 0.5rem; }
  .words td:first-child { white-space: normal; min-width: 6rem; } }
"""


def render(title: str, sections: Sequence[Section], plots: Sequence[Plot]) -> str:
    """The whole page.

    Args:
        title: of the report.
        sections: in order.
        plots: that sections name.
    """
    drawn = {plot.name: plot for plot in plots}
    links = " ".join(f'<a href="#{_anchor(s.title)}">{escape(s.title)}</a>' for s in sections)
    body = "\n".join(_section(section, drawn) for section in sections)
    # The policy is kept by the browser: whatever slipped in, nothing is fetched and nothing runs.
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<nav>{links}</nav>
<main>
{body}
</main>
</body>
</html>
"""


def _section(section: Section, drawn: dict[str, Plot]) -> str:
    parts = [f'<section id="{_anchor(section.title)}">', f"<h2>{escape(section.title)}</h2>"]
    parts += [f"<p>{escape(text)}</p>" for text in section.paragraphs]
    if section.tables:
        parts += ['<div class="tables">', *map(_table, section.tables), "</div>"]
    if section.plots:
        parts += [
            '<div class="charts">',
            *(_figure(drawn[name]) for name in section.plots),
            "</div>",
        ]
    return "\n".join([*parts, "</section>"])


def _table(table: Table) -> str:
    headings = "".join(f'<th scope="col">{escape(text)}</th>' for text in table.headings)
    rows = "\n".join(
        "<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in table.rows
    )
    kind = ' class="words"' if table.num_words == len(table.headings) else ""
    return (
        f'<div><h3>{escape(table.title)}</h3>\n<div class="wide" tabindex="0"><table{kind}>\n'
        f"<thead><tr>{headings}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table></div></div>"
    )


def _figure(plot: Plot) -> str:
    # Words and axes take the page's own colour, so that they can be read in the dark.
    svg = plot.svg.replace(INK, "currentColor")
    label = escape(plot.title, quote=True)
    svg = re.sub(r"<svg ", f'<svg role="img" aria-label="{label}" ', svg, count=1)
    return f"<figure>{svg.strip()}</figure>"


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z]+", "-", title.lower()).strip("-")
