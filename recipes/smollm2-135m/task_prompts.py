"""Programming tasks composed of small operations, in HumanEval's and in MBPP's form.

A task filters a collection, maps what is left and sums it up. Its description, its name and a
reference solution are composed together, so that every example is what really comes out.
requests.txt has further requests without examples.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docstring_prompts import TEMPLATE as STUB_TEMPLATE
from operations import SAME, Domain, Function, domains


@dataclass(frozen=True)
class Task:
    """A task with its reference solution."""

    name: str
    domain: Domain
    phrase: str
    steps: tuple[str, ...]
    solve: Function


def _compose(rng: random.Random, domain: Domain) -> Task:
    first, second, fold = map(rng.choice, (domain.filters, domain.maps, domain.folds))
    if domain.argument != "matrix":
        shape = rng.choice(((first, SAME), (first, second), (first, second), (SAME, second)))
        first, second = shape
    order = (fold, second, first)
    phrase = "{}"
    for operation in order:
        phrase = phrase.format(operation.phrase)
    name = "_".join(operation.slug for operation in order if operation.slug)
    steps = tuple(operation.step for operation in reversed(order) if operation.step)
    return Task(name, domain, phrase, steps, lambda x: fold.apply(second.apply(first.apply(x))))


def examples(rng: random.Random, task: Task, count: int) -> list[tuple[Any, Any]]:
    """Return `count` inputs with their results, or none where the task does not tell much."""
    found: list[tuple[Any, Any]] = []
    for _ in range(8 * count):
        value = task.domain.draw(rng)
        try:
            result = task.solve(value)
        except (ValueError, IndexError, ZeroDivisionError):
            continue  # nothing was left after the filter
        if result not in ("", [], {}) and all(result != other for _, other in found):
            found.append((value, result))
        if len(found) == count:
            return found
    return []


def _sentence(steps: Sequence[str]) -> str:
    *before, last = steps
    text = f"{', '.join(before)} and then {last}." if before else f"{last}."
    return text[0].upper() + text[1:]


def _description(rng: random.Random, task: Task) -> str:
    argument, noun = task.domain.argument, task.domain.noun
    direct, sentence = task.phrase.format(argument), _sentence(task.steps)
    return rng.choice(
        (
            f"Return {direct}.",
            f"Given a {noun}, return\n    {task.phrase.format(argument)}.",
            f"You are given a {noun} called {argument}.\n    {sentence}",
            f"{sentence}\n    The argument {argument} is a {noun}.",
            f"The function takes a {noun} and returns\n    {direct}.",
            f"For a {noun} {argument}:\n    {sentence}",
        )
    )


def stub_prompt(rng: random.Random, task: Task) -> str | None:
    """Return the task as a signature with a docstring and examples, or None."""
    shown = examples(rng, task, rng.choice((1, 2, 2, 3)))
    if not shown:
        return None
    argument, name = task.domain.argument, task.name
    annotation = f": {task.domain.annotation}" if rng.random() < 0.4 else ""
    style = rng.randrange(5)
    if style < 3:
        lines = [f">>> {name}({value!r})\n    {result!r}" for value, result in shown]
    elif style == 3:
        pairs = (f"For {argument} = {v!r} the result should be {r!r}" for v, r in shown)
        lines = ["", "Examples:", *pairs]
    else:
        lines = ["", "Example:", *(f"{name}({v!r}) == {r!r}" for v, r in shown)]
    body = "\n    ".join([_description(rng, task), *lines])
    quotes = rng.choice(('"""', '"""', '"""', "'''"))
    gap = rng.choice((" ", "", "\n    "))
    stub = f"def {name}({argument}{annotation}):\n    {quotes}{gap}{body}\n    {quotes}\n"
    return STUB_TEMPLATE.format(stub=stub.replace("\n    \n", "\n\n"))


def request_prompt(rng: random.Random, task: Task, *, tests: bool) -> str | None:
    """Return the task as a one-line request, with three assertions if `tests`, or None."""
    shown = examples(rng, task, 3)
    if not shown:
        return None
    opening = rng.choice(("a function", "a function", "a python function"))
    noun = task.domain.noun
    if rng.random() < 0.25:
        request = f"Write {opening} that takes a {noun}: {', '.join(task.steps)}."
    else:
        whole = rng.choice((f"a given {noun}", f"the given {noun}", f"a {noun}"))
        verb = rng.choice(("find", "return", "compute", "get"))
        request = f"Write {opening} to {verb} {task.phrase.format(whole)}."
    if not tests:
        return request
    checks = (f"assert {task.name}({value!r}) == {result!r}" for value, result in shown)
    return "\n".join((request, "Your code should pass these tests:", *checks))


def _named_requests() -> list[str]:
    path = Path(__file__).with_name("requests.txt")
    return path.read_text(encoding="utf-8").strip().split("\n")


def task_prompts(rng: random.Random, stubs: int, requests: int) -> tuple[list[str], list[str]]:
    """Return HumanEval-like and MBPP-like prompts; no task occurs in both, nor twice."""
    every = domains()
    seen: set[tuple[str, str]] = set()
    done: tuple[list[str], list[str]] = ([], _named_requests())
    num_named = len(done[1])
    while len(done[0]) < stubs or len(done[1]) < requests:
        task = _compose(rng, rng.choices(every, [domain.weight for domain in every])[0])
        if (task.domain.argument, task.name) in seen:
            continue
        if len(done[0]) < stubs and (len(done[1]) >= requests or rng.random() < 0.5):
            kind, prompt = 0, stub_prompt(rng, task)
        else:
            tests = len(done[1]) - num_named < requests // 2
            kind, prompt = 1, request_prompt(rng, task, tests=tests)
        if prompt is not None:
            seen.add((task.domain.argument, task.name))
            done[kind].append(prompt)
    return done
