"""Options of one generation: what is refused, and what the message says."""

import dataclasses
import math

import pytest

from ddtree.config import DecodeConfig
from ddtree.errors import OptionError, UserError

pytestmark = pytest.mark.usefixtures("unchecked")

BAD = [
    ("method", "medusa", "one of ar, dflash, ddtree"),
    ("method", "", "one of ar, dflash, ddtree"),
    ("method", None, "one of ar, dflash, ddtree"),
    ("budget", -1, "a whole number from 0 to 4096, or auto"),
    ("budget", 1.5, "a whole number from 0 to 4096, or auto"),
    ("budget", "16", "a whole number from 0 to 4096, or auto"),
    ("budget", True, "a whole number from 0 to 4096, or auto"),
    ("budget", None, "a whole number from 0 to 4096, or auto"),
    ("max_new_tokens", 0, "a whole number >= 1"),
    ("max_new_tokens", -5, "a whole number >= 1"),
    ("max_new_tokens", 2.0, "a whole number >= 1"),
    ("max_new_tokens", False, "a whole number >= 1"),
    ("seed", -1, "a whole number from 0 to 18446744073709551615"),
    ("seed", 2**64, "a whole number from 0 to 18446744073709551615"),
    ("seed", 0.0, "a whole number from 0 to 18446744073709551615"),
    ("seed", None, "a whole number from 0 to 18446744073709551615"),
    ("top_k", 0, "a whole number >= 1"),
    ("top_k", -1, "a whole number >= 1"),
    ("top_k", 5.0, "a whole number >= 1"),
    ("top_k", True, "a whole number >= 1"),
    ("temperature", -0.1, "a finite number >= 0"),
    ("temperature", math.nan, "a finite number >= 0"),
    ("temperature", math.inf, "a finite number >= 0"),
    ("temperature", -math.inf, "a finite number >= 0"),
    ("temperature", 10**400, "a finite number >= 0"),
    ("temperature", "1", "a finite number >= 0"),
    ("temperature", None, "a finite number >= 0"),
    ("temperature", True, "a finite number >= 0"),
    ("top_p", 0.0, "a number in (0, 1]"),
    ("top_p", -0.5, "a number in (0, 1]"),
    ("top_p", 1.01, "a number in (0, 1]"),
    ("top_p", math.nan, "a number in (0, 1]"),
    ("top_p", math.inf, "a number in (0, 1]"),
    ("top_p", "0.9", "a number in (0, 1]"),
    ("top_p", True, "a number in (0, 1]"),
    ("stop", "\n", "non-empty strings"),
    ("stop", ["\n"], "non-empty strings"),
    ("stop", ("",), "non-empty strings"),
    ("stop", ("ok", ""), "non-empty strings"),
    ("stop", (b"\n",), "non-empty strings"),
    ("stop", (3,), "non-empty strings"),
    ("stop", None, "non-empty strings"),
    ("ignore_eos", "no", "True or False"),
    ("coupled", 1, "True or False"),
    ("budget", 4097, "a whole number from 0 to 4096, or auto"),
    ("min_p", -0.1, "a number in [0, 1]"),
    ("min_p", 1.01, "a number in [0, 1]"),
    ("min_p", math.nan, "a number in [0, 1]"),
    ("min_p", "0.1", "a number in [0, 1]"),
    ("typical_p", 0, "a number in (0, 1]"),
    ("typical_p", 1.5, "a number in (0, 1]"),
    ("typical_p", True, "a number in (0, 1]"),
    ("repetition_penalty", 0, "a number from 0.01 to 100"),
    ("repetition_penalty", -1.1, "a number from 0.01 to 100"),
    ("repetition_penalty", math.nan, "a number from 0.01 to 100"),
    ("repetition_penalty", 1e9, "a number from 0.01 to 100"),
    ("repetition_penalty", None, "a number from 0.01 to 100"),
    ("presence_penalty", math.inf, "a number from -100 to 100"),
    ("presence_penalty", "2", "a number from -100 to 100"),
    ("frequency_penalty", math.nan, "a number from -100 to 100"),
    ("frequency_penalty", -101, "a number from -100 to 100"),
    ("logit_bias", {5: 1.0}, "pairs of a token id and a number up to 1e+06"),
    ("logit_bias", ((5,),), "pairs of a token id and a number up to 1e+06"),
    ("logit_bias", ((-5, 1.0),), "pairs of a token id and a number up to 1e+06"),
    ("logit_bias", ((True, 1.0),), "pairs of a token id and a number up to 1e+06"),
    ("logit_bias", ((5, math.inf),), "pairs of a token id and a number up to 1e+06"),
    ("logit_bias", ((5, math.nan),), "pairs of a token id and a number up to 1e+06"),
    ("logit_bias", ((5, "1"),), "pairs of a token id and a number up to 1e+06"),
    ("logit_bias", ((5, 1.0), (5, 2.0)), "one number for a token"),
    ("bad_words", "fox", "strings with some text, in UTF-8"),
    ("bad_words", ("",), "strings with some text, in UTF-8"),
    ("bad_words", (" ",), "strings with some text, in UTF-8"),
    ("bad_words", ("caf\udce9",), "strings with some text, in UTF-8"),
    ("bad_words_ids", (7,), "sequences of one token id or more"),
    ("bad_words_ids", ((),), "sequences of one token id or more"),
    ("bad_words_ids", ((7, -1),), "sequences of one token id or more"),
    ("bad_words_ids", ((7, 1.0),), "sequences of one token id or more"),
    ("bad_words_ids", None, "sequences of one token id or more"),
    ("suppress_tokens", 7, "token ids"),
    ("suppress_tokens", ("7",), "token ids"),
    ("suppress_tokens", (-7,), "token ids"),
    ("min_new_tokens", -1, "a whole number from 0 to 256"),
    ("min_new_tokens", 257, "a whole number from 0 to 256"),
    ("min_new_tokens", 2.0, "a whole number from 0 to 256"),
    ("logprobs", -1, "a whole number from 0 to 1000, or None"),
    ("logprobs", 1001, "a whole number from 0 to 1000, or None"),
    ("logprobs", True, "a whole number from 0 to 1000, or None"),
]


@pytest.mark.parametrize(("argument", "value", "expected"), BAD)
def test_a_bad_value_is_an_error_that_names_argument_expected_and_got(
    argument: str, value: object, expected: str
) -> None:
    with pytest.raises(OptionError) as caught:
        DecodeConfig(**{argument: value})
    error = caught.value
    assert error.argument == argument
    assert error.expected == expected
    assert error.got == repr(value)
    assert error.remedy.endswith(".")
    assert str(error) == f"{argument}: expected {expected}, got {value!r}. {error.remedy}"


@pytest.mark.parametrize(
    "options",
    [
        {"method": "ar"},
        {"method": "dflash"},
        {"budget": 0},
        {"budget": 4096},
        {"budget": "auto"},
        {"temperature": 0},
        {"temperature": 0.0},
        {"temperature": 1},
        {"temperature": 5e-324},
        {"top_k": 1},
        {"top_k": None},
        {"top_p": 1},
        {"top_p": 1.0},
        {"top_p": 5e-324},
        {"seed": 0},
        {"seed": 2**64 - 1},
        {"max_new_tokens": 1},
        {"stop": ()},
        {"stop": ("\n\n", "END")},
        {"ignore_eos": True},
        {"coupled": False},
        {"min_p": 0},
        {"min_p": 1.0},
        {"typical_p": 1},
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 100},
        {"presence_penalty": -100, "frequency_penalty": 100.0},
        {"logit_bias": ((0, -math.inf), (7, 1e6), (9, -3))},
        {"bad_words": ("fox", " fox")},
        {"bad_words_ids": ((7,), (9, 3))},
        {"suppress_tokens": (0, 0)},
        {"min_new_tokens": 256},
        {"min_new_tokens": 3, "max_new_tokens": 3},
        {"logprobs": 0},
        {"logprobs": 1000},
    ],
)
def test_values_at_the_borders_are_accepted(options: dict[str, object]) -> None:
    config = DecodeConfig(**options)
    assert {name: getattr(config, name) for name in options} == options


def test_an_option_error_is_a_user_error_and_a_value_error() -> None:
    with pytest.raises(ValueError, match="budget"):
        DecodeConfig(budget=-1)
    assert issubclass(OptionError, UserError)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError, match="tempreature"):
        DecodeConfig(tempreature=1.0)


def test_options_are_keyword_only() -> None:
    with pytest.raises(TypeError):
        DecodeConfig("ar")


def test_a_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        DecodeConfig().budget = 3
