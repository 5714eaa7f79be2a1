"""The Python API: what is delivered is counted, streamed, stopped and refused as it says."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import pytest
import torch

import ddtree
from ddtree.comparison import Comparison, Divergence, compare
from ddtree.config import DecodeConfig
from ddtree.errors import ContextLengthError, OptionError, PromptError
from ddtree.models.target import Target
from ddtree.pair import Pair
from ddtree.types import METHODS, Generation
from tests.support import drafters
from tests.support.models import VOCAB_SIZE, greedy_reference, tiny_model, tiny_target
from tests.support.tokenizers import tiny_tokenizer

PROMPT = [5, 17, 42, 8, 23, 11, 2]
NUM_NEW = 24

pytestmark = pytest.mark.usefixtures("unchecked")


def reference(num_new: int = NUM_NEW) -> list[int]:
    return _reference()[:num_new]


@functools.cache
def _reference() -> list[int]:
    return greedy_reference(tiny_model("llama"), PROMPT, 80)


def pair_with(drafter: object = None, *, tokenizer: bool = True) -> Pair:
    target = Target(tiny_model("llama"), tiny_tokenizer() if tokenizer else None, name="tiny")
    return Pair(target, drafter)


@pytest.fixture
def perfect() -> Pair:
    """Whole blocks are accepted: what ends the text does so inside an accepted path."""
    return pair_with(drafters.perfect(PROMPT + reference(80), VOCAB_SIZE, num_depths=7))


@pytest.fixture
def siblings() -> Pair:
    """The truth is at rank 0, 1, 2 in turn: trees find it, the chain often does not."""
    script = PROMPT + reference(80)
    return pair_with(drafters.right_at_rank(lambda position: position % 3, script, VOCAB_SIZE))


@pytest.fixture
def eos() -> Iterator[Callable[[list[int]], None]]:
    """Sets the shared model's stop tokens, and takes them back."""
    config = tiny_model("llama").generation_config

    def declare(ids: list[int]) -> None:
        config.eos_token_id = ids

    yield declare
    config.eos_token_id = None


# Streams.


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["perfect", "siblings"])
@pytest.mark.parametrize("prompt", [PROMPT, "hello world"], ids=["ids", "text"])
def test_the_pieces_of_a_stream_joined_are_the_text(
    method: str, kind: str, prompt: object, request: pytest.FixtureRequest
) -> None:
    pair = request.getfixturevalue(kind)
    *pieces, last = pair.stream(prompt, budget=16, method=method, max_new_tokens=NUM_NEW)
    assert isinstance(last, Generation)
    assert all(isinstance(piece, str) and piece for piece in pieces)
    assert "".join(pieces) == last.text
    assert len(pieces) > 1
    whole = pair.generate(prompt, budget=16, method=method, max_new_tokens=NUM_NEW)
    assert (whole.text, whole.token_ids) == (last.text, last.token_ids)
    assert last.text == tiny_tokenizer().decode(last.token_ids, skip_special_tokens=True)


def test_text_comes_before_the_end(siblings: Pair) -> None:
    stream = siblings.stream(PROMPT, budget=16, max_new_tokens=NUM_NEW)
    assert isinstance(next(stream), str)
    assert len(siblings.drafter.roots) < 5
    stream.close()


def test_without_a_tokenizer_a_stream_is_the_generation_alone() -> None:
    (generation,) = pair_with(tokenizer=False).stream(PROMPT, method="ar", max_new_tokens=5)
    assert generation.text is None
    assert list(generation.token_ids) == reference(5)


@pytest.mark.parametrize(
    ("options", "kind", "named"),
    [
        ({"method": "medusa"}, OptionError, "method"),
        ({"budget": -1}, OptionError, "budget"),
        ({"budget": "16"}, OptionError, "budget"),
        ({"temperature": -0.5}, OptionError, "temperature"),
        ({"top_p": 0.0}, OptionError, "top_p"),
        ({"top_k": 0}, OptionError, "top_k"),
        ({"seed": -1}, OptionError, "seed"),
        ({"max_new_tokens": 0}, OptionError, "max_new_tokens"),
        ({"max_new_tokens": 1000}, ContextLengthError, "at most 249 new tokens"),
        ({"stop": [3]}, OptionError, "stop"),
        ({"stop": ""}, OptionError, "stop"),
        ({"stop": None}, OptionError, "stop"),
        ({"stop": 3}, OptionError, "stop"),
        ({"prompt": ""}, PromptError, "prompt"),
        ({"prompt": [VOCAB_SIZE]}, PromptError, "prompt"),
        ({"prompt": None}, PromptError, "prompt"),
    ],
    ids=str,
)
@pytest.mark.parametrize("call", ["stream", "generate"])
def test_options_are_refused_by_the_call_itself_before_any_work(
    options: dict[str, object], kind: type[Exception], named: str, call: str, perfect: Pair
) -> None:
    arguments = {"prompt": PROMPT, "max_new_tokens": 5, **options}
    prompt = arguments.pop("prompt")
    with pytest.raises(kind, match=named):
        getattr(perfect, call)(prompt, **arguments)
    assert perfect.drafter.sessions == []


# Stops.


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("place", range(2, 10))
def test_a_stop_string_anywhere_in_an_accepted_path_ends_the_text_before_it(
    place: int, method: str, perfect: Pair
) -> None:
    free = perfect.generate(PROMPT, budget=16, max_new_tokens=16)
    # The text of two neighbouring tokens: it ends where the second one does.
    stop = tiny_tokenizer().decode(free.token_ids[place : place + 2])
    expected = free.text[: free.text.index(stop)]
    *pieces, generation = perfect.stream(
        PROMPT, budget=16, method=method, max_new_tokens=16, stop=["never said", stop]
    )
    assert generation.text == "".join(pieces) == expected
    assert generation.finish_reason == "stop"
    assert generation.num_tokens <= place + 2
    assert generation.token_ids == free.token_ids[: generation.num_tokens]
    assert stop in tiny_tokenizer().decode(generation.token_ids)
    assert stop not in tiny_tokenizer().decode(generation.token_ids[:-1])
    assert generation.num_tokens == sum(r.num_tokens for r in generation.rounds)


def test_one_stop_string_need_not_be_in_a_list(perfect: Pair) -> None:
    free = perfect.generate(PROMPT, budget=16, max_new_tokens=30)
    stop = tiny_tokenizer().decode(free.token_ids[4:6])
    by_string = perfect.generate(PROMPT, budget=16, max_new_tokens=30, stop=stop)
    assert (
        by_string.text == perfect.generate(PROMPT, budget=16, max_new_tokens=30, stop=[stop]).text
    )
    assert by_string.num_tokens < 30


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(OptionError, match="stop: expected a tokenizer"):
        pair_with(tokenizer=False).generate(PROMPT, method="ar", stop=["x"])


@pytest.mark.parametrize("method", METHODS)
def test_a_stop_token_ends_the_text_unless_ignored(
    method: str, perfect: Pair, eos: Callable[[list[int]], None]
) -> None:
    free = reference(20)
    eos([free[5], 60])
    place = free.index(free[5])
    stopped = perfect.generate(PROMPT, budget=16, method=method, max_new_tokens=20)
    assert list(stopped.token_ids) == free[: place + 1]
    assert stopped.finish_reason == "stop"
    on = perfect.generate(PROMPT, budget=16, method=method, max_new_tokens=20, ignore_eos=True)
    assert list(on.token_ids) == free
    assert on.finish_reason == "length"


# Counts.


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_new", [1, 2, 3, 9, 30])
@pytest.mark.parametrize("kind", ["perfect", "siblings"])
def test_every_count_speaks_of_what_was_delivered(
    method: str, num_new: int, kind: str, request: pytest.FixtureRequest
) -> None:
    pair = request.getfixturevalue(kind)
    generation = pair.generate(PROMPT, budget=16, method=method, max_new_tokens=num_new)
    rounds, histogram = generation.rounds, generation.acceptance_histogram
    assert generation.num_tokens == len(generation.token_ids) == num_new
    assert [t for r in rounds for t in r.token_ids] == list(generation.token_ids)
    assert rounds[0].tree is None
    assert rounds[0].num_tokens == 1
    assert generation.num_rounds == len(rounds) - 1 == sum(histogram)
    assert sum(i * count for i, count in enumerate(histogram)) == num_new - 1
    assert all(len(r.path) == r.num_tokens - 1 for r in rounds)
    assert [r.finish_reason for r in rounds] == [None] * (len(rounds) - 1) + ["length"]
    assert generation.method == method
    if num_new == 1:
        assert generation.acceptance_length != generation.acceptance_length
        assert histogram == ()
    else:
        assert generation.acceptance_length == (num_new - 1) / generation.num_rounds
        assert histogram[0] == 0
    if method == "ar" and num_new > 1:
        assert generation.acceptance_length == 1


def test_time_is_split_into_stages_that_fit_into_the_whole(siblings: Pair) -> None:
    generation = siblings.generate(PROMPT, budget=16, max_new_tokens=NUM_NEW)
    stages = dataclasses.asdict(generation.seconds)
    assert all(seconds > 0 for seconds in stages.values())
    assert sum(stages.values()) == pytest.approx(generation.seconds.total)
    assert generation.seconds.total <= generation.elapsed_s
    assert generation.tokens_per_s == NUM_NEW / generation.elapsed_s
    plain = siblings.generate(PROMPT, method="ar", max_new_tokens=NUM_NEW).seconds
    assert plain.draft == plain.build == 0


def test_results_are_frozen(perfect: Pair) -> None:
    generation = perfect.generate(PROMPT, budget=16, max_new_tokens=9)
    for record, field in [
        (generation, "text"),
        (generation.rounds[0], "token_ids"),
        (generation.seconds, "draft"),
        (generation.rounds[1].tree, "token_ids"),
        (perfect, "drafter"),
    ]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, field, None)


# Sampling, as far as it is the API's.


def test_a_seed_gives_one_text_and_another_seed_another(siblings: Pair) -> None:
    def sample(seed: int, method: str) -> tuple[int, ...]:
        options = {"temperature": 1.0, "top_k": 30, "top_p": 0.95, "max_new_tokens": 20}
        return siblings.generate(PROMPT, seed=seed, method=method, **options).token_ids

    assert len({sample(1, method) for method in METHODS}) == 1
    assert sample(1, "ar") != sample(2, "ar")


# Without a drafter.


@pytest.mark.parametrize("method", ["dflash", "ddtree"])
def test_without_a_drafter_drafting_is_refused_and_ar_is_the_remedy(method: str) -> None:
    pair = ddtree.load(tiny_model("llama"))
    assert pair.drafter is None
    with pytest.raises(OptionError) as caught:
        pair.generate(PROMPT, budget=16, method=method)
    assert caught.value.argument == "drafter"
    assert method in caught.value.expected
    assert 'use method "ar"' in caught.value.remedy
    assert pair.generate(PROMPT, method="ar", max_new_tokens=3).num_tokens == 3


# Comparison.


def test_methods_that_agree_have_no_divergence(siblings: Pair) -> None:
    comparison = compare(siblings, PROMPT, DecodeConfig(max_new_tokens=NUM_NEW))
    assert isinstance(comparison, Comparison)
    assert comparison.agree
    assert comparison.divergences == ()
    assert [g.method for g in comparison.generations] == list(METHODS)
    assert all(list(g.token_ids) == reference() for g in comparison.generations)
    assert comparison.speedup(comparison.generations[0]) == 1.0


def test_the_budget_is_the_trees_and_the_chain_has_its_whole_length(siblings: Pair) -> None:
    comparison = compare(siblings, PROMPT, DecodeConfig(max_new_tokens=NUM_NEW, budget=3))
    nodes = {
        g.method: max(r.tree.num_nodes for r in g.rounds if r.tree is not None)
        for g in comparison.generations
    }
    assert nodes == {"ar": 0, "dflash": siblings.drafter.num_depths, "ddtree": 3}


def test_sampled_methods_agree_too(siblings: Pair) -> None:
    config = DecodeConfig(temperature=1.0, seed=4, max_new_tokens=20)
    assert compare(siblings, PROMPT, config).agree


def test_stop_strings_and_text_prompts_go_through_a_comparison(siblings: Pair) -> None:
    free = siblings.generate("hello", method="ar", max_new_tokens=20, raw=True)
    stop = tiny_tokenizer().decode(free.token_ids[5:7])
    config = DecodeConfig(max_new_tokens=20, stop=(stop,))
    comparison = compare(siblings, "hello", config, raw=True)
    assert comparison.agree
    expected = free.text[: free.text.index(stop)]
    assert [g.text for g in comparison.generations] == [expected] * 3


@pytest.fixture
def broken_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a tree see their siblings: the chain, which has none, stays right."""
    monkeypatch.setattr(
        "ddtree.verify.ancestor_mask",
        lambda tree: torch.ones(tree.num_rows, tree.num_rows).tril().bool().numpy(),
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.usefixtures("broken_mask")
def test_a_broken_pair_is_found_out_where_it_first_differs(
    siblings: Pair, temperature: float
) -> None:
    config = DecodeConfig(max_new_tokens=NUM_NEW, budget=16, temperature=temperature, seed=1)
    comparison = compare(siblings, PROMPT, config)
    assert not comparison.agree
    (found,) = comparison.divergences
    plain, _, tree = comparison.generations
    assert found.method == "ddtree"
    assert plain.token_ids[: found.index] == tree.token_ids[: found.index]
    assert found.expected_id == plain.token_ids[found.index]
    assert found.got_id == tree.token_ids[found.index] != found.expected_id
    assert found.gap > 0
    if temperature == 0:
        ids = torch.tensor([[*PROMPT, *plain.token_ids[: found.index]]])
        with torch.inference_mode():
            best = tiny_model("llama")(ids).logits[0, -1].topk(2).values
        assert found.gap == pytest.approx(float(best[0] - best[1]), abs=1e-4)


def test_a_method_that_ends_too_early_differs_at_the_end(
    siblings: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Pair.run

    def cut(self: Pair, prompt: object, config: DecodeConfig, **options: object) -> Iterator:
        for item in run(self, prompt, config, **options):
            if isinstance(item, Generation) and config.method == "dflash":
                item = dataclasses.replace(item, token_ids=item.token_ids[:4])
            yield item

    monkeypatch.setattr(Pair, "run", cut)
    (found,) = compare(siblings, PROMPT, DecodeConfig(max_new_tokens=10)).divergences
    assert isinstance(found, Divergence)
    assert (found.method, found.index, found.got_id) == ("dflash", 4, None)
    assert found.expected_id == reference(10)[4]


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (DecodeConfig(max_new_tokens=1000), ContextLengthError),
        (DecodeConfig(stop=("x",), max_new_tokens=5), OptionError),
    ],
    ids=["too long", "no tokenizer to stop with"],
)
def test_a_comparison_refuses_before_any_work(
    config: DecodeConfig, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(tiny_target("llama"), drafters.random_drafter(0, VOCAB_SIZE))
    monkeypatch.setattr(Target, "prefill", lambda *args, **options: pytest.fail("work was done"))
    with pytest.raises(kind):
        compare(pair, PROMPT, config)
    with pytest.raises(OptionError, match="drafter"):
        compare(Pair(pair.target, None), PROMPT, DecodeConfig(max_new_tokens=5))
