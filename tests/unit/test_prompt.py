"""From a prompt to token ids: four kinds, and a clear error for everything else."""

from __future__ import annotations

import copy

import pytest
from transformers import PreTrainedTokenizerBase

from ddtree.errors import ContextLengthError, PromptError, UserError
from ddtree.models.target import Target
from ddtree.prompt import check_fits, encode
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.tokenizers import tiny_tokenizer

pytestmark = pytest.mark.usefixtures("unchecked")


def target_with(tokenizer: PreTrainedTokenizerBase | None) -> Target:
    return Target(tiny_model("llama"), tokenizer, name="tiny")


@pytest.fixture
def target() -> Target:
    return target_with(tiny_tokenizer())


@pytest.fixture
def no_template() -> Target:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = None
    return target_with(tokenizer)


def text_of(ids: list[int], target: Target) -> str:
    return target.tokenizer.decode(ids)


def refusal(prompt: object, target: Target, *, raw: bool = False) -> UserError:
    with pytest.raises(PromptError) as caught:
        encode(prompt, target, raw=raw)
    error = caught.value
    assert error.argument == "prompt"
    for part in (error.expected, error.got, error.remedy):
        assert part
        assert part in str(error)
    return error


def test_text_is_a_user_message_in_the_chat_template(target: Target) -> None:
    ids = encode("hello world", target, raw=False)
    assert text_of(ids, target) == "user: hello world<|end|>assistant: "
    assert ids == encode([{"role": "user", "content": "hello world"}], target, raw=False)


def test_messages_go_through_the_chat_template_in_order(target: Target) -> None:
    messages = [
        {"role": "system", "content": "why"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "the fox"},
        {"role": "user", "content": ""},
    ]
    expected = "system: why<|end|>user: hello<|end|>assistant: the fox<|end|>user: <|end|>"
    assert text_of(encode(messages, target, raw=False), target) == expected + "assistant: "
    assert encode(tuple(messages), target, raw=True) == encode(messages, target, raw=False)


def test_a_special_token_written_in_the_template_is_one_token(target: Target) -> None:
    ids = encode("hello", target, raw=False)
    assert ids.count(target.tokenizer.eos_token_id) == 1


def test_raw_text_is_taken_as_it_is(target: Target, no_template: Target) -> None:
    ids = encode("  hello world ", target, raw=True)
    assert text_of(ids, target) == "  hello world "
    assert encode("  hello world ", no_template, raw=True) == ids


@pytest.mark.parametrize("ids", [[0], [5, 17, 42], (5, 17, 42), range(3), [VOCAB_SIZE - 1] * 3])
@pytest.mark.parametrize("with_tokenizer", [True, False])
def test_token_ids_are_taken_as_they_are(ids: object, with_tokenizer: bool) -> None:
    target = target_with(tiny_tokenizer() if with_tokenizer else None)
    assert encode(ids, target, raw=False) == list(ids) == encode(ids, target, raw=True)


def test_the_callers_list_is_not_the_one_that_grows(target: Target) -> None:
    ids = [1, 2, 3]
    encode(ids, target, raw=False).append(4)
    assert ids == [1, 2, 3]


@pytest.mark.parametrize("prompt", ["", " ", "\n\t  "])
@pytest.mark.parametrize("raw", [True, False])
def test_an_empty_text_is_refused(prompt: str, raw: bool, target: Target) -> None:
    assert refusal(prompt, target, raw=raw).got == "an empty one"


@pytest.mark.parametrize("prompt", [[], (), None, 3, 2.5, {1, 2}, b"hello", bytearray(b"hi")])
def test_what_is_neither_text_nor_messages_nor_ids_is_refused(
    prompt: object, target: Target
) -> None:
    assert refusal(prompt, target).got == repr(prompt)


def test_one_message_outside_a_list_is_refused(target: Target) -> None:
    assert "messages" in refusal({"role": "user", "content": "hello"}, target).expected


@pytest.mark.parametrize("wrong", [VOCAB_SIZE, -1, 10**30, 1.0, True, "7", None, [1]])
def test_an_id_out_of_range_or_of_another_kind_is_named(wrong: object, target: Target) -> None:
    error = refusal([1, wrong, 2], target)
    assert error.expected == f"token ids from 0 to {VOCAB_SIZE - 1}"
    assert error.got == repr(wrong)


def test_ids_and_messages_do_not_mix(target: Target) -> None:
    message = {"role": "user", "content": "hello"}
    assert refusal([1, message], target).got == repr(message)
    assert refusal([message, "hello"], target).got == repr(message)


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"role": "user"},
        {"content": "hello"},
        {"role": "user", "content": None},
        {"role": 1, "content": "hello"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    ],
)
def test_a_message_without_role_or_text_is_shown(
    message: dict[str, object], target: Target
) -> None:
    error = refusal([{"role": "user", "content": "hello"}, message], target)
    assert error.got == repr(message)
    assert '{"role": "user", "content": "..."}' in error.expected


def test_without_a_template_raw_is_the_remedy(no_template: Target) -> None:
    for prompt in ("hello", [{"role": "user", "content": "hello"}]):
        error = refusal(prompt, no_template)
        assert "tiny" in error.expected
        assert "raw=True (--raw)" in error.remedy


@pytest.mark.parametrize("raw", [True, False])
def test_without_a_tokenizer_only_ids_will_do(raw: bool) -> None:
    error = refusal("hello", target_with(None), raw=raw)
    assert error.got == "text"
    assert "token ids" in error.remedy


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0]['role'] | no_such_filter }}",
        "{% for m in messages %}",
    ],
)
def test_messages_that_the_template_does_not_take_say_why(template: str) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = template
    error = refusal("hello", target_with(tokenizer))
    assert "chat template of tiny" in error.expected
    assert len(error.got) > 10


@pytest.mark.parametrize("raw", [True, False])
def test_text_of_no_known_character_is_refused_when_nothing_is_left(
    raw: bool, target: Target
) -> None:
    # The tiny tokenizer has no token for these bytes; in a template, other tokens remain.
    if raw:
        assert refusal("Ω", target, raw=True).got == "none"
    else:
        assert encode("Ω", target, raw=False)


@pytest.mark.parametrize("raw", [True, False])
def test_half_a_character_is_refused(raw: bool, target: Target) -> None:
    """Bytes of the shell that are not UTF-8 arrive so in a program's arguments."""
    error = refusal("hello \udcff", target, raw=raw)
    assert "UTF-8" in error.expected
    assert "UTF-8" in error.remedy


def test_an_id_of_the_tokenizer_that_the_model_lacks_is_refused() -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.add_tokens(["<|extra|>"])
    error = refusal("hello <|extra|>", target_with(tokenizer), raw=True)
    assert error.got == str(VOCAB_SIZE)


@pytest.mark.parametrize(("num_prompt", "num_new"), [(1, 1), (200, 56), (255, 1), (1, 255)])
def test_what_fits_into_the_context_passes(num_prompt: int, num_new: int, target: Target) -> None:
    check_fits(num_prompt, num_new, target)


@pytest.mark.parametrize(
    ("num_prompt", "num_new", "remedy"),
    [
        (200, 57, "Ask for at most 56 new tokens."),
        (255, 2, "Ask for at most 1 new tokens."),
        (256, 1, "Shorten the prompt."),
        (300, 1, "Shorten the prompt."),
    ],
)
def test_what_does_not_fit_says_how_much_would(
    num_prompt: int, num_new: int, remedy: str, target: Target
) -> None:
    with pytest.raises(ContextLengthError) as caught:
        check_fits(num_prompt, num_new, target)
    assert caught.value.remedy == remedy
    assert caught.value.expected.endswith("the context of 256")
    assert caught.value.got == f"{num_prompt} + {num_new} tokens"
