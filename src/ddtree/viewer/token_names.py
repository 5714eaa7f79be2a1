"""How a single token is shown: its text, with whitespace and stray bytes made visible.

Knows no tree. A token is not always text: half a character, or a control character that a terminal
would obey.
"""

from __future__ import annotations

import re
from functools import cache

from transformers import PreTrainedTokenizerBase

_SENTENCEPIECE_SPACE = "\u2581"
_SIGNS = {" ": "\u00b7", "\n": "\u23ce", "\t": "\u21e5", "\r": "\u240d"}
_ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}


class TokenNames:
    """Names of a tokenizer's tokens; each is decoded once.

    Args:
        tokenizer: the target's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def text(self, token_id: int) -> str:
        """The token's text as it is; the bytes of half a character as `<0xE2><0x9C>`."""
        if token_id not in self._known:
            self._known[token_id] = self._text(token_id)
        return self._known[token_id]

    def _text(self, token_id: int) -> str:
        decoded: str = self._tokenizer.decode(
            [token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        piece: object = self._tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(piece, str):
            return decoded or f"#{token_id}"  # an id of the model's padding, beyond the tokenizer
        if "\ufffd" in decoded:
            return _escaped_bytes(piece)
        # SentencePiece's decoder drops the space in front of a first word.
        if piece.startswith(_SENTENCEPIECE_SPACE) and not decoded.startswith(" "):
            return " " + decoded
        return decoded or piece


def visible(text: str, *, ascii_only: bool = False) -> str:
    """Text on one line, with nothing invisible in it and nothing that a terminal would obey.

    Args:
        text: any.
        ascii_only: write in plain ASCII: between quotes, and escaped where need be.

    >>> visible(" a\\n"), visible(" a\\n", ascii_only=True)
    ('·a⏎', '" a\\\\n"')
    """
    if ascii_only:
        return '"' + "".join(map(_as_ascii, text)) + '"'
    return "".join(_SIGNS.get(c) or (c if c.isprintable() else _escape(c)) for c in text)


def _as_ascii(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    if character in '"\\':
        return "\\" + character
    return character if " " <= character <= "~" else _escape(character)


def _escape(character: str) -> str:
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _escaped_bytes(piece: str) -> str:
    """A token that is no whole character, as SentencePiece spells it."""
    table = _byte_alphabet()
    if re.fullmatch("<0x[0-9A-F]{2}>", piece) or not all(c in table for c in piece):
        return piece
    return "".join(f"<0x{table[c]:02X}>" for c in piece)


@cache
def _byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level BPE spells bytes: those that print, then U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}
