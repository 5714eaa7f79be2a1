"""How one text is generated: a frozen record, validated at birth."""

from __future__ import annotations

import json
import math
import reprlib
import sys
from dataclasses import dataclass
from typing import Literal

from ddtree.errors import OptionError
from ddtree.types import METHODS, Method

MAX_SEED = 2**64 - 1
# A verify forward of more rows costs more than any tree can win, and its mask is N x N.
MAX_BUDGET = 4096
# Alternatives beside a token's log-probability; more is a copy of the vocabulary per token.
MAX_LOGPROBS = 1000
# Beyond these, float32 would overflow or round the logits themselves away.
MAX_BIAS, MAX_PENALTY = 1e6, 100
AUTO: Literal["auto"] = "auto"


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Options of one generation.

    Args:
        method: "ar" (plain decoding), "dflash" (chain) or "ddtree" (tree).
        budget: B, the most nodes of a round besides the root, at most 4096; 0 means no
            speculation. "auto" gives every round as many as pay on this machine.
        temperature: 0 is greedy; above 0 sampling with noise by seed and position.
        top_k: keep the k most probable tokens; None keeps all. Without effect when greedy.
        top_p: keep the fewest tokens whose mass reaches p, in (0, 1]; None keeps all. Likewise.
        min_p: keep tokens at least p times as probable as the best, in [0, 1]. Likewise.
        typical_p: keep the mass p of tokens nearest to the expected surprise, in (0, 1]. Likewise.
        repetition_penalty: from 0.01 to 100; divides the positive logits of tokens that occur
            already, the prompt included, and multiplies the negative ones. 1 changes nothing.
        presence_penalty: taken from the logit of every token that occurs in the new text; from -100
            to 100, as the next.
        frequency_penalty: taken from it for every time the token occurs in the new text.
        logit_bias: pairs of token id and number, added to the token's logit; up to a million either
            way, or -inf, which bans it.
        bad_words: texts banned as the token sequences that spell them, alone and behind a space.
        bad_words_ids: token sequences that are never completed.
        suppress_tokens: ids of tokens that are never said.
        min_new_tokens: the model's stop tokens are banned until so many tokens have come. Stop
            strings end the text all the same.
        json_schema: a JSON schema, as JSON; the text is held to it. Needs the extra "grammar".
        regex: a regular expression for the whole text. Likewise; at most one of the two.
        logprobs: log-probabilities of the delivered tokens, with so many alternatives for each; 0
            gives the delivered tokens' alone, None none. They are the target's own, before
            anything above changed its logits.
        seed: 0 <= seed < 2**64; one seed gives one text, whatever the method.
        coupled: let the drafter see the noise that will pick the target's tokens: fewer rounds for
            the same text. Without effect when greedy.
        lookup: let a tree also propose what followed the same tokens earlier in the text. Method
            ddtree alone.
        max_new_tokens: the length limit, >= 1.
        stop: strings that end the text; they are not part of it.
        ignore_eos: do not end at the model's stop tokens.

    Raises:
        OptionError: an option outside its range or of the wrong type.

    >>> DecodeConfig(budget=32).method
    'ddtree'
    """

    method: Method = "ddtree"
    budget: int | Literal["auto"] = "auto"
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    min_new_tokens: int = 0
    json_schema: str | None = None
    regex: str | None = None
    logprobs: int | None = None
    seed: int = 0
    coupled: bool = True
    lookup: bool = True
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise OptionError(
                "method",
                expected=f"one of {', '.join(METHODS)}",
                got=repr(self.method),
                remedy="Use ddtree for draft trees, dflash for the chain, ar for plain decoding.",
            )
        if self.budget != AUTO:
            check_whole(
                "budget",
                self.budget,
                low=0,
                high=MAX_BUDGET,
                or_else=AUTO,
                remedy="auto measures what pays; 0 does not speculate.",
            )
        check_whole("max_new_tokens", self.max_new_tokens, low=1, remedy="Ask for a token or more.")
        check_whole("seed", self.seed, low=0, high=MAX_SEED, remedy="Any such number will do.")
        if self.top_k is not None:
            check_whole("top_k", self.top_k, low=1, remedy="Leave it out to keep all tokens.")
        _check_temperature(self.temperature)
        _check_filters(self.top_p, self.min_p, self.typical_p)
        _check_penalties(self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        _check_logit_bias(self.logit_bias)
        _check_bans(self.bad_words, self.bad_words_ids, self.suppress_tokens)
        check_whole(
            "min_new_tokens",
            self.min_new_tokens,
            low=0,
            high=self.max_new_tokens,
            remedy="0 lets the text end at once; more than max_new_tokens can never come.",
        )
        if self.logprobs is not None:
            check_whole(
                "logprobs",
                self.logprobs,
                low=0,
                high=MAX_LOGPROBS,
                or_else="None",
                remedy="0 gives the delivered tokens' log-probabilities alone.",
            )
        _check_stop(self.stop)
        _check_flag("coupled", self.coupled, "False drafts without the noise, for comparison.")
        _check_flag("lookup", self.lookup, "False drafts by the drafter alone, for comparison.")
        _check_flag("ignore_eos", self.ignore_eos, "True goes on past the model's stop tokens.")
        _check_grammar(self.json_schema, self.regex, self.ignore_eos)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_whole(
    name: str,
    value: object,
    *,
    low: int,
    remedy: str,
    high: int | None = None,
    or_else: str | None = None,
) -> None:
    """Refuse what is no whole number in a range.

    Args:
        name: of the option.
        value: what came; True and False are no numbers.
        low: the least.
        remedy: what to do instead.
        high: the most, or None for no limit.
        or_else: another value that is fine, for the message.

    Raises:
        OptionError: it is not.
    """
    whole = isinstance(value, int) and not isinstance(value, bool)
    if whole and value >= low and (high is None or value <= high):  # type: ignore[operator]
        return
    limit = f">= {low}" if high is None else f"from {low} to {high}"
    limit += "" if or_else is None else f", or {or_else}"
    raise OptionError(name, expected=f"a whole number {limit}", got=repr(value), remedy=remedy)


def _check_flag(name: str, value: object, remedy: str) -> None:
    if not isinstance(value, bool):
        raise OptionError(name, expected="True or False", got=repr(value), remedy=remedy)


def _check_temperature(value: object) -> None:
    if _is_number(value) and 0 <= value <= sys.float_info.max:  # type: ignore[operator]
        return
    raise OptionError(
        "temperature",
        expected="a finite number >= 0",
        got=repr(value),
        remedy="0 is greedy decoding, 1 samples from the model as it is.",
    )


def _check_filters(top_p: object, min_p: object, typical_p: object) -> None:
    for name, value in (("top_p", top_p), ("typical_p", typical_p)):
        if value is not None and not (_is_number(value) and 0 < value <= 1):  # type: ignore[operator]
            raise OptionError(
                name,
                expected="a number in (0, 1]",
                got=repr(value),
                remedy="Leave it out, or use 1, to keep all tokens.",
            )
    if min_p is not None and not (_is_number(min_p) and 0 <= min_p <= 1):  # type: ignore[operator]
        raise OptionError(
            "min_p",
            expected="a number in [0, 1]",
            got=repr(min_p),
            remedy="Leave it out, or use 0, to keep all tokens.",
        )


def _check_penalties(repetition: object, presence: object, frequency: object) -> None:
    low = 1 / MAX_PENALTY
    if not (_is_number(repetition) and low <= repetition <= MAX_PENALTY):  # type: ignore[operator]
        raise OptionError(
            "repetition_penalty",
            expected=f"a number from {low} to {MAX_PENALTY}",
            got=repr(repetition),
            remedy="1 changes nothing, 1.1 to 1.3 discourages repetition.",
        )
    for name, value in (("presence_penalty", presence), ("frequency_penalty", frequency)):
        if not (_is_number(value) and abs(value) <= MAX_PENALTY):  # type: ignore[arg-type]
            raise OptionError(
                name,
                expected=f"a number from {-MAX_PENALTY} to {MAX_PENALTY}",
                got=repr(value),
                remedy="0 changes nothing; from -2 to 2 is usual.",
            )


def _check_logit_bias(bias: object) -> None:
    pairs = bias if isinstance(bias, tuple) else (None,)
    fine = all(
        isinstance(pair, tuple)
        and len(pair) == 2
        and _is_token_id(pair[0])
        and _is_number(pair[1])
        and (abs(pair[1]) <= MAX_BIAS or pair[1] == -math.inf)
        for pair in pairs
    )
    if not fine:
        raise OptionError(
            "logit_bias",
            expected=f"pairs of a token id and a number up to {MAX_BIAS:g}",
            got=repr(bias),
            remedy="Give a tuple of pairs, for example logit_bias=((42, -5.0),).",
        )
    if len({pair[0] for pair in pairs}) < len(pairs):
        raise OptionError(
            "logit_bias",
            expected="one number for a token",
            got=repr(bias),
            remedy="Add the numbers of a token up.",
        )


def _check_bans(words: object, sequences: object, tokens: object) -> None:
    if not (isinstance(words, tuple) and all(map(_is_text, words))):
        raise OptionError(
            "bad_words",
            expected="strings with some text, in UTF-8",
            got=repr(words),
            remedy='Give a tuple of strings, for example bad_words=("however",).',
        )
    fine = isinstance(sequences, tuple) and all(
        isinstance(sequence, tuple) and sequence and all(map(_is_token_id, sequence))
        for sequence in sequences
    )
    if not fine:
        raise OptionError(
            "bad_words_ids",
            expected="sequences of one token id or more",
            got=repr(sequences),
            remedy="Give a tuple of tuples, for example bad_words_ids=((7,), (9, 3)).",
        )
    if not (isinstance(tokens, tuple) and all(map(_is_token_id, tokens))):
        raise OptionError(
            "suppress_tokens",
            expected="token ids",
            got=repr(tokens),
            remedy="Give a tuple of numbers, for example suppress_tokens=(7, 9).",
        )


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_text(value: object) -> bool:
    if not isinstance(value, str) or not value.strip():
        return False
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:  # half a surrogate pair: bytes of the shell that are not UTF-8
        return False
    return True


def _check_grammar(schema: object, regex: object, ignore_eos: bool) -> None:
    if schema is not None and not _is_json_object(schema):
        raise OptionError(
            "json_schema",
            expected="a JSON object, as text",
            got=reprlib.repr(schema),
            remedy='For example json_schema=\'{"type": "object"}\'.',
        )
    if regex is not None and not _is_text(regex):
        raise OptionError(
            "regex",
            expected="a regular expression",
            got=repr(regex),
            remedy="For example regex='yes|no'.",
        )
    if schema is not None and regex is not None:
        raise OptionError(
            "regex",
            expected="no json_schema beside it",
            got=repr(regex),
            remedy="Leave out one of them.",
        )
    if ignore_eos and (schema is not None or regex is not None):
        raise OptionError(
            "ignore_eos",
            expected="False with json_schema or regex",
            got="True",
            remedy="A text in a grammar ends where the grammar does.",
        )


def _is_json_object(value: object) -> bool:
    try:
        return isinstance(value, str) and isinstance(json.loads(value), dict)
    except ValueError:
        return False


def _check_stop(stop: object) -> None:
    if isinstance(stop, tuple) and all(isinstance(s, str) and s for s in stop):
        return
    raise OptionError(
        "stop",
        expected="non-empty strings",
        got=repr(stop),
        remedy='Give a tuple of strings, for example stop=("\\n\\n",).',
    )
