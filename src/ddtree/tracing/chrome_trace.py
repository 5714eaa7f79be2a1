"""One generation as a trace that chrome://tracing and ui.perfetto.dev open: stages over rounds.

The format is Chrome's trace events as JSON: complete events ("X") with times in microseconds, one
track for the stages and one for the rounds that they belong to.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from ddtree.journal import write_whole
from ddtree.types import Generation, Round, StageSpan

_PROCESS = 1
_ROUNDS, _STAGES = 1, 2  # the tracks, from the top down


def profile_json(generation: Generation, num_prompt_tokens: int) -> dict[str, object]:
    """The trace as a JSON object.

    Args:
        generation: its spans are drawn.
        num_prompt_tokens: T when the first round begins.
    """
    return {
        "traceEvents": [*_names(generation), *_events(generation, num_prompt_tokens)],
        "displayTimeUnit": "ms",
        "otherData": {
            "method": generation.method,
            "num_tokens": generation.num_tokens,
            "num_rounds": generation.num_rounds,
            "finish_reason": generation.finish_reason,
            "elapsed_s": generation.elapsed_s,
        },
    }


def write_profile(path: Path, generation: Generation, num_prompt_tokens: int) -> None:
    """Write it, in the place of an older file.

    Raises:
        CacheWriteError: it cannot be written.
    """
    trace = profile_json(generation, num_prompt_tokens)
    write_whole(path, json.dumps(trace, allow_nan=False, separators=(",", ":")) + "\n")


def _names(generation: Generation) -> Iterator[dict[str, object]]:
    yield _metadata("process_name", None, name=f"ddtree generate, {generation.method}")
    for track, name in ((_ROUNDS, "rounds"), (_STAGES, "stages")):
        yield _metadata("thread_name", track, name=name)
        yield _metadata("thread_sort_index", track, sort_index=track)


def _metadata(what: str, track: int | None, **args: object) -> dict[str, object]:
    on = {} if track is None else {"tid": track}
    return {"ph": "M", "name": what, "pid": _PROCESS, **on, "args": args}


def _events(generation: Generation, num_prompt_tokens: int) -> Iterator[dict[str, object]]:
    by_round: list[list[StageSpan]] = [[] for _ in generation.rounds]
    for span in generation.spans:
        by_round[span.round_index].append(span)
    context = 0
    for index, (done, spans) in enumerate(zip(generation.rounds, by_round, strict=True)):
        last = spans[-1]
        args = {"context_tokens": context, "round": index, **_counts(done)}
        name = _round_name(index, done)
        yield _event(_ROUNDS, name, spans[0].begin_s, last.begin_s + last.seconds, args)
        for span in spans:
            end_s = span.begin_s + span.seconds
            yield _event(_STAGES, span.stage, span.begin_s, end_s, args)
        # The last token delivered is the next root, which is not in the cache yet.
        context += num_prompt_tokens if index == 0 else done.num_tokens


def _event(
    track: int, name: str, begin_s: float, end_s: float, args: Mapping[str, object]
) -> dict[str, object]:
    # Both ends are rounded alike, so that neighbours cannot come to overlap.
    begin_us, end_us = round(1e6 * begin_s, 3), round(1e6 * end_s, 3)
    return {
        "ph": "X",
        "name": name,
        "cat": "stage" if track == _STAGES else "round",
        "ts": begin_us,
        "dur": round(end_us - begin_us, 3),
        "pid": _PROCESS,
        "tid": track,
        "args": args,
    }


def _round_name(index: int, done: Round) -> str:
    tokens = _counted(done.num_tokens, "token")
    if done.tree is None:
        return f"prefill: {tokens}"
    return f"round {index}: {_counted(done.tree.num_nodes, 'node')}, {tokens}"


def _counts(done: Round) -> dict[str, int]:
    return {
        "nodes": 0 if done.tree is None else done.tree.num_nodes,
        "tokens": done.num_tokens,
    }


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
