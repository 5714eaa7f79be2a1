"""Text held to a grammar: always in it, and one text whatever the method."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ddtree.config import DecodeConfig
from ddtree.errors import OptionError
from ddtree.models.target import Target
from ddtree.pair import Pair
from tests.support import drafters
from tests.support.models import VOCAB_SIZE, tiny_model

PROMPT = [5, 17, 42, 8]
EOS = 0
ANIMAL = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
        "tame": {"type": "boolean"},
        "kind": {"enum": ["cat", "dog", None]},
    },
    "required": ["name", "legs", "tame", "kind"],
    "additionalProperties": False,
}
EXPRESSION = r"(yes|no), [a-f]{4,9}( and [0-9]{1,3}){2}\."

pytestmark = pytest.mark.usefixtures("unchecked")


def letters() -> PreTrainedTokenizerFast:
    """A token for each character that JSON needs, and a few longer ones, where ways part."""
    texts = ["<|end|>", *'{}[]":,.- _', *"abcdefghijklmnopqrstuvwxyz", *"0123456789"]
    texts += ['":', '{"', "tr", "ue", "fal", "an", "do"]
    vocabulary = {text.replace(" ", "Ġ"): i for i, text in enumerate(texts)}
    assert len(vocabulary) == len(texts) <= VOCAB_SIZE
    # Tokens of several characters need no merges: llguidance reads the vocabulary alone.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


@pytest.fixture(autouse=True)
def eos() -> Iterator[None]:
    config = tiny_model("llama").generation_config
    config.eos_token_id = EOS
    yield
    config.eos_token_id = None


def target() -> Target:
    return Target(tiny_model("llama"), letters(), name="tiny")


def texts(**options: object) -> set[str]:
    """What the methods say, with drafters that are right, and right at another rank in turn."""
    plain = Pair(target(), None).generate(PROMPT, method="ar", max_new_tokens=120, **options)
    assert plain.finish_reason == "stop"
    script = PROMPT + list(plain.token_ids)
    said = {plain.text}
    for method, drafter in (
        ("dflash", drafters.perfect(script, VOCAB_SIZE)),
        ("ddtree", drafters.right_at_rank(lambda position: position % 3, script, VOCAB_SIZE)),
    ):
        pair = Pair(target(), drafter)
        drafted = pair.generate(PROMPT, method=method, budget=16, max_new_tokens=120, **options)
        assert drafted.token_ids == plain.token_ids, method
        said.add(drafted.text)
    return said


RULES = [{}, *({"temperature": 1.3, "seed": seed} for seed in range(2))]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_json_schema_is_kept_and_every_method_says_the_same(rule: dict[str, object]) -> None:
    (text,) = texts(json_schema=ANIMAL, **rule)
    said = json.loads(text)
    assert list(said) == list(ANIMAL["properties"])
    assert isinstance(said["name"], str)
    assert len(said["name"]) <= 6
    assert said["legs"] in range(9)
    assert isinstance(said["tame"], bool)
    assert said["kind"] in ("cat", "dog", None)
    assert text == json.dumps(said, ensure_ascii=False)


@pytest.mark.parametrize("rule", RULES[:2], ids=str)
def test_a_regular_expression_is_kept_and_every_method_says_the_same(
    rule: dict[str, object],
) -> None:
    (text,) = texts(regex=EXPRESSION, repetition_penalty=1.2, **rule)
    assert re.fullmatch(EXPRESSION, text)


def test_a_users_processor_cannot_lift_the_grammars_bans() -> None:
    pair = Pair(target(), None)
    said = pair.generate(
        PROMPT,
        method="ar",
        max_new_tokens=9,
        regex="(cat|dog)",
        logits_processor=[lambda ids, s: 0 * s + 1e4],
    )
    assert said.text in ("cat", "dog")


def test_the_rule_asked_twice_about_one_text_says_the_same() -> None:
    pair = Pair(target(), None)
    said = pair.generate(PROMPT, method="ar", max_new_tokens=9, json_schema=ANIMAL)
    rule = pair.rule(DecodeConfig(json_schema=json.dumps(ANIMAL)), len(PROMPT))
    text = PROMPT + list(said.token_ids[:4])
    logits = torch.zeros(VOCAB_SIZE)
    first = rule.scores(logits, text)
    rule.scores(logits, text[:-2])
    assert torch.equal(rule.scores(logits, text), first)
    assert 0 < first.isfinite().sum() < VOCAB_SIZE


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regex": "(cat"}, "regex: expected what llguidance can follow, got .*unclosed group"),
        ({"json_schema": {"type": "nonsense"}}, "json_schema: .*Invalid type: nonsense"),
        ({"json_schema": "{"}, "json_schema: expected a JSON object"),
        ({"json_schema": "[]"}, "json_schema: expected a JSON object"),
        ({"json_schema": {"a": {1, 2}}}, "json_schema: expected a JSON object"),
        ({"regex": ""}, "regex: expected a regular expression"),
        ({"regex": "a", "json_schema": {}}, "regex: expected no json_schema beside it"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos: expected False with json_schema"),
    ],
    ids=str,
)
def test_what_cannot_be_followed_is_refused_before_any_work(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        Pair(target(), None).stream(PROMPT, method="ar", max_new_tokens=9, **options)


def test_a_target_that_no_grammar_can_work_with_is_refused() -> None:
    without = Pair(Target(tiny_model("llama"), None, name="tiny"), None)
    with pytest.raises(OptionError, match="a target with a fast tokenizer"):
        without.stream(PROMPT, method="ar", max_new_tokens=9, regex="a")
    tiny_model("llama").generation_config.eos_token_id = None
    with pytest.raises(OptionError, match="expected stop tokens"):
        Pair(target(), None).stream(PROMPT, method="ar", max_new_tokens=9, regex="a")


def test_without_the_extra_the_message_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(OptionError, match=r"pip install 'ddtree\[grammar\]'"):
        Pair(target(), None).stream(PROMPT, method="ar", max_new_tokens=9, regex="a")
