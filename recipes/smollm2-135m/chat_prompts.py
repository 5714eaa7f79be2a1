"""Open chat prompts in the eight categories of MT-Bench: own templates with own topics.

`<science>` in a template is a draw from the topic list of that name (chat_topics.toml). Extraction,
reasoning and arithmetic prompts have their data in them and are composed here.
"""

import random
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

PEOPLE = (
    "Alma", "Boris", "Carla", "David", "Esra", "Felix", "Gita", "Hugo", "Irene", "Jamal", "Kira",
    "Luis", "Mona", "Nils", "Olga", "Pablo", "Rita", "Samir", "Tina", "Umar", "Vera", "Walter",
)  # fmt: skip
FIRMS = ("Norwind", "Bluepeak", "Cargona", "Deltaview", "Everleaf", "Fernhill", "Gravion", "Halden")
GOODS = ("Folding bicycle", "Desk lamp", "Headset", "Board game", "Kettle", "Rain jacket", "Tent")
TOWNS = ("Oslo", "Quito", "Leeds", "Osaka", "Nairobi", "Lyon", "Tampa", "Perth", "Graz", "Turin")


def _firms(rng: random.Random) -> str:
    year = rng.randint(2015, 2023)
    lines = [
        f"- {firm}, led by {person}, is based in {rng.choice(TOWNS)}, had {rng.randint(20, 900)} "
        f"employees and sold goods for {rng.randint(2, 95)} million dollars in {year}."
        for firm, person in zip(rng.sample(FIRMS, 4), rng.sample(PEOPLE, 4), strict=True)
    ]
    question = rng.choice(
        (
            "Make a table with the columns company, head, town and number of employees.",
            "Which company sells most per employee? Answer with its name and its head.",
            "List the companies in order of sales, one per line, with the town in brackets.",
            "Return the data as a JSON array of objects.",
        )
    )
    return f"{question}\n" + "\n".join(lines)


def _notice(rng: random.Random) -> str:
    host, guest = rng.sample(PEOPLE, 2)
    event = rng.choice(("workshop on pottery", "chess tournament", "book fair", "choir concert"))
    month, town = rng.choice(("March", "June", "October")), rng.choice(TOWNS)
    text = (
        f"The {event} in {town} will take place on {rng.randint(1, 28)} {month} at "
        f"{rng.randint(9, 19)}:30. {host} organizes it for the {rng.randint(4, 20)}th time, and "
        f"{guest} will give the opening talk. Tickets cost {rng.randint(4, 30)} dollars; children "
        f"pay half. Last year {rng.randint(50, 900)} people came."
    )
    question = rng.choice(
        (
            "Extract the event, the place, the date and the price from this text, one per line:",
            "Who organizes the event, and what does a ticket for a child cost? Use only this text:",
            "List all numbers in the following text and say what each stands for.",
            "Turn the text below into an invitation with bullet points.",
            "Summarize the following text in one sentence.",
        )
    )
    return f"{question}\n{text}"


def _reviews(rng: random.Random) -> str:
    good = (
        "The staff was kind and quick.",
        "I will come back.",
        "Everything worked on the first day.",
    )
    bad = ("It broke after a week.", "Nobody answered my calls.", "It was far too expensive.")
    mixed = ("Nice design, but the battery is weak.", "Good food, slow service.", "It is okay.")
    chosen = rng.sample((*good, *bad, *mixed), 4)
    lines = [f"{i}. {rng.choice(GOODS)}: {t}" for i, t in enumerate(chosen, 1)]
    question = rng.choice(
        (
            "Label each review as positive, negative or neutral, one word per line.",
            "Which of these reviews names a problem? Give the numbers and the problems.",
            "Rate each review from 1 to 5 and return a JSON object with the numbers as keys.",
        )
    )
    return f"{question}\n" + "\n".join(lines)


def _order(rng: random.Random) -> str:
    first, second, third, fourth = rng.sample(PEOPLE, 4)
    word, end, last = rng.choice(
        (
            ("older", "oldest", "youngest"),
            ("taller", "tallest", "shortest"),
            ("faster", "fastest", "slowest"),
        )
    )
    facts = [f"{first} is {word} than {second}.", f"{third} is {word} than {first}.",
             f"{second} is {word} than {fourth}."]  # fmt: skip
    rng.shuffle(facts)
    question = rng.choice(
        (f"Who is the {end}?", f"Who is the {last}?", f"Is {third} {word} than {fourth}?")
    )
    end = rng.choice((" Explain your reasoning.", " Think step by step.", ""))
    return f"{' '.join(facts)} {question}{end}"


def _odd_one(rng: random.Random) -> str:
    groups = (
        ("rose", "tulip", "daisy", "lily"), ("hammer", "saw", "pliers", "drill"),
        ("salmon", "trout", "tuna", "cod"), ("flute", "trumpet", "oboe", "clarinet"),
        ("copper", "iron", "zinc", "silver"), ("square", "triangle", "hexagon", "pentagon"),
        ("Mars", "Venus", "Saturn", "Jupiter"), ("soccer", "tennis", "handball", "rugby"),
    )  # fmt: skip
    many, one = rng.sample(groups, 2)
    words = [*rng.sample(many, 3), rng.choice(one)]
    rng.shuffle(words)
    return rng.choice(
        (f"Which of these is the odd one out, and why? {', '.join(words)}",
         f"Sort the following words into two groups and name the groups: {', '.join(words)}.")
    )  # fmt: skip


def _logic(rng: random.Random) -> str:
    kind, larger, person = rng.choice(
        (
            ("bakers", "early risers", "Ida"),
            ("poets", "dreamers", "Paul"),
            ("cats", "hunters", "Milo"),
            ("engineers", "tea drinkers", "Rosa"),
            ("sailors", "swimmers", "Knut"),
            ("drummers", "night owls", "Cleo"),
            ("judges", "good listeners", "Ines"),
        )
    )
    quantity = rng.choice(("All", "Some", "No"))
    given, claimed = rng.sample((kind, larger), 2)
    verb = rng.choice(("belongs", "does not belong"))
    end = rng.choice(
        ("Justify your answer.", "Answer yes, no or unknown, and explain.", "Why or why not?")
    )
    return (
        f"{quantity} {kind} are {larger}. {person} {verb} to the {given}. "
        f"Can we conclude that {person} {verb} to the {claimed}? {end}"
    )


def _sequence(rng: random.Random) -> str:
    start, step = rng.randint(1, 9), rng.randint(2, 5)
    rules: tuple[Callable[[int], int], ...] = (
        lambda i: start + step * i,
        lambda i: start * step**i,
        lambda i: start + i * i,
        lambda i: start + step * i * (i + 1) // 2,
    )
    rule = rng.choice(rules)
    shown = ", ".join(str(rule(i)) for i in range(5))
    return rng.choice(
        (
            f"What comes next: {shown}, ...? Explain the rule.",
            f"Find the next two numbers of the sequence {shown}.",
        )
    )


SUMS = (
    "{p} buys {a} notebooks for ${b} each and {c} pens for ${d} each. How much does it cost?",
    "A train leaves at {h}:15 and takes {b} hours and {m} minutes. When does it arrive?",
    "{p} has {a}0 apples, gives away one half and then {b} more. How many are left?",
    "If {a} machines make {n} parts in an hour, how many parts do {b} machines make in {d} hours?",
    "Solve for x: {a}x + {b} = {n}. Show each step.",
    "What is the probability of drawing a red ball from a bag with {a} red and {b} blue balls?",
    "One side of a rectangle is {a} and the other is {b} longer. Find its area and its perimeter.",
    "Given f(x) = {a}x^2 - {b}x + {c}, what is f({d})? Then find the minimum of f.",
    "{p} invests ${a}00 at {b} percent interest per year. How much is it worth after {d} years?",
    "How many seconds are there in {a} hours and {b} minutes?",
    "{p} reads {a} pages on the first day and {b} pages more on each day after it. How many pages"
    " are that after {d} days?",
    "A class has {n} students. {b} of them play the piano, {c} sing, and {d} do both. How many do"
    " at least one of the two?",
    "What is the sum of all multiples of {a} below {n}0?",
    "If x + y = {n} and x - y = {a}, what is x times y?",
    "A car uses {b} liters for 100 kilometers. How far does it get with {n} liters?",
)


def _shop(rng: random.Random) -> str:
    a, b, c, d = (rng.randint(2, 12) for _ in range(4))
    hour, minutes = rng.randint(6, 20), 4 * rng.randint(2, 12)
    template = rng.choice(SUMS)
    return template.format(
        p=rng.choice(PEOPLE), a=a, b=b, c=c, d=min(b, c, d), h=hour, m=minutes, n=a * b + 2 * c
    )


COMPOSED = (_firms, _notice, _reviews, _order, _odd_one, _logic, _sequence, _shop)


def _fill(rng: random.Random, template: str, topics: dict[str, list[str]]) -> str:
    used: set[str] = set()

    def draw(match: re.Match[str]) -> str:
        topic = rng.choice([t for t in topics[match[1]] if not t or t not in used])
        used.add(topic)
        return topic

    filled = re.sub(r"<(\w+)>", draw, template).strip()
    return re.sub(r"\ba (?=(?:architect|enthusiastic)\b)", "an ", filled)


def chat_prompts(rng: random.Random, count: int) -> list[str]:
    """Return `count` different prompts, spread evenly over categories, then over templates."""
    path = Path(__file__).with_name("chat_topics.toml")
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    frames: list[list[str]] = list(tables["templates"].values())
    prompts: dict[str, None] = {}
    while len(prompts) < count:
        batch = [_fill(rng, t, tables["topics"]) for f in frames for t in rng.choices(f, k=11)]
        batch += [compose(rng) for compose in COMPOSED for _ in range(3)]
        rng.shuffle(batch)
        prompts.update(dict.fromkeys(batch))
    return list(prompts)[:count]
