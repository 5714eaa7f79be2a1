"""Options as a user gives them: one list of them everywhere, and what these models cannot do."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest

from ddtree.config import DecodeConfig
from ddtree.errors import OptionError
from ddtree.models.target import Target
from ddtree.options import as_json, as_pairs, as_tuple, as_tuples, check_options
from ddtree.pair import Pair
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.tokenizers import tiny_tokenizer

pytestmark = pytest.mark.usefixtures("unchecked")

# What a user may give in a friendlier form, or what is no part of how to decode.
OTHER_DEFAULTS = {"logit_bias": None}
BESIDES = {"self", "prompt", "raw", "logits_processor"}


def target(*, tokenizer: bool = False) -> Target:
    return Target(tiny_model("llama"), tiny_tokenizer() if tokenizer else None, name="tiny")


@pytest.mark.parametrize("call", [Pair.generate, Pair.stream])
def test_generate_and_stream_take_every_option_of_the_record_with_its_default(
    call: object,
) -> None:
    parameters = inspect.signature(call).parameters
    given = {n: p.default for n, p in parameters.items() if n not in BESIDES}
    assert given == {**{f.name: f.default for f in fields(DecodeConfig)}, **OTHER_DEFAULTS}
    assert set(parameters) - set(given) == BESIDES


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"logit_bias": ((VOCAB_SIZE, 1.0),)}, "logit_bias: expected token ids from 0 to 60"),
        ({"bad_words_ids": ((1, 99),)}, "bad_words_ids: expected token ids from 0 to 60, got 99"),
        ({"suppress_tokens": (61, 2, 70)}, "suppress_tokens: .* got 61, 70"),
        ({"bad_words": ("fox",)}, "bad_words: expected a tokenizer"),
        ({"stop": ("fox",)}, "stop: expected a tokenizer"),
        ({"method": "dflash"}, "drafter: expected a drafter for method dflash"),
    ],
)
def test_what_these_models_cannot_do_is_refused_by_name(
    options: dict[str, object], expected: str
) -> None:
    with pytest.raises(OptionError, match=expected):
        check_options(DecodeConfig(**{"method": "ar", **options}), target(), None)


def test_what_they_can_do_is_not_refused() -> None:
    config = DecodeConfig(
        method="ar",
        bad_words=("fox",),
        suppress_tokens=(VOCAB_SIZE - 1,),
        logit_bias=((0, 1.0),),
    )
    check_options(config, target(tokenizer=True), None)


def test_lists_and_mappings_become_tuples_and_the_rest_goes_on_as_it_is() -> None:
    assert as_tuple(["a", "b"]) == ("a", "b")
    assert as_tuple("ab") == ("ab",)
    assert as_tuple(7) == 7
    assert as_tuples([[1, 2], (3,)]) == ((1, 2), (3,))
    assert as_tuples([4]) == (4,)
    assert as_tuples(None) is None
    assert as_pairs({4: 1.5}) == ((4, 1.5),)
    assert as_pairs(None) == ()
    assert as_pairs(7) == 7
    assert as_json({"type": "object"}) == '{"type": "object"}'
    assert as_json("{") == "{"
    assert as_json({"a": {1}}) == {"a": {1}}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"logit_bias": {"a": 1.0}}, "logit_bias"),
        ({"logit_bias": [(4, 1.0)]}, "logit_bias"),
        ({"bad_words": [7]}, "bad_words"),
        ({"bad_words_ids": [7]}, "bad_words_ids"),
        ({"bad_words_ids": 7}, "bad_words_ids"),
        ({"suppress_tokens": 7}, "suppress_tokens"),
        ({"min_new_tokens": 300}, "min_new_tokens"),
    ],
)
def test_the_wrong_kind_is_refused_by_the_records_own_message(
    options: dict[str, object], named: str
) -> None:
    with pytest.raises(OptionError, match=f"^{named}: expected"):
        Pair(target(), None).stream([1], method="ar", **options)


def test_bad_words_are_never_said_whatever_their_tokens() -> None:
    pair = Pair(target(tokenizer=True), None)
    free = pair.generate([5, 17, 42], method="ar", max_new_tokens=30)
    word = tiny_tokenizer().decode(free.token_ids[3:5])
    banned = pair.generate([5, 17, 42], method="ar", max_new_tokens=30, bad_words=[word])
    spelled = tuple(tiny_tokenizer()(word, add_special_tokens=False)["input_ids"])
    said = banned.token_ids
    assert all(said[i : i + len(spelled)] != spelled for i in range(len(said)))
    assert banned.token_ids != free.token_ids
