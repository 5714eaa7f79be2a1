"""The rule's distribution, exact: frequencies over many seeds against enumerated probabilities.

The target is a table over a vocabulary of 3 tokens and texts of 4, so that every text's probability
is known. Loop, builder, walk, rule, noise and coupling are the real ones. Seeds are fixed, so a
test at level 0.001 passes always or never.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from ddtree.budget import FixedBudget
from ddtree.coupled import CoupledDrafting
from ddtree.decode import Stages, decode
from ddtree.models.target import TargetOutput
from ddtree.prefill import Context, Prefilled
from ddtree.sampling.coupling import Coupling, CouplingWeights
from ddtree.sampling.noise import gumbel_noise
from ddtree.sampling.rule import DecodingRule, Sampling, process_logits
from ddtree.stopping import Stopping, TextStopping
from ddtree.tree.host import build_tree
from ddtree.types import DraftTree, Walk
from ddtree.walk import walk
from tests.support.drafters import LogitsDrafter

pytestmark = pytest.mark.usefixtures("unchecked")

V, LENGTH = 3, 4
PROMPT = [0, 2]
NUM_SEEDS = 500
LEVEL = 0.001
# The second leaves out every token whose probability is in the last tenth.
PROCESSING = [{"temperature": 0.8}, {"temperature": 1.2, "top_p": 0.9}]


@cache
def logits_behind(text: tuple[int, ...]) -> Tensor:
    """The target's logits for the next token, given the new tokens so far."""
    return torch.from_numpy(1.5 * np.random.default_rng([7, *text, len(text)]).standard_normal(V))


@cache
def probability(text: tuple[int, ...], rule: tuple[tuple[str, float], ...]) -> float:
    """Of a whole text, or of one that begins with these tokens."""
    p = 1.0
    for i, token in enumerate(text):
        p *= float(process_logits(logits_behind(text[:i]), **dict(rule)).softmax(-1)[token])
    return p


@dataclass
class TableCache:
    """Only its length is ever asked for."""

    length: int = len(PROMPT)


def table_stages() -> Stages:
    """The stages, with the table in place of the target."""

    def prefill(
        target: None, drafter: LogitsDrafter, prompt: Sequence[int], room: int
    ) -> Prefilled:
        session = drafter.start(room)
        session.extend(torch.zeros(len(prompt), 1), torch.tensor(prompt))
        context = Context(TableCache(), session, list(prompt), ())  # type: ignore[arg-type]
        return Prefilled(context, logits_behind(())[None])

    def verify(target: None, context: Context, tree: DraftTree) -> TargetOutput:
        paths = [tuple(context.token_ids[len(PROMPT) :])]
        for row in range(1, tree.num_rows):
            paths.append((*paths[tree.parents[row]], int(tree.token_ids[row])))
        return TargetOutput(torch.stack([*map(logits_behind, paths)]), torch.zeros(len(paths), 1))

    def commit(context: Context, start: int, path: tuple[int, ...], features: Tensor) -> None:
        context.cache.length = start + 1 + len(path)
        ids = torch.tensor(context.token_ids[start : start + 1 + len(path)])
        context.session.extend(features[: 1 + len(path)], ids)

    return Stages(prefill=prefill, verify=verify, commit=commit, build=build_tree)  # type: ignore[arg-type]


def biased_walk(
    tree: DraftTree, logits: Tensor, rule: DecodingRule, stopping: Stopping, token_ids: list[int]
) -> Walk:
    """The mistake that is easily made: draw the bonus token anew where the tree was left."""
    walked = walk(tree, logits, rule, stopping, token_ids)
    if walked.finish_reason is not None or tree.num_nodes == 0:
        return walked
    assert isinstance(rule, Sampling)
    position = len(token_ids) - 1
    row = logits[walked.path[-1] if walked.path else 0]
    scores = process_logits(row, temperature=rule.temperature, top_p=rule.top_p)
    token_ids[-1] = int((scores + gumbel_noise(rule.seed + 2**32, position, V)).argmax())
    return replace(walked, token_ids=(*walked.token_ids[:-1], token_ids[-1]))


@cache
def exact_logits(
    known: tuple[int, ...], num_depths: int, rule: tuple[tuple[str, float], ...]
) -> Tensor:
    """The true log-probabilities at each of the next positions, given what is decided."""
    shares = torch.zeros(num_depths, V)
    for ahead in product(range(V), repeat=num_depths):
        p = probability((*known, *ahead), rule)
        shares[torch.arange(num_depths), list(ahead)] += p
    return (shares / shares.sum(-1, keepdim=True)).clamp(min=1e-6).log()


def drafter_of(kind: str, rule: tuple[tuple[str, float], ...], text: list[int]) -> LogitsDrafter:
    """Perfect: it knows the distribution of every position. Hostile: sure of the opposite.

    Args:
        kind: "perfect" or "hostile".
        rule: of the target.
        text: all tokens so far, filled in by the loop.
    """

    def logits(length: int, root_id: int, num_depths: int) -> Tensor:
        exact = exact_logits(tuple(text[len(PROMPT) : length + 1]), num_depths, rule)
        return exact if kind == "perfect" else -3 * exact

    return LogitsDrafter(logits, num_depths=LENGTH - 1)


def sample(
    kind: str,
    processing: dict[str, float],
    *,
    coupled: bool,
    biased: bool = False,
    budget: int = 2,
    num_seeds: int = NUM_SEEDS,
) -> Counter[tuple[int, ...]]:
    """How often each text came, one per seed."""
    found: Counter[tuple[int, ...]] = Counter()
    weights = CouplingWeights(LENGTH - 1)
    for seed in range(num_seeds):
        rule = Sampling(seed=seed, **processing)
        stages = table_stages()
        if biased:
            stages = replace(stages, walk=biased_walk)
        if coupled:
            coupling = Coupling(temperature=rule.temperature, noise=rule.noise, weights=weights)
            stages = CoupledDrafting(coupling).attached(stages)
        text = list(PROMPT)
        drafter = drafter_of(kind, tuple(sorted(processing.items())), text)
        for done in decode(
            None,  # type: ignore[arg-type]
            drafter,
            PROMPT,
            stages=stages,
            rule=rule,
            stopping=TextStopping(LENGTH, (), None),
            budget=FixedBudget(budget),
        ):
            text += done.token_ids
        found[tuple(text[len(PROMPT) :])] += 1
    return found


def p_value(
    found: Counter[tuple[int, ...]], processing: dict[str, float], *, length: int = LENGTH
) -> float:
    """Pearson's chi-square of the first tokens; those expected less than five times count as one.

    Args:
        found: how often each text came.
        processing: of the rule.
        length: so many tokens of each text.
    """
    rule, num_seeds = tuple(sorted(processing.items())), found.total()
    beginnings: Counter[tuple[int, ...]] = Counter()
    for text, times in found.items():
        beginnings[text[:length]] += times
    texts = list(product(range(V), repeat=length))
    expected = np.array([num_seeds * probability(text, rule) for text in texts])
    observed = np.array([beginnings[text] for text in texts], float)
    assert expected.sum() == pytest.approx(num_seeds)
    assert observed.sum() == num_seeds
    assert (observed[expected == 0] == 0).all()
    rare = expected < 5
    expected = np.append(expected[~rare], max(expected[rare].sum(), 1e-9))
    observed = np.append(observed[~rare], observed[rare].sum())
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    half = torch.tensor(statistic / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, half))


@pytest.mark.parametrize("processing", PROCESSING, ids=str)
@pytest.mark.parametrize("kind", ["perfect", "hostile"])
@pytest.mark.parametrize("coupled", [True, False], ids=["coupled", "plain"])
def test_texts_come_as_often_as_the_target_says(
    coupled: bool, kind: str, processing: dict[str, float]
) -> None:
    assert p_value(sample(kind, processing, coupled=coupled), processing) > LEVEL


@pytest.mark.parametrize("kind", ["perfect", "hostile"])
def test_drawing_the_bonus_token_anew_is_found_out(kind: str) -> None:
    found = sample(kind, PROCESSING[0], coupled=False, biased=True)
    assert p_value(found, PROCESSING[0]) < LEVEL


@pytest.mark.parametrize("kind", ["perfect", "hostile"])
def test_drawing_the_bonus_token_anew_is_found_out_in_coupled_drafting(kind: str) -> None:
    # A tree that knows the noise is left more seldom, so that the bias is smaller: one node, more
    # seeds, and fewer texts to tell apart make up for that.
    found = sample(kind, PROCESSING[0], coupled=True, biased=True, budget=1, num_seeds=1500)
    assert p_value(found, PROCESSING[0], length=3) < LEVEL
