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

from ddtree.budget import Experience
from ddtree.config import DecodeConfig
from ddtree.costs import CostProfile
from ddtree.errors import OptionError
from ddtree.models.target import Target
from ddtree.options import as_json
from ddtree.pair import Pair
from ddtree.sampling.grammar import Grammars
from ddtree.types import Generation, Marginals
from tests.support import drafters
from tests.support.first_order import FirstOrderDrafter
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
PROFILE = CostProfile(contexts=(64,), rows=(1, 33), verify=((0.05, 0.06),), draft=0.001)
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


# What is drafted.


class Unchangeable:
    """A drafter whose logits cannot be changed: only what it says of its ranks can."""

    layer_ids, num_depths = (1, 2), 7

    def __init__(self, logits: drafters.Logits) -> None:
        self.drafter = drafters.LogitsDrafter(logits)

    def start(self, capacity: int) -> Unchangeable:
        self.session = self.drafter.start(capacity)
        return self

    def extend(self, features: torch.Tensor, token_ids: torch.Tensor) -> None:
        self.session.extend(features, token_ids)

    def propose(self, root_id: int, *, num_depths: int, num_ranks: int) -> Marginals:
        return self.session.propose(root_id, num_depths=num_depths, num_ranks=num_ranks)


def weak(script: list[int]) -> drafters.Logits:
    """Logits that favour the text a little among many others."""
    numbers = torch.randn((len(script) + 8, VOCAB_SIZE), generator=torch.Generator().manual_seed(3))
    numbers[torch.arange(len(script)), script] += 1.5
    return lambda length, root_id, num_depths: 2 * numbers[length + 1 : length + 1 + num_depths]


HALF = torch.arange(0, VOCAB_SIZE, 2)
DRAFTS = [
    {"method": "dflash", "budget": 7},
    {"method": "ddtree", "budget": 8},
    {"method": "ddtree", "budget": "auto"},
]


def drafted(drafter: object, options: dict[str, object]) -> Generation:
    pair = Pair(target(), drafter)
    pair.__dict__["experience"] = Experience(PROFILE, 7)
    return pair.generate(PROMPT, max_new_tokens=120, **options)


def illegal_nodes(generation: Generation, options: dict[str, object]) -> int:
    """Counts the nodes that the grammar does not accept behind the text before them."""
    config = DecodeConfig(
        json_schema=as_json(options.get("json_schema")), regex=options.get("regex")
    )
    state = Grammars(letters(), VOCAB_SIZE, [EOS]).of(config).start()
    found = 0
    for done in generation.rounds:
        if done.tree is not None:
            paths = [[]]
            for parent, token in zip(done.tree.parents[1:], done.tree.token_ids[1:], strict=True):
                paths.append([*paths[parent], int(token)])
            found += sum(state.validate_tokens(path) < len(path) for path in paths)
        state.consume_tokens(list(done.token_ids))
    return found


@pytest.mark.parametrize(
    ("constraint", "coupled"),
    [
        ({"json_schema": ANIMAL}, None),
        ({"regex": EXPRESSION}, True),
        ({"regex": EXPRESSION}, False),
    ],
    ids=["schema, greedy", "regex, coupled", "regex, plain"],
)
def test_no_node_is_illegal_and_the_rounds_are_fewer_and_the_text_is_the_same(
    constraint: dict[str, object], coupled: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = dict(constraint)
    if coupled is not None:
        options |= {"temperature": 1.1, "seed": 3, "coupled": coupled}
    expected = Pair(target(), None).generate(PROMPT, method="ar", max_new_tokens=120, **options)
    logits = weak([*PROMPT, *expected.token_ids])
    kinds = {
        "all": drafters.LogitsDrafter(logits),
        "half": drafters.LogitsDrafter(
            lambda *place: logits(*place)[:, HALF], draft_token_ids=HALF
        ),
    }
    if not coupled:
        kinds["unchangeable"] = Unchangeable(logits)
    for name, drafter in kinds.items():
        for how in DRAFTS:
            legal = drafted(drafter, options | how)
            assert legal.token_ids == expected.token_ids, (name, how)
            assert illegal_nodes(legal, options) == 0, (name, how)
            with monkeypatch.context() as patch:
                patch.setattr("ddtree.pair.legality_of", lambda rule, vocab_size: None)
                free = drafted(drafter, options | how)
            assert free.token_ids == expected.token_ids
            assert illegal_nodes(free, options) > 0
            if how["budget"] != "auto":  # which depends on time
                assert legal.num_rounds < 0.75 * free.num_rounds, (name, how)


@pytest.mark.parametrize("rule", [{}, {"temperature": 1.1, "seed": 3}], ids=["greedy", "coupled"])
def test_no_node_of_a_first_order_draft_is_illegal(rule: dict[str, object]) -> None:
    options = {"json_schema": ANIMAL, **rule}
    expected = Pair(target(), None).generate(PROMPT, method="ar", max_new_tokens=120, **options)
    for how in DRAFTS[:2]:
        drafter = FirstOrderDrafter([*PROMPT, *expected.token_ids], VOCAB_SIZE)
        said = drafted(drafter, options | how)
        assert said.token_ids == expected.token_ids, how
        assert illegal_nodes(said, options) == 0, how


def test_what_the_grammar_forces_is_drafted_without_a_drafter_that_knows_it() -> None:
    """A text of 12 letters, forced but for the first, takes two rounds of 7 depths."""
    expected = "(abcdefghijk|bbcdefghijk)"
    pair = Pair(target(), drafters.random_drafter(3, VOCAB_SIZE))
    said = pair.generate(PROMPT, method="dflash", budget=7, regex=expected, max_new_tokens=30)
    assert said.num_tokens == 12
    assert said.num_rounds == 2


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
