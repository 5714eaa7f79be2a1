"""What several commands of the command line read alike: the prompt and the budget."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ddtree.errors import OptionError, PromptError

if TYPE_CHECKING:
    from ddtree.prompt import Prompt


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a command was asked to answer.

    Args:
        prompt: the user's message.
        system: goes first; None leaves it to the chat template.
        raw: no chat template around the prompt.

    Raises:
        OptionError: a system message where there is no template for it.
    """

    prompt: str
    system: str | None
    raw: bool

    def __post_init__(self) -> None:
        if self.raw and self.system is not None:
            raise OptionError(
                "--system",
                expected="no system message with --raw",
                got=repr(self.system),
                remedy="Leave out one of them: --raw gives the prompt as it is.",
            )

    @property
    def messages(self) -> Prompt:
        """As `Pair.run` takes it."""
        if self.raw:
            return self.prompt
        user = {"role": "user", "content": self.prompt}
        return [{"role": "system", "content": self.system}, user] if self.system else [user]


def parse_budget(text: str) -> int | Literal["auto"]:
    """A number where it is one; anything else is refused by the config, by name."""
    return int(text) if re.fullmatch(r"[+-]?\d+", text) else text  # type: ignore[return-value]


def read_prompt(prompt: str) -> str:
    """The prompt of the command line, or standard input's where it is "-".

    Raises:
        PromptError: an empty one, or bytes that are not UTF-8.
    """
    text = _read_standard_input() if prompt == "-" else prompt
    # Checked here because a message that wraps it would no longer be empty.
    if not text.strip():
        raise PromptError(
            "prompt",
            expected="a prompt with some text",
            got="an empty one",
            remedy='Give it in quotes, or "-" to read it from standard input.',
        )
    return text


def _read_standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(
            "prompt",
            expected="UTF-8 text on standard input",
            got=str(error),
            remedy="Convert the input to UTF-8 first.",
        ) from error
