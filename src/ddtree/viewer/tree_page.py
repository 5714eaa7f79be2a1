"""A web page that steps through the rounds of a generation: one file, which asks for nothing else.

The page's own code is in `assets/viewer`; what it draws is put into it as JSON.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ddtree.config import DecodeConfig
from ddtree.journal import write_whole
from ddtree.text import TextStream
from ddtree.types import Generation
from ddtree.viewer.layout import rows_of
from ddtree.viewer.scenes import Node, Scene, scenes_of
from ddtree.viewer.token_names import TokenNames, visible

Json = Mapping[str, object]

_DIGITS = 4  # of a probability; more would be noise in a file of some hundred kilobytes


def write_page(
    path: Path,
    generation: Generation,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt: str,
    config: DecodeConfig,
    target_name: str,
) -> None:
    """Write the page of one generation.

    Args:
        path: the HTML file; replaced in one move if it is there.
        generation: what is shown.
        tokenizer: the target's.
        prompt: what was asked.
        config: how it was decoded.
        target_name: of the target.

    Raises:
        CacheWriteError: it cannot be written.
    """
    scenes = scenes_of(generation.rounds)
    data = {
        "prompt": prompt,
        "summary": _summary(generation, config, target_name),
        "tokens": _token_names(scenes, TokenNames(tokenizer)),
        "rounds": rounds_json(scenes, _pieces(scenes, tokenizer)),
    }
    write_whole(path, page_of(data))


def page_of(data: Json) -> str:
    """The page with its style, its code and its data inside.

    Args:
        data: as `write_page` makes it; no string in it can end the script that holds it.
    """
    assets = files("ddtree") / "assets" / "viewer"
    code = ("tree.js", "page.js")
    parts = {
        "style": (assets / "page.css").read_text(encoding="utf-8"),
        "script": "\n".join((assets / name).read_text(encoding="utf-8") for name in code),
        "data": script_safe_json(data),
    }
    page = (assets / "page.html").read_text(encoding="utf-8")
    # In one pass: what is put in is not searched again.
    return re.sub(r"@@(style|script|data)@@", lambda found: parts[found[1]], page)


def script_safe_json(data: Json) -> str:
    r"""JSON that may stand inside a `<script>`: in ASCII, without `<`, `>` and `&`.

    >>> script_safe_json({"token": "</script>"})
    '{"token":"\\u003c/script\\u003e"}'
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    # These three occur in strings alone, where JSON can spell them otherwise.
    return re.sub("[<>&]", lambda found: f"\\u{ord(found[0]):04x}", text)


def rounds_json(scenes: Sequence[Scene], pieces: Sequence[Sequence[str]]) -> list[Json]:
    """The rounds as the page reads them.

    Args:
        scenes: the prefill first.
        pieces: of each round, the text that each of its tokens adds.
    """
    return [
        {
            "number": scene.number,
            "num_drafted": scene.num_drafted,
            "expected_tokens": round(scene.expected_tokens, _DIGITS),
            "nodes": _nodes_json(scene),
            "delivered": [
                {"id": token, "text": text}
                for token, text in zip(scene.token_ids, texts, strict=True)
            ],
        }
        for scene, texts in zip(scenes, pieces, strict=True)
    ]


def _nodes_json(scene: Scene) -> Json:
    def each(value: str) -> list[object]:
        return [getattr(node, value) for node in scene.nodes]

    return {
        "token_ids": each("token_id"),
        "parents": each("parent"),
        "depths": each("depth"),
        "rows": rows_of(scene.children()),
        "ranks": each("rank"),
        "states": each("state"),
        "probabilities": [_rounded(node.probability) for node in scene.nodes],
        "path_probabilities": [_rounded(node.path_probability) for node in scene.nodes],
    }


def _rounded(probability: float | None) -> float | None:
    return None if probability is None else float(f"{probability:.{_DIGITS}g}")


def _token_names(scenes: Iterable[Scene], names: TokenNames) -> dict[str, str]:
    nodes: Iterable[Node] = (node for scene in scenes for node in scene.nodes)
    return {str(i): visible(names.text(i)) for i in sorted({node.token_id for node in nodes})}


def _pieces(scenes: Iterable[Scene], tokenizer: PreTrainedTokenizerBase) -> list[list[str]]:
    """What each token adds to the text; a character comes with the last of its tokens."""
    stream = TextStream(tokenizer)
    pieces: list[list[str]] = []
    for scene in scenes:
        pieces.append([])
        for token in scene.token_ids:
            stream.push(token)
            pieces[-1].append(stream.take())
    stream.finish()
    pieces[-1][-1] += stream.take()
    return pieces


def _summary(
    generation: Generation, config: DecodeConfig, target_name: str
) -> list[tuple[str, str]]:
    """What stands at the top: values with what they are."""
    tau = generation.acceptance_length
    drafted = [r.tree.num_nodes for r in generation.rounds if r.tree is not None]
    nodes = "-" if not drafted else f"{sum(drafted) / len(drafted):.1f}"
    facts = [
        ("-" if math.isnan(tau) else f"{tau:.2f}", "tokens/round (tau)"),
        (str(generation.num_rounds), "rounds"),
        (str(generation.num_tokens), "tokens"),
        (nodes, "nodes/round"),
        (config.method, f"budget {config.budget}" if config.method != "ar" else ""),
        (f"{config.temperature:g}", "temperature"),
    ]
    if config.temperature > 0:
        facts.append((str(config.seed), "seed"))
    return [*facts, (target_name, "")]
