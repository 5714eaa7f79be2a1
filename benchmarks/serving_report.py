"""The page of `serving.py`: tables of its runs, and the targets of issue 8 beside them.

All spreads are median (lowest to highest) over repeats, and ratios are taken within a repeat.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from speed import table

NONE, CHAIN = "none", "chain"
AT_BATCH_1, AT_BATCH_8 = 1.15, 0.97
Run = Mapping[str, Any]


def markdown(result: Mapping[str, Any]) -> str:
    runs, arms = result["runs"], list(result["arms"])
    lines = ["# Draft trees in vLLM beside vLLM's own ways", ""]
    lines += [texts_line(result["texts"]), ""]
    lines += ["Median (lowest to highest) over repeats. Prefill counts in tokens/s, not in tau."]
    for batch in batches(runs):
        lines += ["", f"## Batch {batch}", "", *batch_table(runs, arms, batch)]
    if 1 in batches(runs):
        lines += ["", "## Batch 1, by suite: tokens/s", ""]
        lines += suite_table(runs, arms, result["suites"])
    lines += ["", "## The targets of issue 8", "", *targets(result)]
    if "context" in result:
        lines += ["", *context_report(result["context"])]
    lines += ["", "## Arms", ""]
    lines += [f"- {name}: {arm['says']}" for name, arm in result["arms"].items()]
    lines += ["", "## Card", "", *(f"- {key}: {value}" for key, value in result["card"].items())]
    return "\n".join(lines) + "\n"


def texts_line(texts: Mapping[str, Any]) -> str:
    said = f"{texts['num_equal']} of {texts['num']} texts are those of `{texts['base']}`."
    if (found := texts["first_difference"]) is None:
        return said
    return (
        f"{said} The first that is not: {found['arm']} at batch {found['batch']}, prompt "
        f"{found['prompt']}, token {found['index']}, {found['got']} instead of {found['expected']}."
    )


def batches(runs: Sequence[Run]) -> list[int]:
    return sorted({run["batch"] for run in runs})


def of(runs: Sequence[Run], batch: int, arm: str) -> list[Run]:
    """An arm's runs at a batch size, by repeat."""
    found = [run for run in runs if run["batch"] == batch and run["arm"] == arm]
    return sorted(found, key=lambda run: run["repeat"])


def speed(run: Run) -> float:
    """Tokens/s."""
    return sum(run["num_tokens"]) / run["seconds"]


def ratios(runs: Sequence[Run], batch: int, arm: str, bases: Sequence[str]) -> list[float]:
    """Of each repeat, an arm's speed over that of the fastest of others; none without others."""
    per_base = [[speed(run) for run in of(runs, batch, base)] for base in bases]
    if not all(per_base) or not bases:
        return []
    best = [max(values) for values in zip(*per_base, strict=True)]
    return [speed(run) / base for run, base in zip(of(runs, batch, arm), best, strict=True)]


def batch_table(runs: Sequence[Run], arms: Sequence[str], batch: int) -> list[str]:
    head = ["arm", "tokens/s", "over none", "over chain", "decoding only", "tau", "nodes per draft"]
    head += ["ms per decoding step", "at once"]
    return table(head, [batch_row(runs, arm, batch) for arm in arms])


def batch_row(runs: Sequence[Run], arm: str, batch: int) -> list[str]:
    own = of(runs, batch, arm)
    return [
        arm,
        spread([speed(run) for run in own], 1),
        spread(ratios(runs, batch, arm, [NONE])),
        spread(ratios(runs, batch, arm, [CHAIN])),
        spread([run["decode_tokens"] / run["decode_s"] for run in own if run["decode_s"]], 1),
        spread([run["round_tokens"] / run["num_rounds"] for run in own if run["num_rounds"]]),
        spread([run["num_draft_tokens"] / run["num_drafts"] for run in own if run["num_drafts"]]),
        spread(
            [1e3 * run["decode_s"] / run["decode_steps"] for run in own if run["decode_steps"]], 1
        ),
        f"{statistics.median(run['in_flight'] for run in own):.1f}",
    ]


def suite_table(runs: Sequence[Run], arms: Sequence[str], suites: Sequence[str]) -> list[str]:
    """At batch 1 prompts come one after another, so each has a time of its own."""

    def suite_speed(run: Run, suite: str) -> float:
        places = [i for i, name in enumerate(suites) if name == suite]
        return sum(run["num_tokens"][i] for i in places) / sum(run["request_s"][i] for i in places)

    body = [
        [suite, *(spread([suite_speed(run, suite) for run in of(runs, 1, arm)], 1) for arm in arms)]
        for suite in dict.fromkeys(suites)
    ]
    return table(["suite", *arms], body)


def targets(result: Mapping[str, Any]) -> list[str]:
    """What was asked of trees, and what each arm of trees reaches."""
    runs, there = result["runs"], result["arms"]
    trees = [name for name, arm in there.items() if is_tree(arm)]
    lines = []
    for arm in trees:
        if found := ratios(runs, 1, arm, [CHAIN]):
            met = statistics.median(found) >= AT_BATCH_1
            wanted = asked(f"at least {AT_BATCH_1}", met)
            lines.append(f"- batch 1, {arm} over chain: {spread(found)}, {wanted}")
    for arm in trees:
        if found := ratios(runs, 8, arm, [NONE, CHAIN]):
            wanted = asked(f"at least {AT_BATCH_8} in every repeat", min(found) >= AT_BATCH_8)
            base = "the faster of chain and none"
            lines.append(f"- batch 8, {arm} over {base}: {spread(found)}, {wanted}")
    return lines or ["- batch 1 or 8, none and chain were not all measured"]


def is_tree(arm: Mapping[str, Any]) -> bool:
    return arm["options"] is not None and arm["options"].get("method", "ddtree") == "ddtree"


def asked(wanted: str, met: bool) -> str:
    return f"{wanted} asked for: {'met' if met else 'missed'}"


def context_report(found: Mapping[str, Any]) -> list[str]:
    steps = found["steps"]
    contexts = sorted({step["context"] for step in steps})
    few, many = f"{contexts[0]:,}", f"{contexts[-1]:,}"
    lines = [f"## A context of {many} tokens against {few}", ""]
    lines += [
        "Milliseconds per step of one request: draft, forward, walk, all that the engine does."
    ]
    lines += ["", *step_table(steps, contexts, [f"at {few}", f"at {many}"])]
    attention = found["attention"]
    lines += ["", f"Attention alone, {attention['layers']} layers, milliseconds, median:", ""]
    body = []
    for case in attention["cases"]:
        causal, tree = (statistics.median(case[name]) for name in ("causal", "tree"))
        numbers = [f"{causal:.2f}", f"{tree:.2f}", f"{tree / causal:.2f}"]
        body.append([f"{case['context']:,}", str(case["rows"]), *numbers])
    head = ["context", "rows", "causal, vLLM's", "tree, ours", "tree over causal"]
    return [*lines, *table(head, body)]


def step_table(
    steps: Sequence[Mapping[str, Any]], contexts: Sequence[int], heads: Sequence[str]
) -> list[str]:
    body = []
    for arm in sorted({step["arm"] for step in steps}):
        own = [step for step in steps if step["arm"] == arm]
        few, many = (
            [1e3 * statistics.median(step["seconds"]) for step in own if step["context"] == context]
            for context in (contexts[0], contexts[-1])
        )
        growth = [b / a for a, b in zip(few, many, strict=True)]
        rows = statistics.median(step["rows"] for step in own)
        body.append([arm, f"{rows:.1f}", spread(few, 1), spread(many, 1), spread(growth)])
    return table(["arm", "rows", *heads, "times"], body)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median (lowest to highest).

    >>> spread([3.0, 1.0, 2.0], 1)
    '2.0 (1.0 to 3.0)'
    """
    if not values:
        return "-"
    low, median, high = min(values), statistics.median(values), max(values)
    return f"{median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
