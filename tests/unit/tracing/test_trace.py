"""Trace files: what is written is read back to the last bit, and damage is named by its line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from ddtree.errors import CacheWriteError, TraceError
from ddtree.host_marginals import HostMarginals
from ddtree.models.target import Target
from ddtree.pair import Pair
from ddtree.tracing.recording import card_of
from ddtree.tracing.trace import TraceCard, TracedGeneration, parse_marginals
from ddtree.tracing.trace_file import TraceWriter, read_trace, write_trace
from ddtree.types import Marginals, StageSeconds
from tests.support import drafters
from tests.support.disk import fill_disk
from tests.support.models import VOCAB_SIZE, dflash_drafter, tiny_model, tiny_target
from tests.support.tokenizers import tiny_tokenizer
from tests.support.traces import recorded

PROMPT = [5, 17, 42, 8, 23, 11, 2]
CARD = TraceCard(
    target="a target",
    drafter="a drafter",
    dtype="torch.float32",
    vocab_size=9,
    num_depths=2,
    origin={"command": "ddtree generate"},
)
# Two new tokens of a prompt of one: the tree proposes 4 and below it 6; the target says 4, then 5.
HEAD = {
    "kind": "generation",
    "id": "a",
    "options": {"method": "ddtree", "budget": 2, "max_new_tokens": 4, "temperature": 0.0},
    "prompt_ids": [3],
    "token_ids": [7, 4, 5],
    "text": "xyz \u2028",
    "finish_reason": "stop",
    "elapsed_s": 0.5,
    "prefill_seconds": {
        "prefill": 0.25,
        "draft": 0.0,
        "build": 0.0,
        "verify": 0.0,
        "walk": 0.125,
        "commit": 0.0,
    },
    "num_ranks": 2,
    "lookup": [[[0.5, 0.25]], [[2.0, 1.0]]],
    "num_rounds": 1,
    "num_along": 2,
}
ROUND = {
    "kind": "round",
    "start": 1,
    "root_id": 7,
    "path": [1],
    "token_ids": [4, 5],
    "finish_reason": "stop",
    "seconds": {
        "prefill": 0.0,
        "draft": 0.5,
        "build": 0.0,
        "verify": 1.0,
        "walk": 0.0,
        "commit": 0.0,
    },
    "tree": {
        "token_ids": [7, 4, 6],
        "parents": [-1, 0, 1],
        "depths": [0, 1, 2],
        "ranks": [-1, 0, 0],
        "log_probs": [0.0, -0.25, -0.75],
    },
    "marginals": {"log_probs": [[-0.25, -2.0], [-0.5, None]], "token_ids": [[4, 8], [6, 2]]},
}
ALONG = [
    {"kind": "along", "start": 1, "marginals": ROUND["marginals"]},
    {"kind": "along", "start": 2, "marginals": {"log_probs": [[-0.125]], "token_ids": [[5]]}},
]
FIRST = {"format": "ddtree-trace", "version": 2, **dataclasses.asdict(CARD)}
LINES = [FIRST, HEAD, ROUND, *ALONG]


SMALL = TracedGeneration(
    id="a",
    options={"method": "ddtree", "max_new_tokens": 3},
    prompt_ids=(1,),
    token_ids=(2,),
    text=None,
    finish_reason="length",
    elapsed_s=1.0,
    prefill_seconds=StageSeconds(),
    num_ranks=1,
    rounds=(),
    along={},
)


def put(path: Path, lines: list[object]) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path


def same(a: object, b: object) -> bool:
    """Equal to the last bit, arrays included."""
    if dataclasses.is_dataclass(a):
        names = [f.name for f in dataclasses.fields(a)]
        return type(a) is type(b) and all(same(getattr(a, n), getattr(b, n)) for n in names)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes() and a.shape == b.shape
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.fixture(scope="module")
def generations() -> list[TracedGeneration]:
    """With a scripted and with a real drafter, sampled and greedy, by tree, chain and alone."""
    target = Target(tiny_model("llama"), tiny_tokenizer(), name="tiny")
    said = Pair(target, None).generate(PROMPT, method="ar", max_new_tokens=40).token_ids
    scripted = drafters.right_at_rank(lambda p: p % 3, [*PROMPT, *said], VOCAB_SIZE)
    runs = [
        (scripted, {"budget": 8}),
        (scripted, {"budget": 8, "method": "dflash", "num_ranks": None}),
        (scripted, {"method": "ar"}),
        (dflash_drafter(target), {"budget": 12, "temperature": 1.0, "logit_bias": ((3, -np.inf),)}),
    ]
    return [
        recorded(Pair(target, drafter), PROMPT, id=str(i), max_new_tokens=10, **options)[0]
        for i, (drafter, options) in enumerate(runs)
    ]


# The format.


def test_the_golden_means_what_the_format_says(tmp_path: Path) -> None:
    trace = read_trace(put(tmp_path / "t.jsonl", LINES))
    (traced,) = trace.generations
    assert (trace.card, trace.is_torn) == (CARD, False)
    assert (traced.id, traced.prompt_ids, traced.token_ids) == ("a", (3,), (7, 4, 5))
    assert (traced.text, traced.finish_reason) == ("xyz \u2028", "stop")
    assert (traced.max_new_tokens, traced.num_ranks, traced.elapsed_s) == (4, 2, 0.5)
    assert (traced.prefill_seconds.prefill, traced.prefill_seconds.walk) == (0.25, 0.125)
    (done,) = traced.rounds
    assert (done.start, done.seconds.draft, done.seconds.verify) == (1, 0.5, 1.0)
    assert (done.round.path, done.round.token_ids) == ((1,), (4, 5))
    assert done.round.finish_reason == "stop"
    assert done.tree.parents.tolist() == [-1, 0, 1]
    assert done.marginals.log_probs.tolist() == [[-0.25, -2.0], [-0.5, -np.inf]]
    assert done.marginals.token_ids.tolist() == [[4, 8], [6, 2]]
    assert list(traced.along) == [1, 2]
    assert traced.along[2].log_probs.tolist() == [[-0.125]]


def test_the_golden_is_what_is_written(tmp_path: Path) -> None:
    path = put(tmp_path / "t.jsonl", LINES)
    trace = read_trace(path)
    write_trace(path, trace.card, trace.generations)
    assert [json.loads(line) for line in path.read_text().split("\n")[:-1]] == LINES


def test_files_of_version_1_are_read(tmp_path: Path) -> None:
    head = {key: value for key, value in HEAD.items() if key != "lookup"}
    old = read_trace(put(tmp_path / "a", [{**FIRST, "version": 1}, head, *LINES[2:]]))
    new = read_trace(put(tmp_path / "b", LINES)).generations[0]
    assert same(old.generations, [dataclasses.replace(new, lookup=None)])


# Behind 4, 2 is more probable than 6; behind 8 nothing but 6 may come.
TRANSITIONS = {
    "log_probs": [[[-0.25, -1.5], [-0.5, None]]],
    "ranks": [[[1, 0], [0, 1]]],
}
FIRST_ORDER = {**ROUND["marginals"], "transitions": TRANSITIONS}


def test_transitions_mean_what_the_format_says_and_are_written_so(tmp_path: Path) -> None:
    one_depth = {**ALONG[1]["marginals"], "transitions": {"log_probs": [], "ranks": []}}
    lines = [
        FIRST,
        HEAD,
        {**ROUND, "marginals": FIRST_ORDER},
        {**ALONG[0], "marginals": FIRST_ORDER},
        {**ALONG[1], "marginals": one_depth},
    ]
    path = put(tmp_path / "t.jsonl", lines)
    trace = read_trace(path)
    behind = trace.generations[0].rounds[0].marginals.transitions
    assert behind.log_probs.tolist() == [[[-0.25, -1.5], [-0.5, -np.inf]]]
    assert behind.ranks.tolist() == [[[1, 0], [0, 1]]]
    assert trace.generations[0].along[2].transitions.log_probs.shape == (0, 1, 1)
    write_trace(path, trace.card, trace.generations)
    assert [json.loads(line) for line in path.read_text().split("\n")[:-1]] == lines


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("damaged", "named"),
    [
        ({"log_probs": TRANSITIONS["log_probs"]}, "a line without 'ranks'"),
        ({"log_probs": [], "ranks": []}, r"here \(1, 2, 2\)"),
        ({**TRANSITIONS, "ranks": [[[1, 2], [0, 1]]]}, "ranks from 0 to 1"),
        ({**TRANSITIONS, "ranks": [[[1, 0.5], [0, 1]]]}, "whole numbers"),
        ({**TRANSITIONS, "ranks": [[1, 0]]}, "whole numbers"),
        ({**TRANSITIONS, "log_probs": [[[-1.5, -0.25], [-0.5, None]]]}, "sorted"),
        ({**TRANSITIONS, "log_probs": [[[-0.25], [-0.5, None]]]}, "line 3: "),
        ({**TRANSITIONS, "log_probs": [[-0.25, -1.5]]}, "a list of numbers"),
        ({**TRANSITIONS, "log_probs": [[[-0.25, -1.5]], [[-0.5]]]}, "line 3: "),
    ],
)
def test_damaged_transitions_are_named_by_their_line(
    damaged: dict[str, object], named: str, tmp_path: Path
) -> None:
    broken = {**ROUND, "marginals": {**ROUND["marginals"], "transitions": damaged}}
    with pytest.raises(TraceError, match=named) as error:
        read_trace(put(tmp_path / "t.jsonl", [FIRST, HEAD, broken, *ALONG]))
    assert "line 3" in str(error.value)


def test_keys_that_a_later_ddtree_adds_are_passed_over(tmp_path: Path) -> None:
    added = [{**line, "weather": "fine"} for line in LINES]
    assert same(
        read_trace(put(tmp_path / "a", added)).generations,
        read_trace(put(tmp_path / "b", LINES)).generations,
    )


def test_what_is_written_is_read_back_to_the_last_bit(
    generations: list[TracedGeneration], tmp_path: Path
) -> None:
    write_trace(tmp_path / "t.jsonl", CARD, generations)
    again = read_trace(tmp_path / "t.jsonl")
    assert again.card == CARD
    for ours, theirs in zip(generations, again.generations, strict=True):
        # Options come back as JSON has them: tuples are lists, and -inf is null.
        plain = {"options": {}}
        assert same(dataclasses.replace(ours, **plain), dataclasses.replace(theirs, **plain))
        assert theirs.options["max_new_tokens"] == 10
    assert again.generations[3].options["logit_bias"] == [[3, None]]


def test_nine_digits_bring_every_float32_back() -> None:
    bits = torch.randint(0, 2**31 - 1, (4000,), generator=torch.Generator().manual_seed(0))
    values = -bits.to(torch.int32).view(torch.float32)
    values = torch.cat([values[~values.isnan()], torch.tensor([0.0, -1e-45, -np.inf])])
    ordered = values.sort(descending=True).values[None]
    host = HostMarginals.of(Marginals(ordered, torch.arange(ordered.shape[1])[None]))
    lines = dataclasses.replace(SMALL, along={1: host}).lines()
    written = json.loads(list(lines)[-1])["marginals"]
    assert same(parse_marginals(written), host)


# Files that end early, or are not what they should be.


def test_cut_anywhere_a_file_gives_the_generations_that_are_whole(tmp_path: Path) -> None:
    path = put(tmp_path / "t.jsonl", [*LINES, {**HEAD, "id": "b"}, ROUND, *ALONG])
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    first, one, two = ends[0], ends[len(LINES) - 1], ends[-1]
    for cut in {*range(first, len(whole) + 1, 7), *ends, *(end - 1 for end in ends[1:])}:
        path.write_bytes(whole[:cut])
        trace = read_trace(path)
        assert len(trace.generations) == (cut >= one) + (cut >= two)
        assert trace.is_torn == (cut not in (first, one, two))


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "a file without a whole line"),
        (json.dumps(FIRST).encode()[:20], "a file without a whole line"),
        (b"hello\n", "a first line that is no JSON"),
        (b"\xff\xfe\n", "a first line that is no JSON"),
        (b"[1]\n", "line 1: .* no JSON object"),
        (
            b'{"format": "ddtree-bench", "version": 1}\n',
            "a ddtree-trace file, got format 'ddtree-b",
        ),
        (
            b'{"format": "ddtree-trace", "version": 3}\n',
            "expected version 1 or 2 .*, got version 3",
        ),
        (b'{"format": "ddtree-trace", "version": 1}\n', "line 1: .* a line without 'target'"),
    ],
)
def test_a_file_that_is_no_trace_is_named(content: bytes, named: str, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_bytes(content)
    with pytest.raises(TraceError, match=named):
        read_trace(tmp_path / "t.jsonl")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path, named in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(TraceError, match=f"a trace file that can be read, got {named}"):
            read_trace(path)


def without(line: dict[str, object], key: str) -> dict[str, object]:
    return {k: v for k, v in line.items() if k != key}


def tree(**changes: object) -> dict[str, object]:
    return {**ROUND, "tree": {**ROUND["tree"], **changes}}


def proposed(log_probs: object, token_ids: object) -> dict[str, object]:
    return {**ROUND, "marginals": {"log_probs": log_probs, "token_ids": token_ids}}


@pytest.mark.parametrize(
    ("number", "line", "named"),
    [
        (2, ROUND, "kind 'round' where 'generation' should come"),
        (3, HEAD, "kind 'generation' where 'round' should come"),
        (4, ROUND, "kind 'round' where 'along' should come"),
        (2, without(HEAD, "prompt_ids"), "a line without 'prompt_ids'"),
        (2, {**HEAD, "options": {"method": "ddtree"}}, "a line without 'max_new_tokens'"),
        (2, {**HEAD, "token_ids": []}, "1 to max_new_tokens new tokens"),
        (2, {**HEAD, "token_ids": [7, 4.5, 5]}, "a list of whole numbers"),
        (2, {**HEAD, "token_ids": 7}, "a list of whole numbers"),
        (2, {**HEAD, "finish_reason": "tired"}, "'tired' is no reason to end"),
        (2, {**HEAD, "finish_reason": None}, "None is no reason to end"),
        (2, {**HEAD, "id": 3}, "3 is no text"),
        (2, {**HEAD, "num_ranks": True}, "True is no whole number"),
        (2, {**HEAD, "token_ids": [7, 4, 5, 6]}, "the rounds end before the text does"),
        (2, {**HEAD, "token_ids": [7, 4, 6]}, "round 0 does not go on where"),
        (2, {**HEAD, "prompt_ids": [3, 3]}, "round 0 does not go on where"),
        (3, {**ROUND, "path": [2]}, "round 0 does not go on where"),
        (3, {**ROUND, "path": [9]}, "a path that leaves the tree"),
        (3, {**ROUND, "root_id": 8}, "a tree of another root"),
        (3, {**ROUND, "seconds": {}}, "a line without 'prefill'"),
        (3, tree(parents=[-1, 0]), "lists differ in length"),
        (3, tree(parents=[-1, 1, 0]), "do not come after their parents"),
        (3, tree(log_probs=[0, "x", 1]), "could not convert"),
        (3, proposed([[-0.5, -0.25]], [[1, 2]]), "sorted"),
        (3, proposed([[0.5, -0.25]], [[1, 2]]), "log-probs <= 0"),
        (3, proposed([[-0.5], [-0.5]], [[1]]), "one shape"),
        (3, proposed([[-0.5, -1], [-0.5]], [[1, 2], [1]]), "inhomogeneous"),
        (3, proposed([], []), "without a depth or a rank"),
        (5, {**ALONG[1], "start": 3}, "marginals at position 3, where no round can begin"),
        (5, {**ALONG[1], "start": 1}, "marginals twice at one position"),
        (5, [], "no JSON object"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_damage_is_named_by_its_line(
    number: int, line: dict[str, object], named: str, tmp_path: Path
) -> None:
    lines = [*LINES[: number - 1], line, *LINES[number:]]
    path = put(tmp_path / "t.jsonl", lines)
    # What spans several lines is found at the end of the generation and named by its first.
    spanning = ("round 0", "the rounds end", "marginals at", "marginals twice")
    where = 2 if named.startswith(spanning) else number
    with pytest.raises(TraceError, match=f"t.jsonl, line {where}: .*{named}"):
        read_trace(path)


def test_a_line_that_is_no_json_and_an_id_that_comes_twice_are_named(tmp_path: Path) -> None:
    path = put(tmp_path / "t.jsonl", LINES)
    path.write_text(path.read_text() + "{\n")
    with pytest.raises(TraceError, match="line 6: "):
        read_trace(path)
    with pytest.raises(TraceError, match=r"line 6: .*a second generation of id 'a'"):
        read_trace(put(path, [*LINES, *LINES[1:]]))


# A file that grows.


def test_a_writer_goes_on_where_a_kill_stopped_it(
    generations: list[TracedGeneration], tmp_path: Path
) -> None:
    whole, path = tmp_path / "whole.jsonl", tmp_path / "t.jsonl"
    write_trace(whole, CARD, generations)
    content = whole.read_bytes()
    rng = np.random.default_rng(0)
    for cut in (0, 10, len(content), *rng.integers(0, len(content), 4).tolist()):
        path.write_bytes(content[:cut])
        with TraceWriter(path, CARD) as writer:
            before = set(writer.ids)
            for traced in generations:
                if traced.id not in writer.ids:
                    writer.write(traced)
        assert path.read_bytes() == content
        assert len(before) == (len(generations) if cut == len(content) else len(before))
        assert before <= {traced.id for traced in generations}


def test_every_generation_is_on_disk_as_soon_as_it_is_written(
    generations: list[TracedGeneration], tmp_path: Path
) -> None:
    path = tmp_path / "t.jsonl"
    with TraceWriter(path, CARD) as writer:
        for count, traced in enumerate(generations, start=1):
            writer.write(traced)
            assert len(read_trace(path).generations) == count


def test_generations_of_other_models_do_not_go_into_one_file(tmp_path: Path) -> None:
    path = put(tmp_path / "t.jsonl", LINES)
    other = dataclasses.replace(CARD, drafter="another")
    with pytest.raises(TraceError, match="a trace of a target with drafter another in"):
        TraceWriter(path, other)
    again = dataclasses.replace(CARD, origin={"command": "another"})
    with TraceWriter(path, again) as writer:
        assert writer.ids == {"a"}


def test_a_full_disk_is_named_and_what_was_written_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(tmp_path / "t.jsonl", LINES)
    with monkeypatch.context() as full:
        fill_disk(full, "t.jsonl")
        writer = TraceWriter(path, CARD)
        for attempt in (lambda: writer.write(dataclasses.replace(SMALL, id="b")), writer.close):
            with pytest.raises(CacheWriteError, match=r"t\.jsonl: .* No space left"):
                attempt()
        fill_disk(full, "new.jsonl.partial")
        with pytest.raises(CacheWriteError, match=r"new\.jsonl: .* No space left"):
            write_trace(tmp_path / "new.jsonl", CARD, [SMALL])
    assert [traced.id for traced in read_trace(path).generations] == ["a"]
    assert not (tmp_path / "new.jsonl").exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(CacheWriteError, match="No such file"):
        TraceWriter(tmp_path / "none" / "t.jsonl", CARD)


# What is recorded.


@pytest.mark.parametrize("rule", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "coupled"])
def test_marginals_along_the_text_are_those_of_the_rounds(rule: dict[str, object]) -> None:
    target = tiny_target("llama")
    pair = Pair(target, dflash_drafter(target))
    traced, _ = recorded(pair, PROMPT, budget=12, num_ranks=20, max_new_tokens=14, **rule)
    # Behind the last position that a draft could reach, nothing is asked.
    assert list(traced.along) == list(range(7, 7 + 14 - 2))
    depths = [len(m.log_probs) for m in traced.along.values()]
    assert depths == [min(7, 14 - 2 - i) for i in range(12)]
    assert len(traced.rounds) > 3
    for done in traced.rounds:
        if done.marginals is None:
            continue
        along = traced.along[done.start]
        assert along.log_probs.shape[1] == 20
        assert done.marginals.log_probs.shape[1] == 12
        ours, theirs = along.log_probs[:, :12], done.marginals.log_probs
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
        np.testing.assert_array_equal(along.token_ids[:, 0], done.marginals.token_ids[:, 0])


def test_a_coupled_drafter_is_asked_with_what_it_knew_then() -> None:
    target = tiny_target("llama")
    pair = Pair(target, dflash_drafter(target))
    options = {"budget": 12, "max_new_tokens": 14, "temperature": 1.0, "seed": 5}
    before = pair.coupling_weights.values.copy()
    traced, _ = recorded(pair, PROMPT, **options)
    after = pair.coupling_weights.values
    assert np.abs(after - before).max() > 1e-3
    later, _ = recorded(pair, PROMPT, **options)
    first = traced.rounds[0].start
    apart = traced.along[first].log_probs - later.along[first].log_probs
    assert np.abs(apart).max() > 1e-3


@pytest.mark.parametrize("method", ["ar", "dflash", "ddtree"])
def test_a_run_that_is_heard_is_the_run_that_is_not(method: str) -> None:
    target = tiny_target("llama")
    options = {"method": method, "budget": 8, "max_new_tokens": 10, "temperature": 1.0}
    alone = Pair(target, dflash_drafter(target)).generate(PROMPT, **options)
    traced, heard = recorded(Pair(target, dflash_drafter(target)), PROMPT, **options)
    assert heard.token_ids == alone.token_ids == traced.token_ids
    for ours, theirs in zip(heard.rounds[1:], alone.rounds[1:], strict=True):
        assert same(ours, theirs)
    assert [r.seconds for r in traced.rounds] == list(heard.round_seconds[1:])
    assert traced.prompt_ids == tuple(PROMPT)
    assert (traced.num_ranks == 0) == (method == "ar")


def test_the_card_says_which_models_and_where_they_ran() -> None:
    target = tiny_target("llama")
    card = card_of(Pair(target, dflash_drafter(target)))
    assert card.models == ("tiny llama", "random", "torch.float32", VOCAB_SIZE, 7)
    assert {"command", "commit", "versions", "machine", "date"} <= set(card.origin)
    assert card_of(Pair(target, None)).models == ("tiny llama", None, "torch.float32", 61, 0)
