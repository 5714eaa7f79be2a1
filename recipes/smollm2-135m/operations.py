"""Small operations on lists, strings, pairs and matrices, of which task_prompts.py composes tasks.

Their words are in task_words.toml, under the same names.
"""

import random
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import Any

Function = Callable[[Any], Any]
Actions = dict[str, Function]
VOWELS = "aeiou"
WORDS = (
    "apple", "river", "stone", "cloud", "level", "radar", "maple", "tiger", "Paris", "engine",
    "window", "noon", "civic", "lamp", "orbit", "Berlin", "garden", "silver", "eye", "bottle",
    "island", "yellow", "kayak", "ocean", "Tokyo", "book", "tree", "moon", "area", "idea",
)  # fmt: skip


@dataclass(frozen=True)
class Operation:
    """One step: a part of a name, a noun phrase around `{}`, an instruction, and what it does."""

    slug: str
    phrase: str
    step: str
    apply: Function


@dataclass(frozen=True)
class Domain:
    """A kind of collection with the operations on it."""

    argument: str
    noun: str
    annotation: str
    draw: Callable[[random.Random], Any]
    filters: list[Operation]
    maps: list[Operation]
    folds: list[Operation]
    weight: int


def is_prime(n: int) -> bool:
    """Return whether `n` is prime.

    >>> [n for n in range(12) if is_prime(n)]
    [2, 3, 5, 7, 11]
    """
    return n > 1 and all(n % k for k in range(2, int(n**0.5) + 1))


def digit_sum(n: int) -> int:
    """Return the sum of the decimal digits of `n`, whatever its sign.

    >>> digit_sum(-305)
    8
    """
    return sum(map(int, str(abs(n))))


def _mode(items: Sequence[Any]) -> Any:
    return min(Counter(items).items(), key=lambda pair: (-pair[1], pair[0]))[0]


def _group(words: Sequence[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for word in filter(None, words):
        groups.setdefault(word[0], []).append(word)
    return groups


def _without_vowels(word: str) -> str:
    return "".join(letter for letter in word if letter.lower() not in VOWELS)


# Filters and maps are given for one element; what looks at the whole list stands apart.
NUMBER_TESTS: Actions = {
    "even": lambda n: n % 2 == 0,
    "odd": lambda n: n % 2 == 1,
    "positive": lambda n: n > 0,
    "negative": lambda n: n < 0,
    "prime": is_prime,
    "one_digit": lambda n: abs(n) < 10,
    "two_digit": lambda n: 9 < abs(n) < 100,
    "even_digit_sum": lambda n: digit_sum(n) % 2 == 0,
    "square": lambda n: n >= 0 and round(n**0.5) ** 2 == n,
    "palindromic": lambda n: str(n) == str(n)[::-1],
    "multiple_of_3": lambda n: n % 3 == 0,
    "multiple_of_5": lambda n: n % 5 == 0,
    "multiple_of_7": lambda n: n % 7 == 0,
    "above_5": lambda n: n > 5,
    "above_12": lambda n: n > 12,
    "above_20": lambda n: n > 20,
}
NUMBER_CHOICES: Actions = {
    "even_index": lambda items: items[::2],
    "odd_index": lambda items: items[1::2],
    "unique": lambda items: [n for n in items if items.count(n) == 1],
}
NUMBER_CHANGES: Actions = {
    "squared": lambda n: n * n,
    "cubed": lambda n: n**3,
    "doubled": lambda n: 2 * n,
    "absolute": abs,
    "negated": lambda n: -n,
    "digit_sums": digit_sum,
    "halved": lambda n: n // 2,
    "last_digits": lambda n: abs(n) % 10,
    "mod_4": lambda n: n % 4,
    "incremented": lambda n: n + 1,
    "binary_ones": lambda n: abs(n).bit_count(),
}
NUMBER_SERIES: Actions = {
    "running": lambda items: list(accumulate(items)),
    "gaps": lambda items: [b - a for a, b in pairwise(items)],
}
NUMBER_FOLDS: Actions = {
    "sum": sum,
    "product": prod,
    "max": max,
    "min": min,
    "range": lambda items: max(items) - min(items),
    "count_distinct": lambda items: len(set(items)),
    "most_common": _mode,
    "median": lambda items: sorted(items)[(len(items) - 1) // 2],
    "sorted": sorted,
    "descending": lambda items: sorted(items, reverse=True),
    "distinct": lambda items: list(dict.fromkeys(items)),
    "reversed": lambda items: list(items)[::-1],
    "counts": lambda items: dict(Counter(items)),
    "second_largest": lambda items: sorted(set(items))[-2],
    "mean": lambda items: round(sum(items) / len(items), 2),
}
WORD_TESTS: Actions = {
    "vowel_start": lambda w: w[0].lower() in VOWELS,
    "vowel_end": lambda w: w[-1].lower() in VOWELS,
    "palindrome": lambda w: w == w[::-1],
    "long": lambda w: len(w) > 4,
    "short": lambda w: len(w) <= 5,
    "even_length": lambda w: len(w) % 2 == 0,
    "capitalized": lambda w: w[0].isupper(),
    "with_e": lambda w: "e" in w,
    "without_a": lambda w: "a" not in w.lower(),
    "double_letter": lambda w: any(a == b for a, b in pairwise(w)),
    "distinct_letters": lambda w: len(set(w)) == len(w),
}
WORD_CHANGES: Actions = {
    "upper": str.upper,
    "reversed_words": lambda w: w[::-1],
    "first_letters": lambda w: w[0],
    "last_letters": lambda w: w[-1],
    "without_vowels": _without_vowels,
    "sorted_letters": lambda w: "".join(sorted(w)),
    "swapped": str.swapcase,
    "doubled_letters": lambda w: "".join(2 * letter for letter in w),
}
WORD_FOLDS: Actions = {
    "joined": "-".join,
    "concatenated": "".join,
    "longest": lambda items: max(items, key=len),
    "by_length": lambda items: sorted(items, key=len),
    "alphabetical": sorted,
    "lengths": lambda items: [len(w) for w in items],
    "total_length": lambda items: sum(map(len, items)),
    "length_dict": lambda items: {w: len(w) for w in items},
    "pairs": lambda items: list(enumerate(items)),
    "groups": _group,
}
TEXT_TESTS: Actions = {
    "vowel": lambda c: c.lower() in VOWELS,
    "consonant": lambda c: c.isalpha() and c.lower() not in VOWELS,
    "uppercase": str.isupper,
    "lowercase": str.islower,
    "digit": str.isdigit,
    "letter": str.isalpha,
    "non_space": lambda c: c != " ",
    "non_alnum": lambda c: not c.isalnum(),
}
TEXT_CHANGES: Actions = {"upper": str.upper, "lower": str.lower, "codes": ord}
TEXT_SERIES: Actions = {
    "repeated": lambda items: [c for c in items for _ in range(2)],
    "reversed": lambda items: items[::-1],
    "every_second": lambda items: items[::2],
}
TEXT_FOLDS: Actions = {
    "string": lambda items: "".join(map(str, items)),
    "count": len,
    "count_distinct": lambda items: len(set(items)),
    "most_common": _mode,
    "counts": lambda items: dict(Counter(items)),
    "sorted_distinct": lambda items: sorted(set(items)),
    "dashed": lambda items: "-".join(map(str, items)),
    "first_last": lambda items: (items[0], items[-1]),
}
RECORD_TESTS: Actions = {
    "large": lambda p: p[1] > 15,
    "even": lambda p: p[1] % 2 == 0,
    "long_key": lambda p: len(p[0]) > 4,
    "short_key": lambda p: len(p[0]) < 6,
}
RECORD_CHANGES: Actions = {
    "swapped": lambda p: (p[1], p[0]),
    "upper": lambda p: (p[0].upper(), p[1]),
    "doubled": lambda p: (p[0], 2 * p[1]),
}
RECORD_FOLDS: Actions = {
    "firsts": lambda items: [p[0] for p in items],
    "seconds": lambda items: [p[1] for p in items],
    "sort_second": lambda items: sorted(items, key=lambda p: p[1]),
    "sort_first": lambda items: sorted(items, reverse=True),
    "dictionary": dict,
    "best": lambda items: max(items, key=lambda p: p[1]),
    "flat": lambda items: [part for p in items for part in p],
    "unzipped": lambda items: ([p[0] for p in items], [p[1] for p in items]),
}
MATRIX_MAPS: Actions = {
    "row_sums": lambda m: [sum(row) for row in m],
    "row_maxima": lambda m: [max(row) for row in m],
    "row_minima": lambda m: [min(row) for row in m],
    "column_sums": lambda m: [sum(c) for c in zip(*m, strict=True)],
    "column_maxima": lambda m: [max(c) for c in zip(*m, strict=True)],
    "first_column": lambda m: [row[0] for row in m],
    "last_column": lambda m: [row[-1] for row in m],
    "flat": lambda m: [x for row in m for x in row],
    "diagonal": lambda m: [row[i] for i, row in enumerate(m[: len(m[0])])],
}


def _filter(test: Function) -> Function:
    return lambda items: [x for x in items if test(x)]


def _map(change: Function) -> Function:
    return lambda items: [change(x) for x in items]


def _numbers(rng: random.Random) -> list[int]:
    low, high = rng.choice((-20, 1, 1, -9)), rng.choice((9, 30, 60))
    numbers = [rng.randint(low, high) for _ in range(rng.randint(4, 8))]
    return numbers + rng.sample(numbers, rng.randint(0, 2))


def _words(rng: random.Random) -> list[str]:
    return rng.sample(WORDS, rng.randint(3, 6))


def _text(rng: random.Random) -> str:
    words = rng.sample(WORDS, rng.randint(1, 3))
    parts = [*words, str(rng.randint(1, 2030)), rng.choice("!?.#")]
    rng.shuffle(parts)
    return rng.choice((" ", "", "_")).join(parts)


def _pairs(rng: random.Random) -> list[tuple[str, int]]:
    return [(word, rng.randint(1, 40)) for word in rng.sample(WORDS, rng.randint(3, 5))]


def _matrix(rng: random.Random) -> list[list[int]]:
    width = rng.randint(2, 3)
    return [[rng.randint(-9, 20) for _ in range(width)] for _ in range(rng.randint(2, 4))]


def _tuple(rng: random.Random) -> tuple[int, ...]:
    return tuple(_numbers(rng))


SAME = Operation("", "{}", "", lambda items: items)


def _operation(slug: str, words: list[str], apply: Function) -> Operation:
    phrase, step = words
    return Operation(slug, phrase, step, apply)


def domains() -> list[Domain]:
    """Return all kinds of collections; their order is part of what a seed means."""
    path = Path(__file__).with_name("task_words.toml")
    words = tomllib.loads(path.read_text(encoding="utf-8"))

    def ops(name: str, role: str, each: Actions, whole: Actions) -> list[Operation]:
        wrap = _filter if role == "filters" else _map
        actions = {slug: wrap(action) for slug, action in each.items()} | whole
        return [_operation(slug, words[name][role][slug], act) for slug, act in actions.items()]

    numbers = (
        ops("number", "filters", NUMBER_TESTS, NUMBER_CHOICES),
        ops("number", "maps", NUMBER_CHANGES, NUMBER_SERIES),
        ops("number", "folds", {}, NUMBER_FOLDS),
    )
    strings = (
        ops("word", "filters", WORD_TESTS, {}),
        ops("word", "maps", WORD_CHANGES, {}),
        ops("word", "folds", {}, WORD_FOLDS),
    )
    letters = (
        ops("text", "filters", TEXT_TESTS, {}),
        ops("text", "maps", TEXT_CHANGES, TEXT_SERIES),
        ops("text", "folds", {}, TEXT_FOLDS),
    )
    records = (
        ops("record", "filters", RECORD_TESTS, {}),
        ops("record", "maps", RECORD_CHANGES, {}),
        ops("record", "folds", {}, RECORD_FOLDS),
    )
    lines = ([SAME], ops("matrix", "maps", {}, MATRIX_MAPS), numbers[2])
    pair_list = "list of (string, number) tuples"
    return [
        Domain("numbers", "list of integers", "list[int]", _numbers, *numbers, 7),
        Domain("items", "list of words", "list[str]", _words, *strings, 5),
        Domain("text", "string", "str", _text, *letters, 5),
        Domain("pairs", pair_list, "list[tuple[str, int]]", _pairs, *records, 3),
        Domain("matrix", "matrix", "list[list[int]]", _matrix, *lines, 3),
        Domain("values", "tuple of integers", "tuple[int, ...]", _tuple, *numbers, 2),
    ]
