"""Draft trees for a terminal: a line per node, its probabilities in columns on the left.

Lines are cut where the terminal ends. Knows tokens by the names that it is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from ddtree.viewer.scenes import Node, Scene, State
from ddtree.viewer.token_names import TokenNames, visible

_HEADINGS = "p|parent  p path  rank  "
_STYLES: dict[State, str] = {
    "root": "bold",
    "accepted": "bold green",
    "bonus": "bold yellow",
    "rejected": "",
}
_TAIL_CHARACTERS = 24


@dataclass(frozen=True)
class _Guides:
    """The four pieces that the lines of a tree are made of."""

    fork: str
    last: str
    through: str
    blank: str = "   "


_LINES = _Guides("├─ ", "└─ ", "│  ")
_ASCII_LINES = _Guides("|- ", "`- ", "|  ")


def show_scenes(
    scenes: Sequence[Scene],
    chosen: range,
    names: TokenNames,
    console: Console,
    *,
    max_nodes: int,
) -> None:
    """Print some rounds of a generation.

    Args:
        scenes: all of them, since each tree begins where the rounds before it ended.
        chosen: the numbers of those to print.
        names: of the tokens.
        console: where to.
        max_nodes: of one tree, the most probable first; the accepted path is always there.
    """
    for number in chosen:
        before = [token for scene in scenes[:number] for token in scene.token_ids]
        for line in _scene_lines(scenes[number], before, names, max_nodes, console):
            # A file takes lines of any length; a terminal would break them and the tree with it.
            if console.is_terminal:
                console.print(line, overflow="ellipsis", no_wrap=True)
            else:
                console.print(line, soft_wrap=True)
        console.print()


def heading(scene: Scene) -> str:
    """What a round did, in one line."""
    if scene.number == 0:
        return "round 0: prefill, 1 token"
    drafted = _count(scene.num_drafted, "node") if scene.num_drafted else "not drafted"
    parts = [drafted]
    if scene.num_drafted:
        parts.append(f"{scene.num_accepted} accepted")
    parts.append(_count(len(scene.token_ids), "token"))
    expected = f" ({scene.expected_tokens:.2f} expected)" if scene.num_drafted else ""
    return f"round {scene.number}: {', '.join(parts)}{expected}"


def percent(probability: float | None) -> str:
    """A probability as it is printed; "-" where there is none.

    >>> percent(0.5), percent(0.0001), percent(None)
    ('50.0%', '<0.1%', '-')
    """
    if probability is None:
        return "-"
    if 0.9995 <= probability < 1:
        return ">99.9%"
    return f"{100 * probability:.1f}%" if probability >= 0.0005 else "<0.1%"


def _scene_lines(
    scene: Scene, before: Sequence[int], names: TokenNames, max_nodes: int, console: Console
) -> Iterator[Text]:
    ascii_only = console.options.ascii_only
    yield Text(heading(scene), style="bold")
    if scene.number == 0:
        token = visible(names.text(scene.token_ids[-1]), ascii_only=ascii_only)
        yield Text.assemble(" " * len(_HEADINGS), (token, _STYLES["bonus"]), ("  bonus", "yellow"))
        return
    guides = _ASCII_LINES if ascii_only else _LINES
    shown = _shown(scene, max_nodes)
    yield Text.assemble((_HEADINGS, "dim"), *_root_line(before, names, ascii_only))
    children = [[c for c in below if c in shown] for below in scene.children()]
    for index, indent in _walk_lines(children, guides):
        node = scene.nodes[index]
        token = visible(names.text(node.token_id), ascii_only=ascii_only)
        mark = f"  {node.state}" if node.state in ("accepted", "bonus") else ""
        style = _STYLES[node.state]
        yield Text.assemble(
            _columns(node), (indent, "dim"), (token, style), (mark, style.removeprefix("bold "))
        )
    left_out = len(scene.nodes) - len(shown)
    if left_out:
        dots = "..." if ascii_only else "…"
        yield Text(f"{' ' * len(_HEADINGS)}{dots} {left_out} more, less probable", style="dim")


def _shown(scene: Scene, max_nodes: int) -> set[int]:
    """The first nodes are the most probable ones, and closed under parents: a smaller tree."""
    followed = {i for i, node in enumerate(scene.nodes) if node.state != "rejected"}
    return followed | set(range(min(max_nodes, scene.num_drafted) + 1))


def _root_line(
    before: Sequence[int], names: TokenNames, ascii_only: bool
) -> Iterator[tuple[str, str]]:
    """The root token behind the end of the text that it follows."""
    tail = "".join(names.text(token) for token in before[-_TAIL_CHARACTERS:-1])
    is_cut = len(tail) > _TAIL_CHARACTERS or len(before) > _TAIL_CHARACTERS
    if tail:
        if is_cut:
            yield "..." if ascii_only else "…", "dim"
        yield visible(tail[-_TAIL_CHARACTERS:], ascii_only=ascii_only), "dim"
        yield " " if ascii_only else "", ""
    yield visible(names.text(before[-1]), ascii_only=ascii_only), _STYLES["root"]


def _columns(node: Node) -> str:
    rank = "-" if node.rank is None else str(node.rank)
    values = (percent(node.probability), percent(node.path_probability), rank)
    return f"{values[0]:>8}  {values[1]:>6}  {values[2]:>4}  "


def _walk_lines(
    children: Sequence[Sequence[int]], guides: _Guides, node: int = 0, indent: str = ""
) -> Iterator[tuple[int, str]]:
    """The nodes below one, each with the lines in front of it, from the top down."""
    for child in children[node]:
        is_last = child == children[node][-1]
        yield child, indent + (guides.last if is_last else guides.fork)
        deeper = indent + (guides.blank if is_last else guides.through)
        yield from _walk_lines(children, guides, child, deeper)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
