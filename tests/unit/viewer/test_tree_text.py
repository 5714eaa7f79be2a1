"""Trees in a terminal, against goldens written by hand."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from ddtree.types import Round
from ddtree.viewer.scenes import scenes_of
from ddtree.viewer.token_names import TokenNames
from ddtree.viewer.tree_text import show_scenes
from tests.support.rounds import (
    D,
    WordTokenizer,
    large_round,
    plain_round,
    prefill_round,
    worked_round,
)

WORDS = [" two", "\n", "[red]", "é", "def"]


def shown(
    *rounds: Round,
    chosen: range | None = None,
    max_nodes: int = 32,
    encoding: str = "utf-8",
    terminal: bool = False,
    width: int = 80,
) -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    console = Console(
        file=file,
        width=width,
        force_terminal=terminal,
        color_system="standard" if terminal else None,
        legacy_windows=False,
    )
    show_scenes(
        scenes_of(rounds),
        range(len(rounds)) if chosen is None else chosen,
        TokenNames(WordTokenizer(WORDS)),
        console,
        max_nodes=max_nodes,
    )
    file.flush()
    return raw.getvalue().decode(encoding)


def test_the_worked_example_in_a_terminal_of_unicode() -> None:
    assert (
        shown(prefill_round(), worked_round())
        == """\
round 0: prefill, 1 token
                        def  bonus

round 1: 6 nodes, 2 accepted, 3 tokens (2.88 expected)
p|parent  p path  rank  def
   60.0%   60.0%     0  ├─ ·two  accepted
   50.0%   30.0%     0  │  ├─ ⏎  accepted
   55.0%   16.5%     0  │  │  ├─ [red]
       -       -     -  │  │  └─ é  bonus
   40.0%   24.0%     1  │  └─ ·two
   38.0%   38.0%     1  └─ ⏎
   50.0%   19.0%     0     └─ ⏎

"""
    )


def test_the_worked_example_in_plain_ascii_with_fewer_nodes() -> None:
    assert (
        shown(
            prefill_round(), worked_round(), chosen=range(1, 2), max_nodes=2, encoding="iso-8859-1"
        )
        == """\
round 1: 6 nodes, 2 accepted, 3 tokens (2.88 expected)
p|parent  p path  rank  "def"
   60.0%   60.0%     0  |- " two"  accepted
   50.0%   30.0%     0  |  `- "\\n"  accepted
       -       -     -  |     `- "\\xe9"  bonus
   38.0%   38.0%     1  `- "\\n"
                        ... 3 more, less probable

"""
    )


def test_a_round_without_a_draft_says_so_behind_the_end_of_the_text() -> None:
    rounds = (prefill_round(), worked_round(), plain_round(D, 0))
    assert (
        shown(*rounds, chosen=range(2, 3))
        == """\
round 2: not drafted, 1 token
p|parent  p path  rank  def·two⏎é
       -       -     -  └─ ·two  bonus

"""
    )


def test_a_long_text_is_cut_at_its_beginning() -> None:
    rounds = [prefill_round(), *[plain_round(4, 4)] * 30]
    line = shown(*rounds, chosen=range(30, 31)).splitlines()[1]
    assert line.endswith("rank  …" + "def" * 9)


def test_the_accepted_path_is_lit_and_the_bonus_token_in_another_colour() -> None:
    lines = shown(prefill_round(), worked_round(), terminal=True).splitlines()[4:]
    green, yellow = "\x1b[1;32m", "\x1b[1;33m"
    assert [green in line for line in lines[1:8]] == [True, True, False, False, False, False, False]
    assert [yellow in line for line in lines[1:8]] == [False] * 3 + [True] + [False] * 3


def test_a_terminal_cuts_lines_and_a_file_does_not() -> None:
    rounds = (prefill_round(), worked_round())
    narrow = shown(*rounds, terminal=True, width=36).splitlines()
    wide = shown(*rounds, width=36).splitlines()
    assert len(narrow) == len(wide)
    assert any("…" in line for line in narrow)
    assert "   50.0%   30.0%     0  │  ├─ ⏎  accepted" in wide


@pytest.mark.parametrize(("max_nodes", "left_out"), [(400, 0), (20, 380)])
def test_a_large_tree_shows_its_first_nodes_and_counts_the_others(
    max_nodes: int, left_out: int
) -> None:
    rounds = (prefill_round(), large_round(400))
    lines = shown(*rounds, chosen=range(1, 2), max_nodes=max_nodes).splitlines()
    accepted = [line for line in lines if line.endswith("accepted")]
    more = [line for line in lines if line.endswith("more, less probable")]
    assert len(accepted) == 2
    # The accepted path is there even where it lies beyond the limit.
    assert len(lines) == (400 + 4 if not left_out else len(lines))
    assert len(more) == bool(left_out)
    if left_out:
        hidden = int(more[0].split()[1])
        assert left_out - 2 <= hidden <= left_out
        assert len(lines) == 400 - hidden + 5
