"""Coupled drafting changes the number of rounds and nothing else: one seed, one text."""

from __future__ import annotations

import pytest
import torch

import ddtree
from ddtree.budget import Experience
from ddtree.costs import CostProfile
from ddtree.errors import OptionError
from ddtree.models.drafter import DFlashDrafter
from ddtree.types import Generation
from tests.support import drafters
from tests.support.models import VOCAB_SIZE, dflash_drafter, tiny_model, tiny_target

PROMPT = [5, 17, 42, 8, 23, 11, 2, 40, 33, 21, 9]
NUM_NEW = 16
PROFILE = CostProfile(contexts=(64,), rows=(1, 33), verify=((0.05, 0.06),), draft=0.001)
RULES = [
    {"temperature": 0.6},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 1.2, "repetition_penalty": 1.3},
]
THIRD = torch.arange(0, VOCAB_SIZE, 3)


def generate(drafter: object, architecture: str = "llama", **options: object) -> Generation:
    pair = ddtree.Pair(tiny_target(architecture), drafter)
    pair.__dict__["experience"] = Experience(PROFILE, 7)
    return pair.generate(PROMPT, seed=7, max_new_tokens=NUM_NEW, **options)


def plain(architecture: str = "llama", **rule: float) -> tuple[int, ...]:
    return generate(None, architecture, method="ar", **rule).token_ids


def knowing(text: list[int], *, error: float, ids: torch.Tensor | None = None) -> object:
    """A drafter with the target's logits along this text, and an error on top."""
    with torch.inference_mode():
        logits = tiny_model("llama")(input_ids=torch.tensor([text])).logits[0]
    logits = logits + error * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))

    def along(length: int, root_id: int, num_depths: int) -> torch.Tensor:
        # The logits at the root's position are of the token at depth 1.
        rows = logits[length : length + num_depths]
        return rows if ids is None else rows[:, ids]

    return drafters.LogitsDrafter(along, draft_token_ids=ids)


def drafters_for(text: list[int]) -> dict[str, object]:
    target = tiny_target("llama")
    network = dflash_drafter(target).network
    return {
        "perfect": drafters.perfect(text, VOCAB_SIZE),
        "hostile": drafters.hostile(text, VOCAB_SIZE),
        "random": drafters.random_drafter(3, VOCAB_SIZE),
        "knowing": knowing(text, error=0.5),
        "knowing a third": knowing(text, error=0.5, ids=THIRD),
        "network": dflash_drafter(target),
        "network, a third": DFlashDrafter(network, target, name="t", draft_token_ids=THIRD),
    }


# Every drafter with one rule, the most different ones with the others.
CASES = [(RULES[1], ("perfect", "hostile", "random", "knowing", "network"))]
CASES += [(rule, ("knowing a third", "network, a third")) for rule in RULES]


@pytest.mark.parametrize(("rule", "names"), CASES, ids=str)
def test_every_drafter_says_the_plain_text_coupled_and_not(
    rule: dict[str, float], names: tuple[str, ...]
) -> None:
    expected = plain(**rule)
    known = drafters_for([*PROMPT, *expected])
    for name in names:
        drafter = known[name]
        for method, coupled in (("dflash", True), ("ddtree", True), ("ddtree", False)):
            drafted = generate(drafter, method=method, budget=16, coupled=coupled, **rule)
            assert drafted.token_ids == expected, (name, method, coupled)


@pytest.mark.parametrize("budget", [1, 4, 33, "auto"])
def test_every_budget_says_the_plain_text(budget: int | str) -> None:
    expected = plain(temperature=1.0)
    for drafter in (dflash_drafter(tiny_target("llama")), knowing([*PROMPT, *expected], error=1.0)):
        drafted = generate(drafter, budget=budget, temperature=1.0)
        assert drafted.token_ids == expected


@pytest.mark.parametrize("architecture", ["mistral-window", "qwen2-mixed", "qwen3-tied"])
def test_every_kind_of_target_says_its_plain_text(architecture: str) -> None:
    drafter = dflash_drafter(tiny_target(architecture))
    drafted = generate(drafter, architecture, budget=16, temperature=1.0)
    assert drafted.token_ids == plain(architecture, temperature=1.0)


def test_what_earlier_texts_have_taught_leaves_no_trace_in_the_next() -> None:
    expected = plain(temperature=1.0)
    pair = ddtree.Pair(tiny_target("llama"), knowing([*PROMPT, *expected], error=1.0))
    options = {"temperature": 1.0, "seed": 7, "max_new_tokens": NUM_NEW, "budget": 8}
    before = pair.coupling_weights.values.copy()
    for _ in range(3):
        assert pair.generate(PROMPT, **options).token_ids == expected
        assert (pair.coupling_weights.values != before).any()
        before = pair.coupling_weights.values.copy()


@pytest.mark.parametrize("method", ["dflash", "ddtree"])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_a_drafter_that_knows_the_target_needs_fewer_rounds_when_coupled(
    temperature: float, method: str
) -> None:
    rule = {"temperature": temperature, "method": method, "budget": 8}
    text = [*PROMPT, *plain(temperature=temperature)]
    rounds = {
        coupled: generate(knowing(text, error=0.1), coupled=coupled, **rule).num_rounds
        for coupled in (True, False)
    }
    # 15 tokens behind the prefill's; at most 8 a round.
    assert rounds[True] <= 0.75 * rounds[False], rounds


# Who is coupled.


def test_only_a_sampling_drafter_is_coupled_and_only_if_wanted() -> None:
    drafter = knowing([*PROMPT, *plain(temperature=1.0)], error=1.0)
    for options in (
        {"temperature": 0.0},
        {"temperature": 1.0, "coupled": False},
        {"temperature": 1.0, "budget": 0},
        {"temperature": 1.0, "method": "ar"},
    ):
        generate(drafter, **{"budget": 4, **options})
        assert drafter.num_perturbed == 0
    coupled = generate(drafter, temperature=1.0, budget=4)
    # The last round has no room for a draft.
    assert drafter.num_perturbed >= coupled.num_rounds - 1 > 0


class _Unaware:
    """A drafter of someone who has not heard of coupling."""

    layer_ids, num_depths = (1, 2), 7

    def start(self, capacity: int) -> _Unaware:
        return self

    def extend(self, features: torch.Tensor, token_ids: torch.Tensor) -> None:
        pass

    def propose(self, root_id: int, *, num_depths: int, num_ranks: int) -> ddtree.Marginals:
        ids = torch.arange(num_ranks).expand(num_depths, -1).contiguous()
        return ddtree.Marginals(torch.full(ids.shape, -3.0), ids)


def test_a_drafter_that_cannot_be_coupled_is_refused_by_name() -> None:
    with pytest.raises(OptionError, match=r"_Unaware.*--no-coupled"):
        generate(_Unaware(), temperature=1.0, budget=4)


@pytest.mark.parametrize("options", [{"temperature": 1.0, "coupled": False}, {"temperature": 0.0}])
def test_a_drafter_that_cannot_be_coupled_drafts_where_nothing_is(options: dict) -> None:
    expected = plain(temperature=options["temperature"])
    assert generate(_Unaware(), budget=4, **options).token_ids == expected
