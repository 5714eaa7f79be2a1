"""Reports: whole, the same every time, in need of nothing else, and frank about their limits."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from ddtree.bench import plots
from ddtree.bench.plots import Plot
from ddtree.bench.records import ArmRecord, Run
from ddtree.bench.report_html import render as as_html
from ddtree.bench.report_markdown import render as as_markdown
from ddtree.bench.report_sections import Section, report_sections, report_title
from ddtree.bench.report_tables import Table, headline_table, paper_table
from ddtree.bench.run_report import rebuild, show_headline
from ddtree.bench.statistics import Bootstrap
from ddtree.bench.summary import Summary, summarise
from ddtree.errors import BackendError, CheckpointError
from tests.support.bench_runs import Made, make_run

NASTY = "<img src=x onerror=alert(1)>|`*_"
SMALL = Made(suites={"a": 4, "b": 1}, turns={"a": 2}, outside=("prompt-lookup",))


def disagreeing(run: Run) -> Run:
    """The same, but one arm says something else on a prompt with a name full of markup."""
    first = run.prompts[0]
    arm = replace(first.arms[1], token_ids=(*first.arms[1].token_ids[:-1], -1))
    changed = replace(first, id=NASTY, arms=(first.arms[0], arm, *first.arms[2:]))
    second = replace(run.prompts[1], id=NASTY)
    return replace(run, prompts=(changed, second, *run.prompts[2:]))


@pytest.fixture(scope="module")
def run() -> Run:
    return disagreeing(make_run(SMALL))


@pytest.fixture(scope="module")
def summary(run: Run) -> Summary:
    return summarise(run, Bootstrap(num_resamples=100))


@pytest.fixture(scope="module")
def folder(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run, its report built."""
    made = tmp_path_factory.mktemp("run")
    (made / "results.json").write_text(run.as_json())
    rebuild(made, Console(file=io.StringIO()))
    return made


class Page(HTMLParser):
    """What a browser would make of it: tags, ids, links, and words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "srcset", "action"):
                self.links.append(value or "")

    def handle_data(self, data: str) -> None:
        self.words += data


def test_a_report_is_three_files_and_the_charts_of_the_markdown(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    assert names == {"results.json", "report.json", "report.md", "report.html", "plots"}
    linked = re.findall(r"!\[[^\]]+\]\((plots/[^)]+)\)", (folder / "report.md").read_text())
    assert sorted(linked) == sorted(f"plots/{path.name}" for path in (folder / "plots").iterdir())
    assert len(linked) == 11


def test_the_page_asks_for_nothing_and_runs_nothing(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert page.links
    assert all(link.startswith("#") for link in page.links)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert "default-src 'none'" in text
    assert "@import" not in text
    assert set(re.findall(r"url\((.)", text)) == {"#"}


def test_no_two_things_on_the_page_have_the_same_id_and_every_link_leads_somewhere(
    folder: Path,
) -> None:
    page = Page((folder / "report.html").read_text())
    assert len(page.ids) == len(set(page.ids))
    assert {link[1:] for link in page.links} <= set(page.ids)


def test_words_of_charts_take_the_colour_of_the_page(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    assert plots.panels.INK not in text[text.index("<main>") :]
    assert "currentColor" in text
    chart = (folder / "plots" / "stages-t0.svg").read_text()
    assert plots.panels.INK in chart
    assert '<rect width="100%" height="100%" fill="#ffffff"/>' in chart


def test_names_of_prompts_are_never_markup(folder: Path) -> None:
    page = Page((folder / "report.html").read_text())
    assert NASTY in page.words
    row = next(line for line in (folder / "report.md").read_text().split("\n") if "onerror" in line)
    assert "\\<img" in row
    assert len(re.findall(r"(?<!\\)\|", row)) == 7


def test_all_three_say_the_same_numbers(folder: Path) -> None:
    raw = json.loads((folder / "report.json").read_text())
    rows = {row["arm"]["name"]: row for row in raw["temperatures"][0]["rows"]}
    found = rows["ddtree-8"]["cells"][0]["speedup"]
    said = f"{found['value']:.2f}x [{found['low']:.2f}, {found['high']:.2f}]"
    assert said in (folder / "report.md").read_text()
    assert said in Page((folder / "report.html").read_text()).words


def test_the_same_results_give_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_bytes((folder / "results.json").read_bytes())
    rebuild(tmp_path, Console(file=io.StringIO()))
    for path in (path for path in folder.rglob("*") if path.is_file()):
        assert (tmp_path / path.relative_to(folder)).read_bytes() == path.read_bytes(), path.name


def test_the_headline_fits_into_eighty_columns(summary: Summary) -> None:
    out = io.StringIO()
    show_headline(summary, Console(file=out, width=80))
    lines = out.getvalue().split("\n")
    row = next(line for line in lines if line.startswith("prompt-lookup"))
    assert row.endswith("-      -")
    assert sum(line.startswith("dflash") for line in lines) == 1


def test_sections_say_what_they_cannot_show(summary: Summary) -> None:
    sections = {s.title: s for s in report_sections(summary, [])}
    paper = " ".join(sections["The paper's layout"].paragraphs)
    assert "Left out: b. With one prompt only" in paper
    agreement = sections["Agreement"]
    assert "8 of 9 turns" in agreement.paragraphs[0]
    assert [row[:5] for row in agreement.tables[0].rows] == [("a", NASTY, "0", "0", "dflash")]
    # No charts were drawn: their sections have nothing to show.
    assert "Budgets" not in sections


def test_a_run_with_single_prompts_still_says_that_nothing_was_chosen() -> None:
    summary = summarise(make_run(Made(suites={"a": 1, "b": 1})), Bootstrap(num_resamples=10))
    sections = {s.title: s for s in report_sections(summary, [])}
    assert sections["The paper's layout"].tables == ()
    assert "Left out: a, b." in sections["The paper's layout"].paragraphs[1]
    # Nobody is sent to a table that is not there.
    assert not any("below" in text for text in sections["Headline"].paragraphs)


def test_tables_show_outside_arms_without_tau_and_chosen_budgets(summary: Summary) -> None:
    (at,) = summary.temperatures
    headline = {row[0]: row[1:] for row in headline_table(at).rows}
    assert headline["prompt-lookup"][2:] == ("-", "-")
    assert headline["ar"] == ("1.00x", "1.00x", "1.00", "0.0")
    rows = {row[0]: row[1:] for row in paper_table(at).rows}
    assert re.fullmatch(r"\d\.\d\dx \d\.\d\d @(8|16)", rows["ddtree, budget per suite"][0])


def test_a_run_without_drafts_has_a_report_too(tmp_path: Path) -> None:
    run = make_run(Made(suites={"a": 2}, outside=("hf-generate",)))
    kept = ("ar", "hf-generate")
    arms = tuple(arm for arm in run.arms if arm.name in kept)
    prompts = tuple(
        replace(p, arms=tuple(a for a in p.arms if a.arm in kept), order=kept) for p in run.prompts
    )
    card = {**run.card, "drafter": None, "cost_profile": None}
    (tmp_path / "results.json").write_text(Run(card=card, arms=arms, prompts=prompts).as_json())
    rebuild(tmp_path, Console(file=io.StringIO()))
    said = (tmp_path / "report.md").read_text()
    assert said.startswith("# Benchmark: target made-up-target\n")
    assert "## Calibration" not in said
    assert "## The cost model" not in said


def test_numbers_without_a_place_on_a_logarithmic_axis_are_drawn_without_complaint() -> None:
    # auto never drafts, and nothing that anybody drafts is accepted.
    run = make_run(SMALL)

    def fruitless(arm: ArmRecord) -> ArmRecord:
        nodes = {"nodes": 0} if arm.arm == "ddtree-auto" else {}
        rounds = tuple(replace(r, ranks=(), tokens=1, **nodes) for r in arm.rounds)
        bins = tuple((n, p, 0) for n, p, _ in arm.node_bins)
        return replace(arm, rounds=rounds, node_bins=bins)

    prompts = tuple(replace(p, arms=tuple(map(fruitless, p.arms))) for p in run.prompts)
    summary = summarise(replace(run, prompts=prompts), Bootstrap(num_resamples=10))
    (at,) = summary.temperatures
    styles = plots.panels.arm_styles(summary)
    for draw in (
        partial(plots.panels.by_budget, at=at, figure="tau"),
        partial(plots.panels.by_rank, at=at, styles=styles),
        partial(plots.panels.by_depth, at=at, styles=styles),
        partial(plots.panels.calibration, at=at, styles=styles),
    ):
        figure = Figure(layout="constrained")
        draw(figure.subplots())
        figure.savefig(io.BytesIO(), format="svg")


def test_results_without_a_prompt_are_refused(tmp_path: Path) -> None:
    run = replace(make_run(SMALL), prompts=())
    (tmp_path / "results.json").write_text(run.as_json())
    with pytest.raises(CheckpointError, match="at least one prompt"):
        rebuild(tmp_path, Console(file=io.StringIO()))


def test_without_matplotlib_it_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match="pip install"):
        rebuild(tmp_path / "not there", Console(file=io.StringIO()))


def test_a_title_has_the_models(summary: Summary) -> None:
    assert report_title(summary) == "Benchmark: target made-up-target, drafter made-up-drafter"


def test_markdown_and_html_of_a_section() -> None:
    table = Table(title="T", headings=("arm", "x"), rows=(("a|b", "1"),))
    section = Section(title="One & two", paragraphs=("p < q",), tables=(table,), plots=("c",))
    chart = Plot(name="c", title="C", svg="<svg width='1'></svg>")
    assert as_markdown("R", [section], [chart], "plots") == (
        "# R\n\n## One & two\n\np \\< q\n\n### T\n\n| arm | x |\n| --- | ---: |\n| a\\|b | 1 |\n\n"
        "![C](plots/c.svg)\n"
    )
    page = as_html("R", [section], [chart])
    assert '<section id="one-two">\n<h2>One &amp; two</h2>\n<p>p &lt; q</p>' in page
    assert '<figure><svg role="img" aria-label="C" width=\'1\'></svg></figure>' in page
