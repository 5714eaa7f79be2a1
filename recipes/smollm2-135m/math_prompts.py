"""Math problems in the form of MATH-500, drawn from tables of wordings with random numbers.

A kind (math_kinds.toml) is a list of wordings, ranges for its numbers and, where needed, the name
of a function that derives further ones. `<a>` in a wording is the value of `a`; the LaTeX stays as
it is. Answers are not computed: the target answers by itself.
"""

import random
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from pathlib import Path

TEMPLATE = (
    "Return your final response within \\boxed{{}}. {problem}\n"
    "Please reason step by step, and put your final answer within \\boxed{{}}."
)
NAMES = (
    "Amara",
    "Bruno",
    "Chloe",
    "Dmitri",
    "Elif",
    "Farid",
    "Greta",
    "Hana",
    "Ivan",
    "Jonas",
    "Keiko",
    "Lena",
    "Mateo",
    "Nadia",
    "Omar",
    "Priya",
    "Quentin",
    "Rosa",
    "Sven",
    "Tara",
    "Uma",
    "Viktor",
    "Wanda",
    "Yusuf",
    "Zoe",
)
THINGS = (
    "marbles",
    "stickers",
    "beads",
    "buttons",
    "coins",
    "tokens",
    "cards",
    "shells",
    "pencils",
    "stamps",
)
COLOURS = ("red", "blue", "green", "yellow", "white", "black", "purple", "orange")
PLACES = (
    "library",
    "bakery",
    "school",
    "orchard",
    "museum",
    "harbor",
    "garden",
    "station",
    "stadium",
    "factory",
)

Values = dict[str, int | str]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of problem: wordings, `name=low..high` ranges, and the name of what derives more."""

    subject: str
    wordings: list[str]
    ranges: str = ""
    derive: str = ""


def polynomial(*coefficients: int, letter: str = "x") -> str:
    """Return the LaTeX of a polynomial, highest power first.

    >>> polynomial(1, -5, 0, 6)
    'x^3 - 5x^2 + 6'
    """
    text = ""
    for power, value in zip(range(len(coefficients) - 1, -1, -1), coefficients, strict=True):
        if value == 0:
            continue
        sign = ("-" if value < 0 else "") if not text else (" - " if value < 0 else " + ")
        size = "" if abs(value) == 1 and power else str(abs(value))
        name = {0: "", 1: letter}.get(power, f"{letter}^{power}")
        text += f"{sign}{size}{name}"
    return text or "0"


def base_digits(value: int, base: int) -> str:
    """Return `value` written in `base` (at most 10).

    >>> base_digits(13, 2)
    '1101'
    """
    text = ""
    while value:
        value, digit = divmod(value, base)
        text = str(digit) + text
    return text or "0"


def _roots(v: dict[str, int]) -> Values:
    p, q = v["p"], v["q"]
    return {"quad": polynomial(1, -(p + q), p * q), "alt": polynomial(v["a"], v["b"], -v["c"])}


def _cubic(v: dict[str, int]) -> Values:
    p, q, s = v["p"], v["q"], v["s"]
    poly = polynomial(1, -(p + q + s), p * q + p * s + q * s, -p * q * s)
    return {"cubic": poly}


def _bases(v: dict[str, int]) -> Values:
    return {"n": base_digits(v["x"], v["b"]), "m": base_digits(v["y"], v["b"])}


def _coprime(v: dict[str, int]) -> Values:
    m = v["m"]
    a = next(k for k in range(v["a"], v["a"] + m + 1) if gcd(k, m) == 1)
    return {"a": a, "r": v["r"] % m}


def _triple(v: dict[str, int]) -> Values:
    m, n, k = v["n"] + v["d"], v["n"], v["k"]
    legs = k * (m * m - n * n), 2 * k * m * n
    return {"u": legs[0], "w": legs[1], "h": k * (m * m + n * n)}


def _terms(v: dict[str, int]) -> Values:
    a, d, r = v["a"], v["d"], v["r"]
    return {
        "a1": a + d,
        "a2": a + 2 * d,
        "last": a + d * v["n"],
        "g1": a * r,
        "g2": a * r * r,
        "g3": a * r**3,
    }


def _line(v: dict[str, int]) -> Values:
    return {"expr": polynomial(v["m"], v["c"]), "other": polynomial(v["k"], -v["c"])}


def _pieces(v: dict[str, int]) -> Values:
    return {"f": polynomial(v["a"], v["b"]), "g": polynomial(1, -v["c"], v["d"])}


def _system(v: dict[str, int]) -> Values:
    a, b, c, d, x, y = (v[k] for k in "abcdxy")
    return {"e": a * x + b * y, "f": c * x - d * y}


def _power(v: dict[str, int]) -> Values:
    return {"value": v["a"] ** v["n"], "square": v["b"] ** 2, "mult": v["a"] * v["b"]}


WORDS = (
    "BANANA",
    "LETTER",
    "PEPPER",
    "COFFEE",
    "BALLOON",
    "SUCCESS",
    "TOMORROW",
    "ALGEBRA",
    "COCONUT",
    "PARALLEL",
    "SUMMER",
    "GEOMETRY",
    "ORANGE",
    "KITTEN",
    "MIRROR",
    "POTATO",
    "RIBBON",
    "SALAD",
    "TEMPLE",
    "VIOLET",
    "WINDOW",
    "YELLOW",
    "ACTIVE",
    "BUBBLE",
)
ANGLES = (30, 45, 60, 120, 135, 150, 210, 225, 240, 300, 315, 330)


DERIVED: dict[str, Callable[[dict[str, int]], Values]] = {
    "roots": _roots, "cubic": _cubic, "bases": _bases, "coprime": _coprime, "triple": _triple,
    "terms": _terms, "line": _line, "pieces": _pieces, "system": _system, "power": _power,
}  # fmt: skip


def kinds() -> list[Kind]:
    """Return all kinds, in the order of their file."""
    text = Path(__file__).with_name("math_kinds.toml").read_text(encoding="utf-8")
    return [Kind(**entry) for entry in tomllib.loads(text)["kind"]]


def _fill(wording: str, values: Values) -> str:
    return re.sub(r"<(\w+)>", lambda match: str(values[match[1]]), wording)


def problem(rng: random.Random, one: Kind, wording: str) -> str:
    """Return one problem of this kind in this wording."""
    drawn: dict[str, int] = {}
    for name, low, high in re.findall(r"(\w+)=(-?\d+)\.\.(-?\d+)", one.ranges):
        drawn[name] = rng.choice([n for n in range(int(low), int(high) + 1) if n])
    first, second = rng.sample(COLOURS, 2)
    values: Values = {
        "name": rng.choice(NAMES),
        "things": rng.choice(THINGS),
        "place": rng.choice(PLACES),
        "word": rng.choice(WORDS),
        "trig": rng.choice(("sin", "cos", "tan")),
        "angle": rng.choice(ANGLES),
        "angle2": rng.choice(ANGLES),
        "colour": first,
        "colour2": second,
    }
    values.update(drawn)
    if one.derive:
        values.update(DERIVED[one.derive](drawn))
    return _fill(wording, values)


def math_prompts(rng: random.Random, count: int) -> list[str]:
    """Return `count` different prompts, spread evenly over all wordings of all kinds."""
    pairs = [(k, w) for k in kinds() for w in k.wordings]
    prompts: dict[str, None] = {}
    while len(prompts) < count:
        rng.shuffle(pairs)
        for one, wording in pairs:
            prompts[TEMPLATE.format(problem=problem(rng, one, wording))] = None
    return list(prompts)[:count]
