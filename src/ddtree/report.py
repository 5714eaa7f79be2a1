"""Results for people and programs: the statistics line, the comparison table, the JSON objects."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from ddtree import __version__
from ddtree.comparison import Comparison
from ddtree.pair import Pair
from ddtree.types import Generation, StageSeconds, TokenLogprob

Json = Mapping[str, object]

_ROUND_STAGES = ("draft", "build", "verify", "walk", "commit")


def versions() -> dict[str, str]:
    """Versions that a result depends on."""
    return {
        "ddtree": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": version("transformers"),
    }


def statistics_line(generation: Generation) -> str:
    """One line: tokens, rounds, tau, speed, and where the time went.

    tau is the mean number of tokens per round, bonus token included; the prefill is no round.
    """
    parts = [
        f"{generation.num_tokens} tokens",
        f"{generation.num_rounds} rounds",
        f"tau {_number(generation.acceptance_length)}",
        f"{generation.tokens_per_s:.1f} tokens/s",
        _stage_text(generation.seconds),
        f"ended by {generation.finish_reason}",
    ]
    return " · ".join(parts)


def generation_json(generation: Generation) -> Json:
    """What `ddtree generate --json` prints; seconds are per stage, summed over rounds."""
    tau = generation.acceptance_length
    logprobs = generation.logprobs
    return {
        "text": generation.text,
        "token_ids": list(generation.token_ids),
        "finish_reason": generation.finish_reason,
        "method": generation.method,
        "num_tokens": generation.num_tokens,
        "num_rounds": generation.num_rounds,
        "acceptance_length": None if math.isnan(tau) else tau,
        "acceptance_histogram": list(generation.acceptance_histogram),
        "seconds": {**asdict(generation.seconds), "elapsed": generation.elapsed_s},
        "tokens_per_s": generation.tokens_per_s,
        **({} if logprobs is None else {"logprobs": _logprobs_json(logprobs)}),
        "versions": versions(),
    }


def _logprobs_json(logprobs: Sequence[TokenLogprob]) -> list[Json]:
    return [
        {
            "token_id": token.token_id,
            "logprob": _finite(token.logprob),
            "top": [{"token_id": id_, "logprob": _finite(value)} for id_, value in token.top],
        }
        for token in logprobs
    ]


def _finite(value: float) -> float | None:
    """JSON knows no infinity: a token of probability 0 has none."""
    return value if math.isfinite(value) else None


def comparison_json(comparison: Comparison) -> Json:
    """What `ddtree generate --compare --json` prints."""
    return {
        "agree": comparison.agree,
        # A rule that leaves a single token has an infinite gap, which JSON does not know.
        "divergences": [
            {**asdict(d), "gap": d.gap if math.isfinite(d.gap) else None}
            for d in comparison.divergences
        ],
        "speedup": {g.method: comparison.speedup(g) for g in comparison.generations},
        "generations": [generation_json(g) for g in comparison.generations],
    }


def show_comparison(comparison: Comparison, pair: Pair, console: Console) -> None:
    """The table of `--compare`, and what was found to differ."""
    # Eleven columns must fit into a terminal of 80.
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("method")
    for heading in ("rounds", "tau", "nodes", "tok/s", "speed", *_ROUND_STAGES):
        table.add_column(heading, justify="right")
    for g in comparison.generations:
        table.add_row(
            g.method,
            str(g.num_rounds),
            _number(g.acceptance_length),
            _number(_nodes_per_round(g), digits=1),
            f"{g.tokens_per_s:.1f}",
            f"{comparison.speedup(g):.2f}x",
            *(_number(_ms_per_round(g, stage), digits=1) for stage in _ROUND_STAGES),
        )
    console.print(table)
    baseline = comparison.generations[0]
    console.print(
        f"{baseline.num_tokens} tokens each, prefill included in tok/s; speed is relative to ar; "
        "draft to commit in ms per round.",
        style="dim",
    )
    if comparison.agree:
        console.print("All methods said the same tokens.", style="green")
    for d in comparison.divergences:
        console.print(
            f"{d.method} differs from ar at new token {d.index}: {_token(d.got_id, pair)} instead "
            f"of {_token(d.expected_id, pair)}; the best two scores there are {d.gap:.3g} apart "
            f"({pair.target.dtype_name}).",
            style="yellow",
            markup=False,
        )


def _token(token_id: int | None, pair: Pair) -> str:
    if token_id is None:
        return "the end"
    tokenizer = pair.target.tokenizer
    return f"{token_id}" if tokenizer is None else f"{token_id} {tokenizer.decode([token_id])!r}"


def _stage_text(seconds: StageSeconds) -> str:
    spent = [(name, s) for name, s in asdict(seconds).items() if s > 0]
    return ", ".join(f"{name} {_duration(s)}" for name, s in spent)


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def _nodes_per_round(generation: Generation) -> float:
    nodes = [r.tree.num_nodes for r in generation.rounds if r.tree is not None]
    return sum(nodes) / len(nodes) if nodes else math.nan


def _ms_per_round(generation: Generation, stage: str) -> float:
    if generation.num_rounds == 0:
        return math.nan
    return 1000 * float(getattr(generation.seconds, stage)) / generation.num_rounds


def _number(value: float, digits: int = 2) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"
