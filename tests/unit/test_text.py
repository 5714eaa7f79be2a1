"""Text from tokens as they come: complete characters only, cut at the first stop string."""

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ddtree.text import TextStream

EOS = "<|end|>"
HALF = "\ufffd"  # what incomplete UTF-8 decodes to
STOP = "STOP"


def byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE as GPT-2's: a character may be split over up to four tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = ["the tree of the draft, the tree", "naïve café", "日本語の木", "👍🏽 👨‍👩‍👧 👍"] * 3
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS)


def metaspace() -> PreTrainedTokenizerFast:
    """As Llama 2's: the space belongs to the word behind it, and the first one is not shown."""
    words = ["▁a", "▁b", "a", "b", "▁", "<unk>"]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def all_pieces_of(text: str) -> PreTrainedTokenizerFast:
    """Every substring is a token, so that any split can be pushed."""
    pieces = {text[i:j] for i in range(len(text)) for j in range(i + 1, len(text) + 1)}
    vocabulary = {piece: i for i, piece in enumerate(sorted(pieces))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=text[0]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


BYTES = byte_level()
NUM_TOKENS = len(BYTES)


def ids_of(text: str) -> list[int]:
    ids: list[int] = BYTES.encode(text, add_special_tokens=False)
    return ids


def whole(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text


def pieces_of(stream: TextStream, ids: Sequence[int]) -> list[str]:
    pieces = []
    for token in ids:
        stream.push(token)
        pieces.append(stream.take())
    stream.finish()
    return [*pieces, stream.take()]


# --- characters ---

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=25)
hard_texts = texts | st.text(st.sampled_from("aé木👍🏽\u0301\u200d \n"), max_size=25)


@given(hard_texts)
@settings(max_examples=200)
@example("👨‍👩‍👧 e\u0301 naïve 木")
@example(HALF)
@example("a" + HALF)
@example("")
def test_pieces_joined_are_the_text_and_what_the_tokenizer_says(text: str) -> None:
    stream = TextStream(BYTES)
    joined = "".join(pieces_of(stream, ids_of(text)))
    assert joined == stream.text == whole(BYTES, ids_of(text)) == text


@given(st.lists(st.integers(0, NUM_TOKENS - 1), max_size=25))
@settings(max_examples=200)
def test_any_tokens_broken_characters_and_special_ones_included_decode_as_a_whole(
    ids: list[int],
) -> None:
    stream = TextStream(BYTES)
    assert "".join(pieces_of(stream, ids)) == stream.text == whole(BYTES, ids)


@given(st.lists(st.integers(0, 4), max_size=12))
def test_spaces_between_words_are_those_of_the_whole_text(ids: list[int]) -> None:
    tokenizer = metaspace()
    assert "".join(pieces_of(TextStream(tokenizer), ids)) == whole(tokenizer, ids)


@given(hard_texts.filter(lambda text: HALF not in text))
@settings(max_examples=200)
def test_valid_text_never_shows_half_a_character(text: str) -> None:
    stream, shown = TextStream(BYTES), ""
    for token in ids_of(text):
        stream.push(token)
        shown += stream.take()
        assert text.startswith(shown)
        assert stream.text == shown


@pytest.mark.parametrize("character", ["é", "ß", "य", "€", "𐍈", "🌳"])
def test_a_character_comes_with_its_last_byte_and_not_before(character: str) -> None:
    ids = [ids_of_byte(byte) for byte in character.encode()]
    stream = TextStream(BYTES)
    pieces = pieces_of(stream, [*ids_of("x"), *ids])
    assert pieces == ["x"] + [""] * (len(ids) - 1) + [character, ""]


def ids_of_byte(byte: int) -> int:
    # GPT-2's table: printable bytes stand for themselves, the others follow from U+0100 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    name = chr(byte) if byte in printable else chr(256 + others.index(byte))
    token: int = BYTES.convert_tokens_to_ids(name)
    return token


def test_half_a_character_at_the_very_end_is_given_out_by_finish() -> None:
    stream = TextStream(BYTES)
    stream.push(ids_of("x")[0])
    stream.push(ids_of_byte(0xF0))
    assert stream.take() == "x"
    stream.finish()
    assert stream.take() == HALF
    assert stream.text == "x" + HALF


def test_special_tokens_are_not_part_of_the_text() -> None:
    eos = BYTES.eos_token_id
    stream = TextStream(BYTES)
    joined = "".join(pieces_of(stream, [eos, *ids_of("ab"), eos, *ids_of("木"), eos]))
    assert joined == stream.text == "ab木"


def test_take_gives_each_piece_once() -> None:
    stream = TextStream(BYTES)
    stream.push(ids_of("x")[0])
    assert [stream.take(), stream.take()] == ["x", ""]


def test_finish_twice_adds_nothing() -> None:
    stream = TextStream(BYTES)
    pieces_of(stream, ids_of("木 x"))
    stream.finish()
    assert (stream.take(), stream.text) == ("", "木 x")


# --- stop strings ---


def splits(text: str) -> Iterator[list[str]]:
    """All ways to cut a text into pieces."""
    for cuts in range(2 ** (len(text) - 1)):
        pieces = [text[0]]
        for i, character in enumerate(text[1:]):
            if cuts >> i & 1:
                pieces.append(character)
            else:
                pieces[-1] += character
        yield pieces


def held_back(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of the text with which some stop string begins."""
    beginnings = {s[:n] for s in stop for n in range(1, len(s))}
    return max((len(b) for b in beginnings if text.endswith(b)), default=0)


@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("abSTOPcd", [STOP]),
        ("STOPcd", [STOP]),
        ("abSTOP", [STOP]),
        ("xSTSTOPy", [STOP]),  # a near miss, then the real one
        ("abababac", ["ababac"]),  # a failed beginning overlaps the real one
        ("aaaaab", ["aab"]),
        ("a\n\n\nb", ["\n\n"]),
        ("abSTOcdS", [STOP]),  # near misses only
        ("abcdef", ["f", "cd"]),
        ("axbxc", ["xx", "bxc", "axd"]),
    ],
)
def test_at_every_split_stop_strings_are_found_and_nothing_of_them_is_given_out(
    text: str, stop: list[str]
) -> None:
    tokenizer = all_pieces_of(text)
    ends = {s: text.find(s) + len(s) for s in stop if s in text}
    for pieces in splits(text):
        stream, pushed, shown = TextStream(tokenizer, stop), "", ""
        for piece in pieces:
            pushed += piece
            completed = [text.find(s) for s in ends if ends[s] <= len(pushed)]
            assert stream.push(tokenizer.convert_tokens_to_ids(piece)) == bool(completed)
            shown += stream.take()
            if completed:
                expected = text[: min(completed)]
                break
            # What cannot begin a stop string any more has been released.
            assert shown == pushed[: len(pushed) - held_back(pushed, stop)]
            expected = pushed
        stream.finish()
        shown += stream.take()
        assert shown == stream.text == expected


@given(st.text("ab", min_size=1, max_size=9), st.lists(st.text("ab", min_size=1, max_size=4)))
@settings(max_examples=150)
def test_what_was_given_out_is_never_taken_back(text: str, stop: list[str]) -> None:
    for size in (1, 2, 3):
        stream, shown, stopped = TextStream(BYTES, stop), "", False
        for start in range(0, len(text), size):
            for token in ids_of(text[start : start + size]):
                stopped = stream.push(token)
                shown += stream.take()
                assert stream.text.startswith(shown)
                assert not any(s in shown for s in stop)
                if stopped:
                    break
            if stopped:
                break
        stream.finish()
        shown += stream.take()
        assert shown == stream.text
        assert stopped == any(s in text for s in stop)
        assert text.startswith(shown)
        assert stopped or shown == text


def test_a_stop_string_in_the_middle_of_one_token_cuts_that_token() -> None:
    tokenizer = all_pieces_of("abSTOPcd")
    stream = TextStream(tokenizer, [STOP])
    assert stream.push(tokenizer.convert_tokens_to_ids("abSTOPcd"))
    assert (stream.take(), stream.text) == ("ab", "ab")


def test_a_near_miss_is_released_when_it_is_decided() -> None:
    tokenizer = all_pieces_of("abSTOcdS")
    stream = TextStream(tokenizer, [STOP])
    taken = []
    for piece in ["ab", "S", "TO", "c", "d", "S"]:
        stream.push(tokenizer.convert_tokens_to_ids(piece))
        taken.append(stream.take())
    assert taken == ["ab", "", "", "STOc", "d", ""]
    stream.finish()
    assert stream.take() == "S"


def test_a_stop_string_of_characters_split_over_tokens_is_found() -> None:
    stream = TextStream(BYTES, ["木"])
    results = [stream.push(ids_of_byte(byte)) for byte in "a木".encode()]
    assert results == [False, False, False, True]
    assert (stream.take(), stream.text) == ("a", "a")


def test_a_stop_string_in_text_held_back_as_incomplete_is_found_at_once() -> None:
    tokenizer = Tokenizer(models.WordLevel({"aS": 0, f"TOP{HALF}": 1}, unk_token="aS"))
    tokenizer.decoder = decoders.Fuse()
    stream = TextStream(PreTrainedTokenizerFast(tokenizer_object=tokenizer), [STOP])
    stream.push(0)
    assert stream.push(1)
    stream.finish()
    assert (stream.take(), stream.text) == ("a", "a")


def test_without_stop_strings_nothing_is_held_back() -> None:
    stream = TextStream(BYTES)
    assert pieces_of(stream, ids_of("S") + ids_of("T"))[:2] == ["S", "T"]
