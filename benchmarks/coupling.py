"""What coupled drafting gives: tokens per round and per second, and hits by depth.

    python benchmarks/coupling.py [--per-suite 5] [--tokens 48] [--temperatures 0,0.6,1]
        [--top-p 1,0.95] [--budgets chain,16,auto] [--out benchmarks/results/coupling]

Every prompt is run by all arms of a rule, one after another in random order, so that a drift of the
machine hits all alike; they say the same text, or the run ends. The trees are the drafter's alone,
without lookup. Budget "auto" and the weights learn from the rounds, plain and coupled apart.
Writes OUT.json and OUT.md; OUT.unfinished.json is kept after every prompt: a run that was stopped
goes on from there with the same command (--per-suite may differ), and a finished one leaves none.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch

import ddtree
from ddtree.bench.statistics import Bootstrap, Estimate, Stratum, ratio
from ddtree.config import DecodeConfig
from ddtree.journal import write_whole
from ddtree.models.loading import silence_transformers
from ddtree.overhear import OverheardDrafter, propose_along
from ddtree.prefill import prefill
from ddtree.prompt import encode
from ddtree.provenance import origin
from ddtree.sampling.coupling import Coupling
from ddtree.sampling.noise import Noise
from ddtree.types import Generation

PROMPTS = Path(ddtree.__file__).parent / "assets" / "prompts"
INTERVALS = Bootstrap()


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How the target decides."""

    temperature: float
    top_p: float

    @property
    def name(self) -> str:
        """As the tables call it."""
        if self.temperature == 0:
            return "T = 0"
        cut = "" if self.top_p == 1 else f", top-p {self.top_p:g}"
        return f"T = {self.temperature:g}{cut}"


@dataclass(frozen=True, kw_only=True)
class Count:
    """One arm on one prompt.

    Args:
        budget: "ar", "chain", "auto", or the nodes of the tree.
        tokens: delivered by rounds; the prefill's is not among them.
        rounds: verify forwards.
        seconds: of the rounds.
        accepted: entry d counts the rounds that accepted d nodes.
    """

    suite: str
    index: int
    rule: str
    budget: str
    coupled: bool
    tokens: int
    rounds: int
    seconds: float
    accepted: list[int]


@dataclass(frozen=True, kw_only=True)
class Hits:
    """How often the drafter's first token was the target's, where it was at all depths before.

    Every token of the text is taken as a root once.
    """

    suite: str
    index: int
    rule: str
    coupled: bool
    hits: list[int]
    places: list[int]


@dataclass(frozen=True)
class Found:
    """All that was measured, by prompt and rule."""

    counts: list[Count]
    hits: list[Hits]

    def has(self, suite: str, index: int, rule: Rule) -> bool:
        """Whether this prompt was run by this rule."""
        place = (suite, index, rule.name)
        return any((c.suite, c.index, c.rule) == place for c in self.counts)

    def as_json(self) -> dict[str, object]:
        """As it is kept."""
        return {"counts": [asdict(c) for c in self.counts], "hits": [asdict(h) for h in self.hits]}


def prompts(per_suite: int) -> Iterator[tuple[str, int, str]]:
    """The first of each suite, then the second of each: a run cut short has seen all suites."""
    lines = {p.stem: p.read_text("utf-8").split("\n") for p in sorted(PROMPTS.glob("*.jsonl"))}
    for index in range(per_suite):
        for suite, rows in lines.items():
            yield suite, index, json.loads(rows[index])["turns"][0]


def config_of(rule: Rule, budget: str, coupled: bool, seed: int, tokens: int) -> DecodeConfig:
    return DecodeConfig(
        method={"ar": "ar", "chain": "dflash"}.get(budget, "ddtree"),
        budget=int(budget) if budget.isdecimal() else {"chain": 16, "ar": 0}.get(budget, "auto"),
        temperature=rule.temperature,
        top_p=None if rule.top_p == 1 else rule.top_p,
        seed=seed,
        coupled=coupled,
        lookup=False,
        max_new_tokens=tokens,
    )


def decode(pair: ddtree.Pair, ids: list[int], config: DecodeConfig) -> Generation:
    *_, generation = pair.run(ids, config)
    assert isinstance(generation, Generation)
    return generation


def hits_along(
    pair: ddtree.Pair, features: torch.Tensor, text: list[int], start: int, config: DecodeConfig
) -> tuple[list[int], list[int]]:
    """First-rank hits and places by depth; coupled with the weights as they are by now."""
    perturb_at = None
    if config.coupled:
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
    return hits.tolist(), places.tolist()


def on_prompt(
    pairs: dict[bool, ddtree.Pair],
    ids: list[int],
    rule: Rule,
    place: tuple[str, int],
    budgets: list[str],
    tokens: int,
) -> Found:
    """All arms of a rule on one prompt, and the drafter along the text that they say."""
    suite, index = place
    greedy = rule.temperature == 0
    arms = list(product(budgets, (False,) if greedy else (False, True)))
    # A baseline of speed; the rule hardly changes it.
    arms += [("ar", False)] if greedy else []
    random.Random(f"{suite} {index} {rule.name}").shuffle(arms)
    counts, texts = [], set()
    for budget, coupled in arms:
        done = decode(pairs[coupled], ids, config_of(rule, budget, coupled, index, tokens))
        texts.add(done.token_ids)
        rounds = done.rounds[1:]
        counts.append(
            Count(
                suite=suite,
                index=index,
                rule=rule.name,
                budget=budget,
                coupled=coupled,
                tokens=sum(r.num_tokens for r in rounds),
                rounds=len(rounds),
                seconds=sum(s.total for s in done.round_seconds[1:]),
                accepted=np.bincount([len(r.path) for r in rounds], minlength=1).tolist(),
            )
        )
    assert len(texts) == 1, f"{place}, {rule.name}: the arms differ"
    text = [*ids, *texts.pop()]
    heard = OverheardDrafter(pairs[False].drafter)
    prefill(pairs[False].target, heard, text, len(text) + 8)
    found = []
    for coupled in (False,) if greedy else (False, True):
        config = config_of(rule, "chain", coupled, index, tokens)
        hits, places = hits_along(pairs[coupled], torch.cat(heard.features), text, len(ids), config)
        kind = {"suite": suite, "index": index, "rule": rule.name, "coupled": coupled}
        found.append(Hits(**kind, hits=hits, places=places))
    return Found(counts, found)


def measure(arguments: argparse.Namespace, unfinished: Path) -> Found:
    """Everything, going on from what is there."""
    rules = [
        Rule(temperature=t, top_p=p)
        for t, p in product(arguments.temperatures, arguments.top_p)
        if t > 0 or p == arguments.top_p[0]
    ]
    # Fewer prompts than were wanted are a result too: the same command with a smaller number ends.
    options = {k: v for k, v in vars(arguments).items() if k not in ("out", "per_suite")}
    found = Found([], [])
    if unfinished.exists():
        kept = json.loads(unfinished.read_text("utf-8"))
        if kept["options"] != options:
            sys.exit(
                f"{unfinished} is of other options: {kept['options']}. Delete it, or use them."
            )
        found = Found([Count(**c) for c in kept["counts"]], [Hits(**h) for h in kept["hits"]])
    target = ddtree.load("smollm2-135m")
    pairs = {coupled: ddtree.Pair(target.target, target.drafter) for coupled in (False, True)}
    for pair in pairs.values() if "auto" in arguments.budgets else ():
        pair.measure(lambda message: print(message, file=sys.stderr, flush=True))
    warm = encode("Hello", target.target, raw=False)
    decode(target, warm, config_of(Rule(temperature=1.0, top_p=1.0), "16", True, 0, 16))
    for suite, index, prompt in prompts(arguments.per_suite):
        ids = encode(prompt, target.target, raw=False)
        for rule in rules:
            if found.has(suite, index, rule):
                continue
            more = on_prompt(pairs, ids, rule, (suite, index), arguments.budgets, arguments.tokens)
            found.counts.extend(more.counts)
            found.hits.extend(more.hits)
            kept = {"options": options, **found.as_json()}
            write_whole(unfinished, json.dumps(kept).encode())
        print(f"{suite} {index}", file=sys.stderr, flush=True)
    return found


def shown(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.2f}"
    return f"{estimate.value:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"


def strata(counts: Sequence[Count], columns: tuple[str, str]) -> list[Stratum]:
    """Sums by suite."""
    return [
        Stratum(
            name=suite,
            sums=np.array(
                [[getattr(c, f) for f in columns] for c in counts if c.suite == suite], float
            ),
        )
        for suite in dict.fromkeys(c.suite for c in counts)
    ]


def table_of(found: Found, columns: tuple[str, str]) -> list[str]:
    """One figure, by rule and arm: of every suite, and the mean of the suites."""
    suites = list(dict.fromkeys(c.suite for c in found.counts))
    lines = ["| rule | arm | budget | mean | " + " | ".join(suites) + " |"]
    lines.append("|---|---|---|---|" + "---|" * len(suites))
    for rule, budget, coupled in dict.fromkeys(
        (c.rule, c.budget, c.coupled)
        for c in sorted(found.counts, key=lambda c: (c.rule, c.budget, c.coupled))
    ):
        mine = [c for c in found.counts if (c.rule, c.budget, c.coupled) == (rule, budget, coupled)]
        parts = strata(mine, columns)
        cells = [shown(INTERVALS.estimate(parts, ratio))]
        cells += [shown(INTERVALS.estimate([part], ratio)) for part in parts]
        arm = "coupled" if coupled else "plain"
        lines.append(f"| {rule} | {arm} | {budget} | " + " | ".join(cells) + " |")
    return lines


def over_greedy(found: Found, budgets: Sequence[str]) -> list[str]:
    """tau of each arm over greedy's, and coupled over plain: the mean of the suites' ratios."""
    lines = ["| rule | budget | plain / greedy | coupled / greedy | coupled / plain |"]
    lines.append("|---|---|---|---|---|")

    def paired(one: list[Count], other: list[Count]) -> str:
        sums = []
        for part, base in zip(
            strata(one, ("tokens", "rounds")), strata(other, ("tokens", "rounds")), strict=True
        ):
            sums.append(Stratum(name=part.name, sums=np.hstack([part.sums, base.sums])))
        quotient = lambda s: (s[:, 0] / s[:, 1]) / (s[:, 2] / s[:, 3])  # noqa: E731
        return shown(INTERVALS.estimate(sums, quotient))

    def arm(rule: str, budget: str, coupled: bool) -> list[Count]:
        return [c for c in found.counts if (c.rule, c.budget, c.coupled) == (rule, budget, coupled)]

    for rule in dict.fromkeys(c.rule for c in found.counts if c.rule != "T = 0"):
        for budget in budgets:
            plain, coupled = arm(rule, budget, False), arm(rule, budget, True)
            cells = [paired(coupled, plain)]
            if greedy := arm("T = 0", budget, False):
                cells = [paired(plain, greedy), paired(coupled, greedy), *cells]
            else:
                cells = ["-", "-", *cells]
            lines.append(f"| {rule} | {budget} | " + " | ".join(cells) + " |")
    return lines


def by_depth(found: Found, budgets: Sequence[str]) -> list[str]:
    """How often a depth holds, given that the one before did: along the texts, and in rounds."""
    num_depths = len(found.hits[0].hits)
    lines = ["| rule | arm | what | " + " | ".join(f"{d + 1}" for d in range(num_depths)) + " |"]
    lines.append("|---|---|---|" + "---|" * num_depths)

    def row(rule: str, coupled: bool, what: str, held: np.ndarray, asked: np.ndarray) -> str:
        cells = [f"{h / n:.2f} of {n}" if n else "-" for h, n in zip(held, asked, strict=True)]
        arm = "coupled" if coupled else "plain"
        return f"| {rule} | {arm} | {what} | " + " | ".join(cells) + " |"

    for rule, coupled in dict.fromkeys((h.rule, h.coupled) for h in found.hits):
        mine = [h for h in found.hits if (h.rule, h.coupled) == (rule, coupled)]
        held, asked = (np.sum([getattr(h, f) for h in mine], 0) for f in ("hits", "places"))
        lines.append(row(rule, coupled, "first rank, every token a root", held, asked))
        for budget in budgets:
            counts = np.zeros(num_depths + 1, int)
            for c in found.counts:
                if (c.rule, c.budget, c.coupled) == (rule, budget, coupled):
                    counts[: len(c.accepted)] += c.accepted
            reached = counts[::-1].cumsum()[::-1]  # entry d: rounds that accepted d nodes or more
            lines.append(row(rule, coupled, f"rounds, {budget}", reached[1:], reached[:-1]))
    return lines


def page_of(found: Found, arguments: argparse.Namespace, made: dict[str, object]) -> str:
    return "\n".join(
        [
            "# Coupled drafting",
            "",
            f"    python benchmarks/coupling.py {shlex.join(sys.argv[1:])}",
            "",
            f"Embedded default, {len({(c.suite, c.index) for c in found.counts})} prompts, "
            f"{arguments.tokens} new tokens; the mean of the suites [95% of prompts drawn anew]. "
            "Rounds alone: the prefill is left out of tokens and seconds.",
            "",
            "## Tokens per round",
            "",
            *table_of(found, ("tokens", "rounds")),
            "",
            "## Its ratios",
            "",
            *over_greedy(found, arguments.budgets),
            "",
            "## Tokens per second",
            "",
            *table_of(found, ("tokens", "seconds")),
            "",
            "## By depth",
            "",
            "How often the token of a depth is the target's, given that those before were. In "
            "rounds a depth also fails where the tree does not go so deep.",
            "",
            *by_depth(found, arguments.budgets),
            "",
            *(f"- {name}: {value}" for name, value in made.items()),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    numbers = lambda s: [*map(float, s.split(","))]  # noqa: E731
    parser.add_argument("--per-suite", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--temperatures", type=numbers, default=[0.0, 0.6, 1.0])
    parser.add_argument("--top-p", type=numbers, default=[1.0, 0.95])
    parser.add_argument("--budgets", type=lambda s: s.split(","), default=["chain", "16", "auto"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/coupling"))
    arguments = parser.parse_args()
    silence_transformers()
    torch.set_num_threads(arguments.threads)
    unfinished = arguments.out.with_suffix(".unfinished.json")
    found = measure(arguments, unfinished)
    made = origin()
    page = page_of(found, arguments, made)
    print(page)
    result = {"origin": made, **found.as_json()}
    write_whole(arguments.out.with_suffix(".json"), json.dumps(result, indent=1).encode())
    write_whole(arguments.out.with_suffix(".md"), page.encode())
    unfinished.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
