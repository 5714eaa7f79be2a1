"""Names of tokens: nothing invisible, nothing that a terminal obeys, bytes spelled out."""

from __future__ import annotations

import pytest

from ddtree.viewer.token_names import TokenNames, visible
from tests.support.models import VOCAB_SIZE
from tests.support.rounds import WordTokenizer
from tests.support.tokenizers import tiny_tokenizer


@pytest.mark.parametrize(
    ("text", "unicode", "ascii_"),
    [
        (" two", "·two", '" two"'),
        ("\n\n  ", "⏎⏎··", '"\\n\\n  "'),
        ("\t\r", "⇥␍", '"\\t\\r"'),
        ("\x1b[31m", "\\x1b[31m", '"\\x1b[31m"'),
        ("a\u2028b", "a\\u2028b", '"a\\u2028b"'),
        ("\u202e", "\\u202e", '"\\u202e"'),
        ("né🙂", "né🙂", '"n\\xe9\\U0001f642"'),
        ('a"x"\\', 'a"x"\\', '"a\\"x\\"\\\\"'),
        ("", "", '""'),
    ],
)
def test_text_is_made_visible(text: str, unicode: str, ascii_: str) -> None:
    assert visible(text) == unicode
    assert visible(text, ascii_only=True) == ascii_
    assert visible(text, ascii_only=True).isascii()


def test_names_keep_the_space_in_front_and_show_special_tokens() -> None:
    tokenizer = tiny_tokenizer()
    names = TokenNames(tokenizer)
    ids = tokenizer("hello world")["input_ids"]
    assert "".join(map(names.text, ids)) == "hello world"
    assert names.text(tokenizer.eos_token_id) == "<|end|>"


def test_half_a_character_is_shown_as_its_bytes() -> None:
    class Bytes(WordTokenizer):
        def decode(self, ids: list[int], **options: bool) -> str:
            return "\ufffd"

    # Byte-level BPE spells the bytes e2 9c as two letters of its own; SentencePiece as they are.
    names = TokenNames(Bytes(["âľ", "<0xE2>"]))
    assert [names.text(i) for i in (0, 1)] == ["<0xE2><0x9C>", "<0xE2>"]


def test_a_first_word_of_sentencepiece_keeps_its_space() -> None:
    class SentencePiece(WordTokenizer):
        def decode(self, ids: list[int], **options: bool) -> str:
            return super().decode(ids).replace("\u2581", " ").removeprefix(" ")

    names = TokenNames(SentencePiece(["\u2581two", "two"]))
    assert [names.text(i) for i in (0, 1)] == [" two", "two"]


def test_an_id_beyond_the_tokenizer_is_a_number() -> None:
    tokenizer = tiny_tokenizer()
    assert TokenNames(tokenizer).text(VOCAB_SIZE + 5) == f"#{VOCAB_SIZE + 5}"
