"""What coupled drafting gives: tokens per round, and hits by depth. Makes no claim about speed.

    python benchmarks/coupling.py [--per-suite 1] [--tokens 48] [--temperatures 0,0.6,1]
        [--top-p 1] [--budgets chain,16] [--out benchmarks/results/coupling.json]

Arms of one prompt say the same text, or the run ends. Everything is counted, nothing is timed, so
other work beside it does no harm.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

import ddtree
from ddtree.config import DecodeConfig
from ddtree.journal import write_whole
from ddtree.models.loading import silence_transformers
from ddtree.overhear import OverheardDrafter, propose_along
from ddtree.prompt import encode
from ddtree.provenance import origin
from ddtree.sampling.coupling import Coupling
from ddtree.sampling.noise import Noise
from ddtree.types import Generation

PROMPTS = Path(ddtree.__file__).parent / "assets" / "prompts"
RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class Count:
    """One arm on one prompt.

    Args:
        budget: "chain", or the nodes of the tree.
        tokens: delivered by rounds; the prefill's is not among them.
        rounds: verify forwards.
    """

    suite: str
    index: int
    temperature: float
    top_p: float | None
    budget: str
    coupled: bool
    tokens: int
    rounds: int


@dataclass(frozen=True, kw_only=True)
class Hits:
    """How often the drafter's first token was the target's, where it was at all depths before.

    Every token of the text is taken as a root once.
    """

    suite: str
    index: int
    temperature: float
    top_p: float | None
    coupled: bool
    hits: tuple[int, ...]
    places: tuple[int, ...]


def prompts(per_suite: int) -> Iterator[tuple[str, int, str]]:
    for path in sorted(PROMPTS.glob("*.jsonl")):
        for index, line in enumerate(path.read_text("utf-8").split("\n")[:per_suite]):
            yield path.stem, index, json.loads(line)["turns"][0]


def decode(pair: ddtree.Pair, prompt: list[int], config: DecodeConfig) -> Generation:
    *_, generation = pair.run(prompt, config)
    assert isinstance(generation, Generation)
    return generation


def hits_along(
    pair: ddtree.Pair, features: torch.Tensor, text: list[int], start: int, config: DecodeConfig
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """First-rank hits and places by depth; coupled with the weights as they are by now."""
    perturb_at = None
    if config.coupled and config.temperature > 0:
        coupling = Coupling(
            temperature=config.temperature,
            noise=Noise(config.seed),
            weights=pair.coupling_weights,
        )
        perturb_at = lambda position: coupling.perturb(position, pair.target.vocab_size)  # noqa: E731
    proposals = propose_along(
        pair.drafter, features, text, start, num_ranks=1, perturb_at=perturb_at
    )
    hits, places = np.zeros((2, pair.drafter.num_depths), int)
    for proposal in proposals:
        right = np.cumprod(proposal.said(text)[:, 0])
        hits[: len(right)] += right
        places[: len(right)] += np.append(1, right[:-1])
    return tuple(hits.tolist()), tuple(places.tolist())


def arm(budget: str, depths: int, place: dict[str, object], coupled: bool, n: int) -> DecodeConfig:
    return DecodeConfig(
        method="dflash" if budget == "chain" else "ddtree",
        budget=depths if budget == "chain" else int(budget),
        temperature=place["temperature"],
        top_p=place["top_p"],
        seed=place["index"],
        coupled=coupled,
        max_new_tokens=n,
    )


def on_prompt(
    pair: ddtree.Pair, ids: list[int], place: dict[str, object], arguments: argparse.Namespace
) -> tuple[list[Count], list[Hits]]:
    """All arms on one prompt."""
    counts: list[Count] = []
    depths: list[Hits] = []
    texts = set()
    for coupled in (False, True) if place["temperature"] > 0 else (False,):
        for budget in arguments.budgets:
            config = arm(budget, pair.drafter.num_depths, place, coupled, arguments.tokens)
            heard = OverheardDrafter(pair.drafter)
            listening = ddtree.Pair(pair.target, heard)
            listening.__dict__["coupling_weights"] = pair.coupling_weights
            done = decode(listening, ids, config)
            texts.add(done.token_ids)
            tokens = done.num_tokens - done.rounds[0].num_tokens
            counts.append(
                Count(
                    **place, budget=budget, coupled=coupled, tokens=tokens, rounds=done.num_rounds
                )
            )
        text = [*ids, *done.token_ids]
        hits, places = hits_along(pair, torch.cat(heard.features), text, len(ids), config)
        depths.append(Hits(**place, coupled=coupled, hits=hits, places=places))
    assert len(texts) == 1, f"{place}: the arms differ"
    return counts, depths


def measure(arguments: argparse.Namespace) -> tuple[list[Count], list[Hits], ddtree.Pair]:
    pair = ddtree.load("smollm2-135m")
    counts: list[Count] = []
    depths: list[Hits] = []
    for temperature in arguments.temperatures:
        for suite, index, prompt in prompts(arguments.per_suite):
            place = {"suite": suite, "index": index, "temperature": temperature}
            place["top_p"] = arguments.top_p
            ids = encode(prompt, pair.target, raw=False)
            more = on_prompt(pair, ids, place, arguments)
            counts += more[0]
            depths += more[1]
            print(f"T = {temperature:g}  {suite} {index}", file=sys.stderr, flush=True)
    return counts, depths, pair


def tau(counts: Sequence[Count]) -> str:
    """Tokens by rounds, with the middle 95% over prompts drawn anew."""
    table = np.array([(c.tokens, c.rounds) for c in counts], float)
    drawn = np.random.default_rng(0).integers(len(table), size=(RESAMPLES, len(table)))
    tokens, rounds = table[drawn].sum(1).T
    low, high = np.percentile(tokens / rounds, [2.5, 97.5])
    return f"{table[:, 0].sum() / table[:, 1].sum():.2f} [{low:.2f}, {high:.2f}]"


def of_kind(record: Count | Hits, temperature: float, coupled: bool) -> bool:
    return (record.temperature, record.coupled) == (temperature, coupled)


def show(counts: Sequence[Count], depths: Sequence[Hits], budgets: Sequence[str]) -> str:
    lines = ["| T | arm | " + " | ".join(budgets) + " |", "|---|---|" + "---|" * len(budgets)]
    kinds = sorted({(c.temperature, c.coupled) for c in counts})
    for temperature, coupled in kinds:
        cells = [
            tau([c for c in counts if of_kind(c, temperature, coupled) and c.budget == b])
            for b in budgets
        ]
        name = "coupled" if coupled else "plain"
        lines.append(f"| {temperature:g} | {name} | " + " | ".join(cells) + " |")
    num_depths = len(depths[0].hits)
    lines += ["", "| T | arm | " + " | ".join(f"depth {d + 1}" for d in range(num_depths)) + " |"]
    lines.append("|---|---|" + "---|" * num_depths)
    for temperature, coupled in kinds:
        chosen = [d for d in depths if of_kind(d, temperature, coupled)]
        hits, places = (np.sum([getattr(d, f) for d in chosen], 0) for f in ("hits", "places"))
        name = "coupled" if coupled else "plain"
        cells = [f"{h / n:.2f} of {n}" if n else "-" for h, n in zip(hits, places, strict=True)]
        lines.append(f"| {temperature:g} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--per-suite", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument(
        "--temperatures", type=lambda s: [*map(float, s.split(","))], default=[0.0, 0.6, 1.0]
    )
    parser.add_argument("--top-p", type=float, default=None)
    parser.add_argument("--budgets", type=lambda s: s.split(","), default=["chain", "16"])
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    silence_transformers()
    torch.set_num_threads(1)
    counts, depths, pair = measure(arguments)
    print(show(counts, depths, arguments.budgets))
    print("weights (logits, noise) by depth:", pair.coupling_weights.values.round(2).tolist())
    if arguments.out is not None:
        record = {
            "origin": origin(),
            "counts": [asdict(c) for c in counts],
            "hits": [asdict(d) for d in depths],
            "weights": pair.coupling_weights.values.tolist(),
        }
        write_whole(arguments.out, json.dumps(record, indent=1).encode())


if __name__ == "__main__":
    main()
