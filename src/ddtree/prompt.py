"""From what a user calls a prompt to token ids: text, chat messages, or ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ddtree.errors import ContextLengthError, PromptError
from ddtree.models.target import Target

Message = Mapping[str, str]
Prompt = str | Sequence[Message] | Sequence[int]


def encode(prompt: Prompt, target: Target, *, raw: bool) -> list[int]:
    """Token ids of a prompt.

    Args:
        prompt: text (a user message, unless raw), chat messages, or token ids.
        target: whose tokenizer and chat template are used.
        raw: take text as it is, without the chat template.

    Raises:
        PromptError: empty, of another kind, ids out of range, or no tokenizer or template for it.
    """
    if isinstance(prompt, str):
        if not prompt.strip():
            raise _error("a prompt with some text", "an empty one", "Say something.")
        if raw:
            return _checked(_text_ids(_tokenizer(target), prompt), target)
        return _chat([{"role": "user", "content": prompt}], target)
    # bytes are a sequence of numbers too, but nobody means them as token ids.
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray)
    items = list(prompt) if is_list else None
    if not items:
        raise _error("text, chat messages or token ids", repr(prompt), "Give at least one.")
    if all(isinstance(item, Mapping) for item in items):
        return _chat(items, target)
    return _checked(items, target)


def check_fits(num_prompt_tokens: int, max_new_tokens: int, target: Target) -> None:
    """Refuse, before any work, what would run past the target's context.

    Raises:
        ContextLengthError: names the most new tokens that would fit.
    """
    limit = target.context_limit
    room = limit - num_prompt_tokens
    if max_new_tokens <= room:
        return
    remedy = f"Ask for at most {room} new tokens." if room > 0 else "Shorten the prompt."
    raise ContextLengthError(
        "prompt",
        expected=f"prompt and new tokens within the context of {limit}",
        got=f"{num_prompt_tokens} + {max_new_tokens} tokens",
        remedy=remedy,
    )


def _chat(messages: Sequence[object], target: Target) -> list[int]:
    tokenizer = _tokenizer(target)
    for message in messages:
        fine = isinstance(message, Mapping) and all(
            isinstance(message.get(key), str) for key in ("role", "content")
        )
        if not fine:
            raise _error(
                'messages like {"role": "user", "content": "..."}',
                repr(message),
                "Give each message a role and a content of text.",
            )
    if tokenizer.chat_template is None:
        raise _error(
            f"a chat template in the tokenizer of {target.name}",
            "none",
            "Use raw=True (--raw) to give the text as it is.",
        )
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise _error(
            f"messages that the chat template of {target.name} takes",
            str(error),
            "Check the roles and their order.",
        ) from error
    return _checked(_text_ids(tokenizer, text, add_special_tokens=False), target)


def _text_ids(
    tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool = True
) -> list[object]:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        # Half a surrogate pair: how the shell's bytes that are not UTF-8 arrive in an argument.
        raise _error("text in UTF-8", str(error), "Convert it to UTF-8 first.") from error
    return list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])


def _tokenizer(target: Target) -> PreTrainedTokenizerBase:
    if target.tokenizer is None:
        raise _error(
            "token ids, since the target has no tokenizer",
            "text",
            "Give a list of token ids, or load a tokenizer with the model.",
        )
    return target.tokenizer


def _checked(token_ids: list[object], target: Target) -> list[int]:
    if not token_ids:
        raise _error("at least one token", "none", "Say something.")
    ids: list[int] = []
    for token in token_ids:
        whole = isinstance(token, int) and not isinstance(token, bool)
        if not whole or not 0 <= token < target.vocab_size:  # type: ignore[operator]
            raise _error(
                f"token ids from 0 to {target.vocab_size - 1}",
                repr(token),
                "Text goes in as a string, messages as dicts with role and content.",
            )
        ids.append(token)  # type: ignore[arg-type]
    return ids


def _error(expected: str, got: str, remedy: str) -> PromptError:
    return PromptError("prompt", expected=expected, got=got, remedy=remedy)
