"""When a text ends: stop tokens, stop strings, the length limit."""

import pytest

from ddtree.stopping import TextStopping
from ddtree.text import TextStream

STOP = 2


class OneStringStream(TextStream):
    """Says that a stop string is complete at given pushes; needs no tokenizer."""

    def __init__(self, complete_at: int | None) -> None:
        self.pushed: list[int] = []
        self.complete_at = complete_at

    def push(self, token: int) -> bool:
        self.pushed.append(token)
        return len(self.pushed) - 1 == self.complete_at


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_the_limit_ends_the_text_at_exactly_that_many_tokens(limit: int) -> None:
    stopping = TextStopping(limit, (STOP,), None)
    for left in range(limit, 0, -1):
        assert stopping.room == left
        assert stopping.push(7) == ("length" if left == 1 else None)
    assert stopping.room == 0


@pytest.mark.parametrize("place", range(5))
def test_a_stop_token_ends_the_text_wherever_it_comes(place: int) -> None:
    stopping = TextStopping(5, (STOP, 9), None)
    reasons = [stopping.push(token) for token in [7] * place + [STOP]]
    # At the last place both apply: the text is complete, so "stop".
    assert reasons == [None] * place + ["stop"]
    assert stopping.room == 5 - place - 1


def test_every_stop_token_counts() -> None:
    for token in (2, 9):
        assert TextStopping(5, [2, 9], None).push(token) == "stop"


def test_without_stop_tokens_only_the_limit_ends_the_text() -> None:
    stopping = TextStopping(3, (), None)
    assert [stopping.push(STOP) for _ in range(3)] == [None, None, "length"]


@pytest.mark.parametrize("place", range(4))
def test_a_stop_string_ends_the_text_wherever_it_is_complete(place: int) -> None:
    stopping = TextStopping(4, (STOP,), OneStringStream(place))
    assert [stopping.push(7) for _ in range(place + 1)] == [None] * place + ["stop"]


def test_the_stream_is_told_of_every_token_the_last_one_included() -> None:
    stream = OneStringStream(None)
    stopping = TextStopping(9, (STOP,), stream)
    for token in (7, 8, STOP):
        stopping.push(token)
    assert stream.pushed == [7, 8, STOP]
