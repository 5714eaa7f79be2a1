"""Processors inside the tree: every method says what the library's processors say token by token.

The reference calls transformers' processors on the whole text at every token, with no cache and no
tree. Drafters are right often enough that penalties and bans fall inside accepted paths.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from ddtree.comparison import compare
from ddtree.config import DecodeConfig
from ddtree.draft import Drafter
from ddtree.pair import Pair
from ddtree.sampling.noise import gumbel_noise
from ddtree.sampling.rule import Chooser, DecodingRule, Processed, rule_for
from ddtree.types import METHODS, Generation, Method
from tests.support import drafters
from tests.support.library import library_processors
from tests.support.models import VOCAB_SIZE, tiny_model, tiny_target

PROMPT = [5, 17, 42, 8, 23, 11, 2]
NUM_NEW = 16
# This model's free greedy text: 39 13 56 27 27 29 39 36 13 56 27 5 2 6, where it ends.
EOS = [6, 30]
SEED = 4

pytestmark = pytest.mark.usefixtures("unchecked")


def no_pair_twice(ids: Tensor, scores: Tensor) -> Tensor:
    """A user's processor that depends on the text: no two tokens follow each other twice."""
    text = ids[0].tolist()
    seen = {b for a, b in itertools.pairwise(text) if a == text[-1]}
    scores[0, sorted(seen)] = -math.inf
    return scores


def climbing(ids: Tensor, scores: Tensor) -> Tensor:
    """Another: the number of tokens and the last one decide what is favoured."""
    return scores + 3 * ((torch.arange(VOCAB_SIZE) + ids[0, -1] + ids.shape[1]) % 7 == 0)


# Each changes this model's text, or it would prove nothing here; that is asserted below.
PARTS: dict[str, dict[str, object]] = {
    "bias": {"logit_bias": ((56, -3.0), (12, 2.0))},
    "repetition": {"repetition_penalty": 1.6},
    "presence": {"presence_penalty": 2.5},
    "frequency": {"frequency_penalty": 1.5},
    "bad words": {"bad_words_ids": ((31,), (27, 27), (13, 56, 27), (6,))},
    "least": {"min_new_tokens": 15},
    "suppressed": {"suppress_tokens": (29, 45)},
    "user's": {"logits_processor": [no_pair_twice, climbing]},
}
FILTERS: dict[str, dict[str, object]] = {
    "min-p": {"min_p": 0.1},
    "typical": {"typical_p": 0.6},
    "top": {"top_k": 20, "top_p": 0.8},
}
TRIPLES = [
    ("repetition", "frequency", "user's"),
    ("bias", "bad words", "presence"),
    ("least", "suppressed", "repetition"),
    ("presence", "frequency", "bad words"),
]


@pytest.fixture(autouse=True)
def eos() -> Iterator[None]:
    """Stop tokens for the shared model, taken back at the end."""
    config = tiny_model("llama").generation_config
    config.eos_token_id = EOS
    yield
    config.eos_token_id = None


def stepwise(options: dict[str, object]) -> list[int]:
    """The library's processors, our noise, and the two penalties that the library lacks."""
    options = dict(options)
    presence = options.pop("presence_penalty", 0.0)
    frequency = options.pop("frequency_penalty", 0.0)
    own = [*_counting(presence, frequency), *options.pop("logits_processor", [])]
    process = library_processors({**options, "eos_token_id": EOS}, len(PROMPT), own)
    ids = list(PROMPT)
    with torch.inference_mode():
        while len(ids) < len(PROMPT) + NUM_NEW:
            text = torch.tensor([ids])
            logits = tiny_model("llama")(input_ids=text, use_cache=False).logits[:, -1]
            scores = process(text, logits.clone())[0]
            if "temperature" in options:
                scores = scores + gumbel_noise(SEED, len(ids), VOCAB_SIZE)
            ids.append(int(scores.argmax()))
            if ids[-1] in EOS:
                break
    return ids[len(PROMPT) :]


def _counting(presence: float, frequency: float) -> Sequence[Callable[[Tensor, Tensor], Tensor]]:
    def penalise(ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.bincount(ids[0, len(PROMPT) :], minlength=VOCAB_SIZE)
        return scores - frequency * counts - presence * (counts > 0)

    return [penalise] if presence or frequency else []


def generated(options: dict[str, object], method: Method, drafter: Drafter) -> Generation:
    options = dict(options)
    if "logit_bias" in options:
        options["logit_bias"] = dict(options["logit_bias"])
    pair = Pair(tiny_target("llama"), drafter)
    return pair.generate(
        PROMPT, method=method, budget=16, seed=SEED, max_new_tokens=NUM_NEW, **options
    )


def check_equality(options: dict[str, object], expected: list[int]) -> None:
    """Every method says the expected text, along long accepted paths where it drafts."""
    script = PROMPT + expected
    for method, drafter in (
        ("ar", None),
        ("dflash", drafters.perfect(script, VOCAB_SIZE)),
        ("ddtree", drafters.right_at_rank(lambda position: position % 2, script, VOCAB_SIZE)),
    ):
        generation = generated(options, method, drafter)
        assert list(generation.token_ids) == expected, (method, options)
        if method != "ar" and len(expected) > 8:
            assert generation.acceptance_length > 2


SINGLES = [*PARTS.items(), *FILTERS.items()]
PAIRS = list(itertools.combinations(PARTS, 2))


@pytest.mark.parametrize("temperature", [0, 1.2])
@pytest.mark.parametrize(("name", "part"), SINGLES, ids=lambda value: str(value)[:12])
def test_each_option_alone_gives_the_librarys_text_with_every_method(
    name: str, part: dict[str, object], temperature: float
) -> None:
    options = {**part, "temperature": temperature} if temperature else part
    expected = stepwise(options)
    check_equality(options, expected)
    # The filters do nothing to an argmax, in the library as here.
    if temperature == 0:
        assert (expected == stepwise({})) == (name in FILTERS)


@pytest.mark.parametrize("names", [*PAIRS, *TRIPLES, tuple(PARTS)], ids="+".join)
def test_options_together_give_one_text_with_every_method(names: tuple[str, ...]) -> None:
    # Greedy and sampled in turn: every part is in several combinations of both kinds.
    sampled = sum(list(PARTS).index(name) for name in names) % 2 == 0
    options = {key: value for name in names for key, value in PARTS[name].items()}
    if sampled:
        options |= {"temperature": 1.2, "min_p": 0.02}
    if set(names) == set(PARTS):
        options |= {"top_k": 40, "typical_p": 0.9}
    # Two of them: the library's own text was compared for each alone, and is for three and more.
    plain = list(generated(options, "ar", None).token_ids)
    check_equality(options, plain if len(names) == 2 else stepwise(options))


BANS = {
    "suppress_tokens": (29, 45),
    "bad_words_ids": ((31,), (27, 27)),
    "logit_bias": ((56, -math.inf), (12, 2.0)),
    "min_new_tokens": 12,
}


@pytest.mark.parametrize("temperature", [0, 1.2])
@pytest.mark.parametrize("draft_token_ids", [None, torch.arange(0, VOCAB_SIZE, 3)])
def test_what_is_banned_for_certain_is_not_drafted(
    draft_token_ids: Tensor | None, temperature: float
) -> None:
    options = {**BANS, "temperature": temperature} if temperature else BANS
    expected = list(generated(options, "ar", None).token_ids)
    numbers = torch.randn((64, VOCAB_SIZE), generator=torch.Generator().manual_seed(3))
    numbers[:, [29, 45, 31, 56, *EOS]] += 5

    def logits(length: int, root_id: int, num_depths: int) -> Tensor:
        rows = numbers[length : length + num_depths]
        return rows if draft_token_ids is None else rows[:, draft_token_ids]

    for method in ("dflash", "ddtree"):
        drafter = drafters.LogitsDrafter(logits, draft_token_ids=draft_token_ids)
        said = generated(options, method, drafter)
        assert list(said.token_ids) == expected
        num_tokens = 0
        for done in said.rounds:
            if done.tree is not None:
                assert done.tree.num_nodes > 0 or num_tokens == NUM_NEW - 1
                assert not {29, 45, 31, 56} & set(done.tree.token_ids[1:].tolist())
                early = done.tree.depths + num_tokens <= 12
                assert not set(EOS) & set(done.tree.token_ids[1:][early[1:]].tolist())
            num_tokens += done.num_tokens


class CommittedOnly:
    """What must not be: processors that know the committed text and nothing of the row's path."""

    def __init__(self, right: Processed) -> None:
        self.right = right

    def chooser(self, logits_NV: Tensor) -> Chooser:
        committed: list[int] = []

        def choose(row: int, token_ids: Sequence[int]) -> int:
            committed.extend([] if committed else token_ids)
            return int(self.right.scores(logits_NV[row], committed).argmax())

        return choose


@pytest.mark.parametrize("name", ["repetition", "presence", "frequency", "bad words", "user's"])
def test_the_equality_catches_processors_that_know_the_committed_text_only(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*args: object, **options: object) -> DecodingRule:
        rule = rule_for(*args, **options)
        return CommittedOnly(rule) if isinstance(rule, Processed) else rule

    expected = stepwise(PARTS[name])
    monkeypatch.setattr("ddtree.pair.rule_for", wrong)
    # Without a tree the root's text is all there is, so plain decoding cannot see it.
    assert list(generated(PARTS[name], "ar", None).token_ids) == expected
    with pytest.raises(AssertionError, match="dflash"):
        check_equality(PARTS[name], expected)


def test_a_comparison_takes_a_least_length_beyond_its_warm_up() -> None:
    options = {"min_new_tokens": 10, "repetition_penalty": 1.6}
    drafter = drafters.perfect(PROMPT + stepwise(options), VOCAB_SIZE)
    config = DecodeConfig(budget=16, max_new_tokens=12, **options)
    compared = compare(Pair(tiny_target("llama"), drafter), PROMPT, config)
    assert compared.agree
    assert [len(g.token_ids) for g in compared.generations] == [12, 12, 12]


@pytest.mark.parametrize("method", METHODS)
def test_a_stateful_processor_of_the_user_is_called_once_per_token_with_that_tokens_text(
    method: Method,
) -> None:
    expected = stepwise({})
    texts: list[list[int]] = []

    def listen(ids: Tensor, scores: Tensor) -> Tensor:
        texts.append(ids[0].tolist())
        return scores

    drafter = drafters.perfect(PROMPT + expected, VOCAB_SIZE)
    said = generated({"logits_processor": [listen]}, method, drafter)
    assert list(said.token_ids) == expected
    assert texts == [PROMPT + expected[:i] for i in range(len(expected))]
