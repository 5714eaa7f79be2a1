"""What is put into the page: the data, and that no text can break out of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ddtree.config import DecodeConfig
from ddtree.errors import CacheWriteError
from ddtree.types import Round
from ddtree.viewer.scenes import scenes_of
from ddtree.viewer.tree_page import page_of, rounds_json, write_page
from tests.support.rounds import (
    ROOT,
    A,
    B,
    D,
    WordTokenizer,
    generation_of,
    plain_round,
    prefill_round,
    worked_round,
)

HOSTILE = ["</script><b>", "<!--", "\u2028\u2029", "@@style@@\\1", "&lt;\ud800"]


def written(path: Path, *rounds: Round, words: list[str], **config: object) -> dict:
    write_page(
        path,
        generation_of(rounds),
        WordTokenizer(words),
        prompt="Why </title>?",
        config=DecodeConfig(**config),
        target_name="tiny",
    )
    return data_of(path.read_text(encoding="utf-8"))


def data_of(page: str) -> dict:
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return json.loads(data)


def test_a_round_as_the_page_reads_it() -> None:
    (data,) = rounds_json(scenes_of([worked_round()]), [["a", "b", "d"]])
    assert data == {
        "number": 0,
        "num_drafted": 6,
        "expected_tokens": 2.875,
        "nodes": {
            "token_ids": [ROOT, A, B, B, A, B, 2, D],
            "parents": [-1, 0, 0, 1, 1, 2, 3, 3],
            "depths": [0, 1, 1, 2, 2, 2, 3, 3],
            "rows": [0, 0, 2, 0, 1, 2, 0, 1],
            "ranks": [None, 0, 1, 0, 1, 0, 0, None],
            "states": ["root", "accepted", "rejected", "accepted", *["rejected"] * 3, "bonus"],
            "probabilities": [None, 0.6, 0.38, 0.5, 0.4, 0.5, 0.55, None],
            "path_probabilities": [None, 0.6, 0.38, 0.3, 0.24, 0.19, 0.165, None],
        },
        "delivered": [
            {"id": A, "text": "a"},
            {"id": B, "text": "b"},
            {"id": D, "text": "d"},
        ],
    }


def test_no_token_can_end_the_script_that_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "tree.html"
    data = written(path, prefill_round(), worked_round(), words=HOSTILE)
    page = path.read_text(encoding="utf-8")
    assert "</script><b>" not in page
    assert page.count("</script>") == 2
    assert "@@" not in page.replace("@@style@@\\\\1", "")
    assert "\u2028" not in page
    assert data["prompt"] == "Why </title>?"
    said = [piece["text"] for r in data["rounds"] for piece in r["delivered"]]
    assert said == [HOSTILE[i] for i in (ROOT, A, B, D)]
    assert data["tokens"]["0"] == HOSTILE[0]
    assert data["tokens"]["2"] == "\\u2028\\u2029"


def test_the_page_asks_for_nothing_but_itself() -> None:
    page = page_of({"rounds": []})
    addresses = set(re.findall(r"\b\w+://[^\s\"')]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert "default-src 'none'" in page
    assert not re.search(r"<script[^>]+src|<link[^>]+stylesheet|@import|url\(", page)


def test_a_character_comes_with_the_last_of_its_tokens(tmp_path: Path) -> None:
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    of_bytes = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    of_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    of_bytes.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=of_bytes)
    ids = tokenizer("né")["input_ids"]
    assert len(ids) == 3
    rounds = [prefill_round(ids[0]), plain_round(ids[0], ids[1]), plain_round(ids[1], ids[2])]
    write_page(
        tmp_path / "tree.html",
        generation_of(rounds),
        tokenizer,
        prompt="x",
        config=DecodeConfig(),
        target_name="tiny",
    )
    data = data_of((tmp_path / "tree.html").read_text(encoding="utf-8"))
    assert [r["delivered"][0]["text"] for r in data["rounds"]] == ["n", "", "é"]
    assert data["tokens"][str(ids[1])] == "<0xC3>"


def test_the_summary_says_how_it_was_decoded(tmp_path: Path) -> None:
    path = tmp_path / "tree.html"
    rounds = (prefill_round(), worked_round(), plain_round(D, A))
    data = written(path, *rounds, words=HOSTILE, budget=6, temperature=0.5, seed=7)
    assert data["summary"] == [
        ["2.00", "tokens/round (tau)"],
        ["2", "rounds"],
        ["5", "tokens"],
        ["3.0", "nodes/round"],
        ["ddtree", "budget 6"],
        ["0.5", "temperature"],
        ["7", "seed"],
        ["tiny", ""],
    ]


def test_a_generation_of_one_token_has_no_tau(tmp_path: Path) -> None:
    data = written(tmp_path / "tree.html", prefill_round(), words=HOSTILE, method="ar")
    assert data["summary"][0] == ["-", "tokens/round (tau)"]
    assert data["summary"][4] == ["ar", ""]


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "tree.html"
    path.write_text("old")
    (tmp_path / "tree.html.partial").mkdir()  # in the way of the new one
    with pytest.raises(CacheWriteError):
        written(path, prefill_round(), words=HOSTILE)
    assert path.read_text() == "old"
