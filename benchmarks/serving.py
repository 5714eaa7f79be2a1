"""Draft trees in vLLM beside vLLM's own ways: tokens/s at some batch sizes, and a long context.

    .serving/bin/python benchmarks/serving.py [--arms none chain tree-16 auto auto-no-lookup]
        [--batch-sizes 1 4 8] [--limit 3] [--max-new-tokens 64] [--repeats 3] [--threads 2]
        [--compiled] [--minutes 19] [--long-context 4000] [--out benchmarks/results]

Runs where vLLM is (`make serving-env`). Every arm is an engine in a process of its own that stays
alive; they take turns in random order, over and over, so that a drift of the machine hits all
alike, and each has all threads when it is its turn (`serving_engine.py`). Greedy, float32, the
embedded default. A run serves the same prompts in the same order, so many at once: when one is
done the next comes. Prefill counts, and so does the end of a run, when fewer are left; nothing is
cached from one run to the next. All arms must say the same tokens; the first difference is said.

The second part times steps of vLLM's chain and of trees with as many rows behind a long and a short
prompt, and attention alone, of a tree and of causal rows (`serving_attention.py`).

Writes serving.json and serving.md (`serving_report.py`). Under twenty minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from serving_engine import Arm, Engine, EngineEndedError, Setup, engines
from serving_report import markdown
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ddtree.bench.workloads import PACKAGED_SUITES, Suite, read_suites
from ddtree.errors import UserError
from ddtree.journal import write_whole
from ddtree.models import zoo
from ddtree.models.loading import silence_transformers
from ddtree.provenance import origin
from ddtree.serving.compatibility import check_versions

MODEL = "smollm2-135m"
DEPTHS = 7  # of its drafter
CHAIN = "chain"
LONG_TREE = "tree-7"
ARMS: Mapping[str, Arm] = {
    "none": Arm(says="vLLM, no speculation"),
    CHAIN: Arm(says="vLLM's own dflash, 7 draft tokens", num_draft_tokens=DEPTHS),
    "our-chain": Arm(
        says="chains of 7 through our worker",
        num_draft_tokens=DEPTHS,
        options={"method": "dflash", "budget": DEPTHS, "lookup": False},
    ),
    LONG_TREE: Arm(
        says="trees of 7 nodes, no lookup: as many rows as the chain",
        num_draft_tokens=DEPTHS,
        options={"budget": DEPTHS, "lookup": False},
    ),
    "tree-8": Arm(says="trees of 8 nodes", num_draft_tokens=8, options={"budget": 8}),
    "tree-16": Arm(says="trees of 16 nodes", num_draft_tokens=16, options={"budget": 16}),
    "auto": Arm(says="trees of up to 16 nodes, the default", num_draft_tokens=16, options={}),
    "auto-no-lookup": Arm(
        says="the default without lookup", num_draft_tokens=16, options={"lookup": False}
    ),
}
DEFAULT_ARMS = ("none", CHAIN, "tree-16", "auto", "auto-no-lookup")
# Warm-up: of each suite the last prompts, of which a batch size takes as many as itself.
WARM_UP_PER_SUITE = 4
MIN_WARM_UP = 4
SHORT_CONTEXT = 200
LONG_STEPS = 32
ATTENTION_ROWS = (8, 17)
ATTENTION_REPEATS = 15
# Of the minutes, what is kept for the second part.
LONG_CONTEXT_S = 180.0
# Tokens that drafts may stand on beyond a request's own.
ROOM = 64


@dataclass(frozen=True)
class Workload:
    """Prompts as token ids.

    Args:
        prompts: those that are measured.
        suites: of each, its suite.
        warm_up: others.
        text: a long one, made of all prompts.
    """

    prompts: list[list[int]]
    suites: list[str]
    warm_up: list[list[int]]
    text: list[int]


def main() -> None:
    began = time.perf_counter()
    options = parsed()
    silence_transformers()
    try:
        vllm_version = check_versions()
        target, drafter = zoo.target_folder(MODEL, say=say), zoo.drafter_folder(MODEL)
        suites = read_suites(PACKAGED_SUITES)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    torch.set_num_threads(options.threads)  # for the card: this process computes nothing
    work = workload(suites, AutoTokenizer.from_pretrained(target), options.limit)
    result: dict[str, Any] = {
        "card": card(options, vllm_version),
        "arms": {name: asdict(ARMS[name]) for name in options.arms},
        "suites": work.suites,
    }
    end_s = began + 60 * options.minutes - (LONG_CONTEXT_S if options.long_context else 0)
    folders = {"target": str(target), "drafter": str(drafter), "compiled": options.compiled}
    try:
        with started(work, folders, options) as running:
            result |= throughput(running, work, options, end_s)
            threads = {str(engine.facts["threads"]) for engine in running.values()}
            result["card"]["threads of an engine"] = ", ".join(sorted(threads))
        write(result, options.out)
        if options.long_context:
            result["context"] = long_context(work, folders, options)
            write(result, options.out)
    except EngineEndedError as error:
        sys.exit(str(error))
    print(markdown(result))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(DEFAULT_ARMS))
    parser.add_argument("--batch-sizes", nargs="+", type=positive, default=[1, 4, 8])
    parser.add_argument("--limit", type=positive, default=3, help="prompts per suite")
    parser.add_argument("--max-new-tokens", type=positive, default=64)
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--threads", type=positive, default=os.cpu_count(), help="of an engine")
    parser.add_argument("--compiled", action="store_true", help="let vLLM compile the model")
    parser.add_argument("--minutes", type=float, default=19, help="fewer repeats where it is slow")
    parser.add_argument("--long-context", type=int, default=4000, help="in tokens; 0: no such part")
    parser.add_argument("--seed", type=int, default=0, help="of the order of arms")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    if options.long_context and options.long_context <= SHORT_CONTEXT:
        parser.error(f"--long-context: expected 0 or more than {SHORT_CONTEXT} tokens")
    return options


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number >= 1, got {text}")
    return value


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def card(options: argparse.Namespace, vllm_version: str) -> dict[str, Any]:
    """What a reader needs to judge or repeat the numbers."""
    facts = origin()
    return {
        **facts,
        "versions": {**facts["versions"], "vllm": vllm_version},
        "models": f"{MODEL} and its drafter, float32",
        "decoding": f"greedy, at most {options.max_new_tokens} new tokens",
        "prompts": f"the first {options.limit} of each suite, first turns, chat template",
        "repeats": f"{options.repeats}, or as many as {options.minutes:g} minutes allow",
        "seed": options.seed,
        "engine": "compiled by vLLM" if options.compiled else "eager",
        "load before": f"{os.getloadavg()[0]:.2f}",
    }


def workload(suites: Sequence[Suite], tokenizer: PreTrainedTokenizerBase, limit: int) -> Workload:
    """The first prompts of every suite, one of each in turns; the last ones for the warm-up."""

    def encoded(text: str) -> list[int]:
        chat = [{"role": "user", "content": text}]
        said = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(said, add_special_tokens=False)["input_ids"])

    texts = {suite.name: [prompt.turns[0] for prompt in suite.prompts] for suite in suites}
    measured = [
        (name, text) for i in range(limit) for name in texts for text in texts[name][i : i + 1]
    ]
    warm_up = [found[-1 - i] for i in range(WARM_UP_PER_SUITE) for found in texts.values()]
    everything = "\n\n".join(text for found in texts.values() for text in found)
    return Workload(
        prompts=[encoded(text) for _, text in measured],
        suites=[name for name, _ in measured],
        warm_up=[encoded(text) for text in warm_up],
        text=list(tokenizer(everything, add_special_tokens=False)["input_ids"]),
    )


def started(
    work: Workload, folders: Mapping[str, Any], options: argparse.Namespace
) -> AbstractContextManager[dict[str, Engine]]:
    """The engines of the first part."""
    longest = max(map(len, [*work.prompts, *work.warm_up]))
    setup = Setup(
        **folders,
        max_model_len=longest + options.max_new_tokens + ROOM,
        max_num_seqs=max(options.batch_sizes),
    )
    arms = {name: ARMS[name] for name in options.arms}
    return engines(arms, setup, num_threads=options.threads, say=say)


def throughput(
    running: Mapping[str, Engine], work: Workload, options: argparse.Namespace, end_s: float
) -> dict[str, Any]:
    """The first part: runs of all arms, and whether their texts are the same.

    Args:
        end_s: on `time.perf_counter`; a repeat that would go beyond is left out, but not the first.
    """
    warm_up(running, work, options)
    rng = random.Random(options.seed)
    runs: list[dict[str, Any]] = []
    texts, longest_s = [], 0.0
    for repeat in range(options.repeats):
        began = time.perf_counter()
        if repeat and began + longest_s > end_s:
            say(f"{repeat} of {options.repeats} repeats: no time for more (--minutes)")
            break
        for batch in options.batch_sizes:
            for name in rng.sample(options.arms, len(options.arms)):
                run = one_run(running[name], work, batch, options.max_new_tokens)
                place = {"repeat": repeat, "batch": batch, "arm": name}
                texts.append({**place, "token_ids": run.pop("token_ids")})
                runs.append({**place, **run})
                say(progress(runs[-1]))
        longest_s = max(longest_s, time.perf_counter() - began)
    return {"runs": runs, "texts": compared(texts, options.arms[0])}


def warm_up(running: Mapping[str, Engine], work: Workload, options: argparse.Namespace) -> None:
    for name, engine in running.items():
        for batch in options.batch_sizes:
            prompts = work.warm_up[: max(MIN_WARM_UP, batch)]
            engine.ask(
                "serve",
                prompts=prompts,
                concurrency=batch,
                max_new_tokens=options.max_new_tokens,
            )
        say(f"engine {name}: warm")


def one_run(engine: Engine, work: Workload, batch: int, max_new_tokens: int) -> dict[str, Any]:
    """Serve all prompts once; see `serving_engine.Served`."""
    run = engine.ask(
        "serve", prompts=work.prompts, concurrency=batch, max_new_tokens=max_new_tokens
    )
    return {**run, "num_tokens": [len(token_ids) for token_ids in run["token_ids"]]}


def progress(run: Mapping[str, Any]) -> str:
    speed = sum(run["num_tokens"]) / run["seconds"]
    return (
        f"repeat {run['repeat'] + 1}, batch {run['batch']}, {run['arm']}: {speed:.1f} tokens/s "
        f"({run['seconds']:.1f} s)"
    )


def compared(texts: Sequence[Mapping[str, Any]], base: str) -> dict[str, Any]:
    """How many texts are those of an arm's first run, and the first that is not.

    Args:
        texts: {"repeat", "batch", "arm", "token_ids"}, in the order of the runs.
        base: the arm.
    """
    reference = next(text for text in texts if text["arm"] == base)
    num_equal, first = 0, None
    for text in texts:
        both = zip(reference["token_ids"], text["token_ids"], strict=True)
        for prompt, (expected, got) in enumerate(both):
            index = first_difference(expected, got)
            if index is None:
                num_equal += 1
            elif first is None:
                place = {key: text[key] for key in ("arm", "batch", "repeat")}
                tokens = {"expected": expected[index : index + 1], "got": got[index : index + 1]}
                first = {**place, "prompt": prompt, "index": index, **tokens}
    num_texts = len(texts) * len(reference["token_ids"])
    return {"base": base, "num": num_texts, "num_equal": num_equal, "first_difference": first}


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """Where two texts part; None where they are the same.

    >>> first_difference([1, 2, 3], [1, 2]), first_difference([1], [1])
    (2, None)
    """
    if list(expected) == list(got):
        return None
    both = zip(expected, got, strict=False)
    return next((i for i, (a, b) in enumerate(both) if a != b), min(len(expected), len(got)))


def long_context(
    work: Workload, folders: Mapping[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    """The second part: seconds per step behind a short and a long prompt, and attention alone."""
    contexts = (SHORT_CONTEXT, options.long_context)
    room = (LONG_STEPS + 2) * (DEPTHS + 1) + ROOM
    setup = Setup(**folders, max_model_len=options.long_context + room, max_num_seqs=1)
    arms = {name: ARMS[name] for name in (CHAIN, LONG_TREE)}
    rng = random.Random(options.seed)
    steps = []
    with engines(arms, setup, num_threads=options.threads, say=say) as running:
        for repeat in range(options.repeats):
            for context in contexts:
                for name in rng.sample(list(running), len(running)):
                    found = running[name].ask(
                        "step_seconds", prompt=work.text[:context], num_steps=LONG_STEPS
                    )
                    steps.append({"arm": name, "context": context, "repeat": repeat, **found})
                    say(f"repeat {repeat + 1}, context {context}, {name}: done")
        attention = running[LONG_TREE].ask(
            "attention_ms", contexts=contexts, rows=ATTENTION_ROWS, repeats=ATTENTION_REPEATS
        )
    return {"steps": steps, "attention": attention}


def write(result: Mapping[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "serving.json", json.dumps(result, indent=1) + "\n")
    write_whole(folder / "serving.md", markdown(result))


if __name__ == "__main__":
    main()
