"""Write the prompts on which the drafter of SmolLM2-135M-Instruct is trained.

First come the prompts that the shared responses were made from, then own and packaged ones in the
form of the five evaluation suites, mixed so that every part of the file is balanced. Prompts close
to a held-out one are dropped. See README.md for the sources and their licences.
"""

import argparse
import gzip
import json
import random
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from chat_prompts import chat_prompts
from docstring_prompts import docstring_prompts
from math_prompts import math_prompts
from task_prompts import task_prompts

HERE = Path(__file__).resolve().parent
LONGEST = 1200
NGRAM = 5
NEAR = 0.6
FRAMES = (
    r"Return your final response within \boxed{}.",
    r"Please reason step by step, and put your final answer within \boxed{}.",
    "Write a solution to the following problem and make sure that it passes the tests:",
    "```python",
    "Your code should pass these tests:",
    "Write a python function to",
    "Write a function to",
)
Rows = list[tuple[str, str]]  # source and prompt
Ngrams = frozenset[tuple[str, ...]]


def ngrams(prompt: str) -> Ngrams:
    """Return the word 5-grams of a prompt without its template; digits are all alike.

    >>> sorted(ngrams("Write a function to add 12 to all given numbers."))
    [('0', 'to', 'all', 'given', 'numbers'), ('add', '0', 'to', 'all', 'given')]
    """
    for frame in FRAMES:
        prompt = prompt.replace(frame, " ")
    words = re.findall(r"[^\W_]+", re.sub(r"\d+", "0", prompt.lower()))
    width = min(NGRAM, len(words))
    return frozenset(tuple(words[i : i + width]) for i in range(len(words) - width + 1))


@dataclass(frozen=True)
class HeldOut:
    """What training prompts are compared with: 5-grams of every turn, and names of functions."""

    turns: list[Ngrams]
    names: frozenset[str]


def names(prompt: str) -> set[str]:
    """Return the names of the functions that a prompt defines or asks for.

    >>> sorted(names("def one(x): ...; assert two(1) == 2"))
    ['one', 'two']
    """
    return set(re.findall(r"\b(?:def|assert) (\w+)\(", prompt))


def held_out(folder: Path) -> HeldOut:
    """Return what is to be known of the evaluation prompts."""
    turns = [
        turn
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text(encoding="utf-8").split("\n")
        if line
        for turn in json.loads(line)["turns"]
    ]
    grams = [found for found in map(ngrams, turns) if found]
    return HeldOut(grams, frozenset().union(*map(names, turns)))


def is_near(prompt: str, evaluation: HeldOut) -> bool:
    """Return whether the prompt shares a name, or most 5-grams, with an evaluation prompt."""
    if names(prompt) & evaluation.names:
        return True
    own = ngrams(prompt)
    return any(len(own & grams) >= NEAR * len(grams) for grams in evaluation.turns)


def first_rows(responses: Path) -> Rows:
    """Return source and prompt of the responses that exist already."""
    lines = gzip.decompress(responses.read_bytes()).decode("utf-8").split("\n")
    rows = [json.loads(line) for line in lines if line]
    return [(row["source"], row["prompt"]) for row in rows]


def made_rows(seed: int) -> list[Rows]:
    """Return the rows of each source that is generated here, each with a seed of its own."""

    def rng(name: str) -> random.Random:
        return random.Random(f"{seed}/{name}")

    stubs, requests = task_prompts(rng("tasks"), 380, 500)
    groups = {
        "math-kinds": math_prompts(rng("math"), 930),
        **docstring_prompts(rng("docstrings")),
        "composed-stubs": stubs,
        "composed-requests": requests,
        "chat-templates": chat_prompts(rng("chat"), 1230),
    }
    return [[(source, prompt) for prompt in prompts] for source, prompts in groups.items()]


def interleave(groups: list[Rows], rng: random.Random) -> Rows:
    """Shuffle every group and spread it evenly over the whole."""
    placed: list[tuple[float, tuple[str, str]]] = []
    for rows in groups:
        for index, row in enumerate(rng.sample(rows, len(rows))):
            placed.append(((index + rng.random()) / len(rows), row))
    return [row for _, row in sorted(placed)]


def select(rows: Rows, evaluation: HeldOut) -> tuple[Rows, Counter[str]]:
    """Return the rows to keep, and why how many were dropped."""
    kept: Rows = []
    dropped: Counter[str] = Counter()
    seen: set[str] = set()
    for source, prompt in rows:
        if len(prompt) > LONGEST:
            dropped["too long"] += 1
        elif prompt in seen:
            dropped["twice"] += 1
        elif is_near(prompt, evaluation):
            dropped[f"near a held-out prompt, {source}"] += 1
        else:
            seen.add(prompt)
            kept.append((source, prompt))
    return kept, dropped


def write(rows: Rows, out: Path) -> None:
    """Write the rows as JSON lines, gzipped without a time stamp."""
    lines = (json.dumps({"source": s, "prompt": p}, ensure_ascii=False) for s, p in rows)
    data = "".join(f"{line}\n" for line in lines).encode("utf-8")
    part = out.with_suffix(".part")
    part.write_bytes(gzip.compress(data, 9, mtime=0))
    part.replace(out)


def main() -> None:
    """Make the file."""
    shared = HERE.parents[2] / "shared" / "data"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=shared, help="folder of prompts, responses")
    parser.add_argument("--out", type=Path, default=HERE / "prompts.jsonl.gz")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    evaluation = held_out(options.data / "prompts")
    first = first_rows(options.data / "responses" / "smollm2-135m.jsonl.gz")
    made = interleave(made_rows(options.seed), random.Random(options.seed))
    rows, dropped = select(first + made, evaluation)
    assert not any(is_near(prompt, evaluation) for _, prompt in rows)
    write(rows, options.out)
    for source, count in Counter(source for source, _ in rows).items():
        print(f"{count:5}  {source}")
    print(f"{len(rows):5}  in all; dropped: {dict(dropped)}")


if __name__ == "__main__":
    main()
