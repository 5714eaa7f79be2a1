"""What a user can get wrong, one class per kind of mistake (docs/architecture.md, "Errors").

Every message names the argument, what was expected, what came, and the remedy. The command line
turns any `UserError` into one line on standard error and exit code 2. Bugs of our own are asserts.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial


class UserError(ValueError):
    """A mistake that the user can mend.

    Args:
        argument: the flag, parameter, file or tensor at fault.
        expected: what would have been right.
        got: what came.
        remedy: what to do about it, as a sentence.

    >>> print(UserError("budget", expected="a whole number >= 0", got=-1, remedy="Try budget=16."))
    budget: expected a whole number >= 0, got -1. Try budget=16.
    """

    def __init__(self, argument: str, *, expected: str, got: object, remedy: str) -> None:
        super().__init__(f"{argument}: expected {expected}, got {got}. {remedy}")
        self.argument = argument
        self.expected = expected
        self.got = str(got)
        self.remedy = remedy

    def __reduce__(self) -> tuple[object, ...]:
        # Workers of `ddtree train respond` hand their errors to the parent process.
        said = {"expected": self.expected, "got": self.got, "remedy": self.remedy}
        return partial(type(self), **said), (self.argument,)


class OptionError(UserError):
    """An option outside its range or of the wrong kind."""


class PromptError(UserError):
    """A prompt that is empty, unreadable, or not text, messages or token ids."""


class ContextLengthError(UserError):
    """Prompt and new tokens together do not fit into the target's context."""


class ModelNotFoundError(UserError):
    """A model id, alias or folder that does not lead to a readable model."""


class UnsupportedModelError(UserError):
    """A model or checkpoint that would load and be silently wrong, refused by name."""


class CheckpointError(UserError):
    """A checkpoint with missing, extra or misshapen tensors, or a broken configuration."""


class PairMismatchError(UserError):
    """A drafter that does not belong to this target."""


class DownloadError(UserError):
    """A download that failed or did not have the expected content."""


class CacheWriteError(UserError):
    """The cache folder cannot be written: full disk, no permission, read-only."""


class BackendError(UserError):
    """A device, dtype or attention implementation that is missing here."""


class MarginalsError(UserError):
    """Marginals that no tree can be built from: NaN, unsorted, or of mismatched shapes."""


class TraceError(UserError):
    """A trace file that is not one of ours, is damaged, or lacks what was asked of it."""


class BuilderError(UserError):
    """A tree builder that cannot be found, or whose trees could not be verified."""


def first_line(error: Exception) -> str:
    """The first line of another library's message, for a message of ours."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip() if lines else type(error).__name__


def listed(names: Iterable[str], limit: int = 8) -> str:
    """Names in a row, cut short where there are too many to read.

    >>> listed("abc", limit=2)
    'a, b and 1 more'
    """
    items = list(names)
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more
