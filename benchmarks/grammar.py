"""What legal drafting gives: tokens per round of text in a JSON schema, with and without it.

    python benchmarks/grammar.py [--prompts 20] [--tokens 100] [--temperature 0] [--budget 16]
        [--out benchmarks/results/grammar]

Both arms of a prompt say the same text, or the run ends. Everything is counted, nothing is timed:
other work beside it does no harm. Writes OUT.json and OUT.md.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

import ddtree
from ddtree.config import DecodeConfig
from ddtree.journal import write_whole
from ddtree.models.loading import silence_transformers
from ddtree.provenance import origin
from ddtree.types import Generation, Method

RESAMPLES = 2000


def text(longest: int) -> dict[str, object]:
    return {"type": "string", "maxLength": longest}


def number(least: int, most: int) -> dict[str, object]:
    return {"type": "integer", "minimum": least, "maximum": most}


def several(item: dict[str, object], most: int) -> dict[str, object]:
    return {"type": "array", "items": item, "maxItems": most}


def record(**properties: dict[str, object]) -> dict[str, object]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS = {
    "person": record(
        name=text(30), age=number(0, 120), occupation=text(40), hobbies=several(text(20), 4)
    ),
    "recipe": record(
        title=text(40),
        servings=number(1, 12),
        ingredients=several(record(item=text(24), grams=number(1, 2000)), 3),
        vegetarian={"type": "boolean"},
    ),
    "ticket": record(
        summary=text(60),
        priority={"enum": ["low", "medium", "high", "urgent"]},
        component={"enum": ["frontend", "backend", "database"]},
        steps=several(text(40), 3),
    ),
    "weather": record(
        city=text(24),
        temperature_celsius=number(-60, 60),
        conditions={"enum": ["sunny", "cloudy", "rain", "snow"]},
        wind=record(speed_kmh=number(0, 300), direction={"enum": ["N", "E", "S", "W"]}),
    ),
}
PROMPTS = (
    ("person", "Invent a person who lives by the sea."),
    ("recipe", "Write a recipe for pancakes."),
    ("ticket", "The login page shows an error after I type my password."),
    ("weather", "What is the weather in Paris today?"),
    ("person", "Describe Marie Curie as JSON."),
    ("recipe", "A simple soup for four."),
    ("ticket", "Search is very slow since the last update."),
    ("weather", "Tell me about a winter day in Oslo."),
    ("person", "Describe a retired teacher."),
    ("recipe", "How do I make a fruit salad?"),
    ("ticket", "The save button does nothing on mobile."),
    ("weather", "Give a forecast for Cairo in July."),
    ("person", "Make up a young musician from Brazil."),
    ("recipe", "Give me a recipe with rice and beans."),
    ("ticket", "Two users see each other's orders."),
    ("weather", "Describe a stormy evening in Lisbon."),
    ("person", "Give me a fictional detective."),
    ("recipe", "What is a quick dinner with eggs?"),
    ("ticket", "Please report that images are not loading."),
    ("weather", "What is it like in Tokyo in spring?"),
)


@dataclass(frozen=True, kw_only=True)
class Count:
    """One arm on one prompt; tokens are those of rounds, without the prefill's."""

    schema: str
    prompt: str
    arm: str
    legal: bool
    tokens: int
    rounds: int
    nodes: int


def generate(pair: ddtree.Pair, prompt: str, config: DecodeConfig, legal: bool) -> Generation:
    if legal:
        *_, generation = pair.run(prompt, config)
    else:
        with patch("ddtree.pair.legality_of", lambda rule, vocab_size: None):
            *_, generation = pair.run(prompt, config)
    assert isinstance(generation, Generation)
    return generation


def count(pair: ddtree.Pair, arguments: argparse.Namespace) -> list[Count]:
    arms: dict[str, tuple[Method, int]] = {
        "chain": ("dflash", pair.drafter.num_depths),
        f"B = {arguments.budget}": ("ddtree", arguments.budget),
    }
    counts = []
    for index, (schema, prompt) in enumerate(PROMPTS[: arguments.prompts]):
        said = set()
        for arm, (method, budget) in arms.items():
            for legal in (False, True):
                config = DecodeConfig(
                    method=method,
                    budget=budget,
                    json_schema=json.dumps(SCHEMAS[schema]),
                    temperature=arguments.temperature,
                    seed=index,
                    max_new_tokens=arguments.tokens,
                )
                done = generate(pair, prompt, config, legal)
                said.add(done.token_ids)
                nodes = sum(r.tree.num_nodes for r in done.rounds if r.tree is not None)
                tokens = done.num_tokens - done.rounds[0].num_tokens
                counts.append(
                    Count(
                        schema=schema,
                        prompt=prompt,
                        arm=arm,
                        legal=legal,
                        tokens=tokens,
                        rounds=done.num_rounds,
                        nodes=nodes,
                    )
                )
        assert len(said) == 1, f"{prompt}: the arms differ"
        print(f"{index + 1}: {prompt}", file=sys.stderr, flush=True)
    return counts


def tau(counts: Sequence[Count]) -> str:
    """Tokens by rounds, with the middle 95% over prompts drawn anew."""
    table = np.array([(c.tokens, c.rounds) for c in counts], float)
    drawn = np.random.default_rng(0).integers(len(table), size=(RESAMPLES, len(table)))
    tokens, rounds = table[drawn].sum(1).T
    low, high = np.percentile(tokens / rounds, [2.5, 97.5])
    return f"{table[:, 0].sum() / table[:, 1].sum():.2f} [{low:.2f}, {high:.2f}]"


def show(counts: Sequence[Count]) -> str:
    schemas, arms = dict.fromkeys(c.schema for c in counts), dict.fromkeys(c.arm for c in counts)
    lines = ["| arm | drafts | " + " | ".join((*schemas, "all")) + " | nodes per round |"]
    lines.append("|---|---|" + "---|" * (len(schemas) + 2))
    for arm in arms:
        for legal in (False, True):
            mine = [c for c in counts if (c.arm, c.legal) == (arm, legal)]
            cells = [tau([c for c in mine if c.schema == schema]) for schema in schemas]
            nodes = sum(c.nodes for c in mine) / sum(c.rounds for c in mine)
            name = "legal" if legal else "free"
            cells = [arm, name, *cells, tau(mine), f"{nodes:.1f}"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--budget", type=int, default=16)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    silence_transformers()
    torch.set_num_threads(1)
    counts = count(ddtree.load("smollm2-135m"), arguments)
    table = show(counts)
    print(table)
    if arguments.out is not None:
        made = origin()
        found = {"origin": made, "counts": [asdict(c) for c in counts]}
        write_whole(arguments.out.with_suffix(".json"), json.dumps(found, indent=1).encode())
        page = [
            "# Legal drafting in a JSON schema",
            "",
            f"    python benchmarks/grammar.py {shlex.join(sys.argv[1:])}",
            "",
            "Tokens per round [95% of prompts drawn anew], embedded default, "
            f"{arguments.prompts} prompts, T = {arguments.temperature:g}. Free: the drafter does "
            "not know the schema. Legal: no node leaves it, what it forces is drafted.",
            "",
            table,
            "",
            *(f"- {name}: {value}" for name, value in made.items()),
            "",
        ]
        write_whole(arguments.out.with_suffix(".md"), "\n".join(page).encode())


if __name__ == "__main__":
    main()
