"""The page in a real browser: what it draws, what keys and mouse do, what it asks for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddtree.config import DecodeConfig
from ddtree.viewer.tree_page import write_page
from tests.support.browser import Page, browsing, chromium
from tests.support.rounds import (
    A,
    D,
    WordTokenizer,
    generation_of,
    large_round,
    plain_round,
    prefill_round,
    worked_round,
)

WORDS = [" <b>two</b>", "\n", "</script>", "\u2028", "def"]
SIZES = [(1280, 800), (400, 800)]

pytestmark = pytest.mark.skipif(
    chromium() is None, reason="no chromium on the path: apt-get install chromium"
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "tree.html"
    # The numbers below are theirs: the prefill is 0, the tree of 400 nodes is 3.
    rounds = [prefill_round(), worked_round(), plain_round(D, A), large_round(400)]
    write_page(
        path,
        generation_of(rounds),
        WordTokenizer(WORDS),
        prompt="Why <i>not</i>?",
        config=DecodeConfig(budget=400),
        target_name="tiny",
    )
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browsing(chromium(), tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(browser: Page, file: Path) -> Iterator[Page]:
    """The page at round 1, and afterwards no error and no request but for the file itself."""
    browser.errors.clear()
    browser.requests.clear()
    browser.resize(1280, 800)
    browser.prefer(prefers_color_scheme="light", prefers_reduced_motion="reduce")
    browser.open(file)
    yield browser
    assert browser.errors == []
    assert {request.partition("#")[0] for request in browser.requests} == {file.as_uri()}


def heading(page: Page) -> str:
    return str(page.run("document.querySelector('#heading').textContent"))


def text(page: Page, selector: str = "#text") -> str:
    script = f"[...document.querySelectorAll('{selector}')].map(e => e.textContent).join('')"
    return str(page.run(script))


def labels(page: Page, state: str) -> list[str]:
    script = f"[...document.querySelectorAll('.node.{state} text:not(.chance)')]"
    return list(page.run(f"{script}.map(e => e.textContent)"))


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)


def box(page: Page, selector: str) -> list[float]:
    script = f"document.querySelector('{selector}').getBoundingClientRect()"
    return list(page.run(f"(b => [b.left, b.top, b.right, b.bottom])({script})"))


OVERLAPS = """(() => {
  const boxes = [...document.querySelectorAll(".node rect")].map(e => e.getBoundingClientRect());
  const apart = (a, b) => a.right <= b.left || b.right <= a.left
    || a.bottom <= b.top || b.bottom <= a.top;
  return boxes.flatMap((a, i) => boxes.slice(i + 1).filter(b => !apart(a, b))).length;
})()"""
SPILLS = """[...document.querySelectorAll(".node")].filter(node => {
  const around = node.querySelector("rect").getBoundingClientRect();
  return [...node.querySelectorAll("text")].some(text => {
    const inside = text.getBoundingClientRect();
    return inside.left < around.left || inside.right > around.right;
  });
}).length"""


def test_the_accepted_path_and_the_bonus_token_are_marked(page: Page) -> None:
    assert heading(page) == "Round 1 of 3 · 6 nodes, 2 accepted, 3 tokens (2.88 expected)"
    assert labels(page, "root") == ["def"]
    assert labels(page, "accepted") == ["·<b>two</b>", "⏎"]
    assert labels(page, "bonus") == ["\\u2028"]
    assert len(labels(page, "rejected")) == 4
    assert page.run("document.querySelectorAll('.edge.accepted').length") == 2


def test_text_is_never_markup(page: Page) -> None:
    assert text(page, "#prompt") == "Why <i>not</i>?"
    assert (
        page.run(
            "document.querySelectorAll('b, i').length - document.querySelectorAll('#bars i').length"
        )
        == 0
    )
    assert "</script>" in labels(page, "rejected")


def test_arrow_keys_move_through_the_rounds_and_the_text_grows(page: Page) -> None:
    assert text(page) == "def <b>two</b>⏎\n\u2028"
    assert (text(page, ".now.accepted"), text(page, ".now.bonus")) == (" <b>two</b>⏎\n", "\u2028")
    page.press("ArrowRight")
    assert heading(page) == "Round 2 of 3 · not drafted, 1 token"
    assert text(page) == "def <b>two</b>\n\u2028 <b>two</b>"
    assert (text(page, ".now.accepted"), text(page, ".now.bonus")) == ("", " <b>two</b>")
    page.press("End")
    assert heading(page).startswith("Round 3 of 3 · 400 nodes, 2 accepted")
    page.press("ArrowRight")
    assert heading(page).startswith("Round 3 of 3")
    page.press("Home")
    assert heading(page).startswith("Prefill")
    assert text(page) == "def"
    assert labels(page, "bonus") == ["def"]
    page.press("ArrowLeft")
    assert heading(page).startswith("Prefill")


def test_space_plays_to_the_end_and_pauses(page: Page) -> None:
    page.press(" ")
    assert text(page, "#play").strip() == "Pause"
    assert heading(page).startswith("Round 2")
    page.press(" ")
    assert text(page, "#play").strip() == "Play"
    page.press(" ")
    until(lambda: text(page, "#play").strip() == "Play")
    assert heading(page).startswith("Round 3")


def test_buttons_slider_and_the_text_lead_to_rounds(page: Page) -> None:
    page.run("document.querySelector('#next').click()")
    assert heading(page).startswith("Round 2")
    left, top, right, bottom = box(page, "#slider")
    for kind in ("mousePressed", "mouseReleased"):
        x = left + (right - left) * 3.5 / 4
        page.mouse(kind, x, (top + bottom) / 2, button="left", clickCount=1)
    assert heading(page).startswith("Round 3")
    page.press("ArrowLeft")  # the slider has the focus and its own arrow keys
    assert heading(page).startswith("Round 2")
    page.run("document.querySelector('#text [data-round]').click()")
    assert heading(page).startswith("Prefill")
    assert page.run("document.querySelector('#slider').value") == "0"


def test_the_address_leads_to_a_round_and_follows_it(page: Page, file: Path) -> None:
    assert page.run("location.hash") == "#1"
    page.open(file, fragment="#2")
    until(lambda: heading(page).startswith("Round 2"))
    page.press("ArrowRight")
    assert page.run("location.hash") == "#3"


def test_bars_are_as_high_as_the_tokens_of_a_round(page: Page) -> None:
    script = "[...document.querySelectorAll('#bars i')].map(e => getComputedStyle(e, '{}').height)"
    bonus = [float(h.removesuffix("px")) for h in page.run(script.format("::before"))]
    accepted = [float(h.removesuffix("px")) for h in page.run(script.format("::after"))]
    assert bonus == pytest.approx([bonus[0]] * 4)
    assert accepted == pytest.approx([0, 2 * bonus[0], 0, 2 * bonus[0]], abs=0.1)


@pytest.mark.parametrize("size", SIZES)
def test_400_nodes_do_not_overlap_and_labels_fit_at_any_zoom(
    page: Page, size: tuple[int, int]
) -> None:
    page.resize(*size)
    page.press("End")
    seen = []
    for _ in range(6):
        assert page.run("document.querySelectorAll('.node').length") == 402
        assert page.run(OVERLAPS) == 0
        assert page.run(SPILLS) == 0
        seen.append(len(labels(page, "rejected")))
        page.press("+")
        page.press("+")
    # The further in, the more labels, until there are all.
    assert seen == sorted(seen)
    assert 0 < seen[0] < 60
    assert seen[-1] == 398


def test_the_whole_of_400_nodes_fits_at_first_and_again_after_0(page: Page) -> None:
    page.press("End")
    fits = "(c => c.scrollHeight <= c.clientHeight && c.scrollWidth <= c.clientWidth)"
    fits += "(document.querySelector('#canvas'))"
    assert page.run(fits) is True
    page.press("+")
    assert page.run(fits) is False
    page.press("0")
    assert page.run(fits) is True


def test_dragging_pans_and_the_wheel_zooms_where_it_is(page: Page) -> None:
    page.press("End")
    left, top, right, bottom = box(page, "#canvas")
    x, y = (left + right) / 2, (top + bottom) / 2
    before = page.run("document.querySelector('#tree').getBoundingClientRect().height")
    page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-600, modifiers=2)
    until(
        lambda: page.run("document.querySelector('#tree').getBoundingClientRect().height") > before
    )
    start = page.run("document.querySelector('#canvas').scrollTop")
    page.mouse("mousePressed", x, y, button="left", clickCount=1)
    page.mouse("mouseMoved", x, y - 40, button="left", buttons=1)
    page.mouse("mouseReleased", x, y - 40, button="left", clickCount=1)
    until(lambda: page.run("document.querySelector('#canvas').scrollTop") == start + 40)


def test_pointing_and_focus_show_the_details_of_a_node(page: Page) -> None:
    assert "root: the last token so far" in text(page, "#details")
    left, top, right, bottom = box(page, ".node.accepted rect")
    page.mouse("mouseMoved", (left + right) / 2, (top + bottom) / 2)
    expected = "·<b>two</b>acceptedid 0p given parent 60%p of path 60%rank 0depth 1"
    until(lambda: text(page, "#details") == expected)
    page.mouse("mouseMoved", 5, 5)
    until(lambda: "root: the last token so far" in text(page, "#details"))
    for _ in range(3):  # root, the accepted node, its accepted child
        page.press("ArrowDown")
    assert text(page, "#details") == "⏎acceptedid 1p given parent 50%p of path 30%rank 0depth 2"
    assert page.run("document.querySelectorAll('.edge.traced').length") == 2
    page.press("ArrowUp")
    assert text(page, "#details").startswith("·<b>two</b>accepted")
    focused = "document.activeElement.getAttribute('aria-label')"
    assert page.run(focused) == (
        "·<b>two</b>, depth 1, accepted, 60% given its parent, 60% with its path, rank 0"
    )
    page.press("ArrowRight")
    assert page.run(focused) == "\\u2028, depth 0, root"


def test_dark_is_dark_and_motion_is_only_for_those_who_like_it(page: Page) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.run(background)
    page.prefer(prefers_color_scheme="dark", prefers_reduced_motion="reduce")
    assert page.run(background) != light
    page.press("ArrowRight")
    assert page.run("document.getAnimations().length") == 0
    page.prefer(prefers_reduced_motion="no-preference")
    page.press("ArrowLeft")
    assert page.run("document.getAnimations().length") == 1


@pytest.mark.parametrize("size", SIZES)
def test_nothing_spills_out_of_the_window(page: Page, size: tuple[int, int]) -> None:
    page.resize(*size)
    for _ in range(4):
        spill = "document.documentElement.scrollWidth - innerWidth"
        assert page.run(spill) <= 0
        assert page.run("document.documentElement.scrollHeight - innerHeight") <= 0
        page.press("ArrowRight")
