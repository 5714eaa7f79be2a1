"""Workloads: ten suites by name, from the package, the hub or a file; what is wrong is named."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyarrow
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from pyarrow import parquet

from ddtree.bench import hub
from ddtree.bench.hub import HUB_SUITES
from ddtree.bench.workloads import PACKAGED_SUITES, SUITES, BenchPrompt, Suite, read_suites
from ddtree.errors import BackendError, DownloadError, OptionError, PromptError


def from_file(file: Path, text: str, name: str = "mine") -> Suite:
    file.write_bytes(text.encode())
    (suite,) = read_suites([f"{name}={file}"])
    return suite


# Names.


def test_the_ten_suites_of_the_paper_are_known_by_name() -> None:
    assert SUITES == (
        "gsm8k",
        "math500",
        "aime24",
        "aime25",
        "humaneval",
        "mbpp",
        "livecodebench",
        "swe-bench-lite",
        "mt-bench",
        "alpaca",
    )
    assert set(PACKAGED_SUITES) < set(SUITES)


def test_five_suites_are_packaged_with_forty_prompts_each() -> None:
    suites = read_suites(["gsm8k,math500", "humaneval, mbpp,mt-bench"])
    assert tuple(suite.name for suite in suites) == PACKAGED_SUITES
    for suite in suites:
        assert len(suite.prompts) == 40
        assert suite.source == "packaged sample"
        turns = {len(prompt.turns) for prompt in suite.prompts}
        assert turns == ({2} if suite.name == "mt-bench" else {1})
    assert len({suite.sha256 for suite in suites}) == 5


def test_the_licences_of_the_packaged_suites_are_beside_them() -> None:
    import ddtree

    readme = Path(ddtree.__file__).parent / "assets" / "prompts" / "README.md"
    lines = readme.read_text(encoding="utf-8").split("\n")
    for name in PACKAGED_SUITES:
        (line,) = [line for line in lines if line.startswith(f"| {name}.jsonl |")]
        assert line.count("|") == 4
        assert line.split("|")[3].strip()


@pytest.mark.parametrize(
    ("wanted", "source", "named"),
    [
        (["gsm8"], None, r"suite: expected one of gsm8k, math500, .*, alpaca, or NAME=.*'gsm8'"),
        (["gsm8k,"], None, "got ''"),
        ([""], None, "got ''"),
        (["gsm8k,gsm8k"], None, "suite: expected every name once, got gsm8k 2 times"),
        (["gsm8k", "gsm8k=x.jsonl"], None, "got gsm8k 2 times"),
        (["=x.jsonl"], None, "got '=x.jsonl'"),
        (["a b=x.jsonl"], None, "got 'a b=x.jsonl'"),
        (["mine="], None, "got 'mine='"),
        (["gsm8k", "aime24"], "packaged", "one of gsm8k, .* with --source packaged, got 'aime24'"),
        (["gsm8k"], "net", "source: expected one of packaged, hub, got 'net'"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(
    wanted: list[str], source: str | None, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddtree.bench.workloads._read", lambda *_: pytest.fail("work was done"))
    with pytest.raises(OptionError, match=named):
        read_suites(wanted, source)  # type: ignore[arg-type]


# Files.


def test_a_file_has_turns_or_a_prompt_and_ids_if_it_likes(tmp_path: Path) -> None:
    lines = [
        '{"turns": ["one", "two"], "id": "first"}',
        "",
        '{"prompt": "with \u2028 a separator", "other": 1}',
        '{"prompt": "numbered", "id": 7}',
    ]
    suite = from_file(tmp_path / "prompts.jsonl", "\n".join(lines))
    assert suite.prompts == (
        BenchPrompt(id="first", turns=("one", "two")),
        BenchPrompt(id="mine/3", turns=("with \u2028 a separator",)),
        BenchPrompt(id="7", turns=("numbered",)),
    )
    assert suite.source == f"file {tmp_path / 'prompts.jsonl'}"
    zipped = tmp_path / "prompts.jsonl.gz"
    zipped.write_bytes(gzip.compress((tmp_path / "prompts.jsonl").read_bytes()))
    assert read_suites([f"mine={zipped}"])[0].prompts == suite.prompts


def test_a_file_may_stand_for_a_known_suite(tmp_path: Path) -> None:
    suite = from_file(tmp_path / "x.jsonl", '{"prompt": "mine"}\n', name="aime25")
    assert (suite.name, suite.prompts[0].id) == ("aime25", "aime25/1")


def test_the_digest_is_of_ids_and_turns_and_of_nothing_else(tmp_path: Path) -> None:
    def digest(text: str, name: str = "mine") -> str:
        return from_file(tmp_path / "x.jsonl", text, name).sha256

    first = digest('{"turns": ["a", "b"], "id": "1"}\n')
    assert digest('{"id": "1", "turns": ["a", "b"], "reference": 3}', "other") == first
    assert digest('{"turns": ["ab"], "id": "1"}') != first
    assert digest('{"turns": ["a", "b"], "id": "2"}') != first
    assert digest('{"turns": ["a"], "id": "1"}\n{"turns": ["b"], "id": "2"}') != first


@pytest.mark.parametrize(
    ("line", "got"),
    [
        ("{", "Expecting property name"),
        ("[1]", r"'\[1\]'"),
        ("{}", "'{}'"),
        ('{"prompt": " "}', "'{"),
        ('{"prompt": 3}', "'{"),
        ('{"turns": []}', "'{"),
        ('{"turns": "text"}', "'{"),
        ('{"turns": ["text", ""]}', "'{"),
        ('{"prompt": "half of a pair: \\ud83d"}', "'{"),
        ('{"prompt": "again", "id": "first"}', "'first' for the second time. Rename one."),
        ('{"prompt": "a", "id": ""}', "'{"),
    ],
)
def test_a_line_that_is_no_prompt_is_named_by_its_number(
    line: str, got: str, tmp_path: Path
) -> None:
    file = tmp_path / "x.jsonl"
    with pytest.raises(PromptError, match=rf"x\.jsonl, line 3: expected an object .*, got {got}"):
        from_file(file, f'{{"prompt": "fine", "id": "first"}}\n\n{line}\n')


def test_an_unreadable_or_empty_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    with pytest.raises(PromptError, match=r"x\.jsonl: expected a readable file .* No such file"):
        read_suites([f"mine={file}"])
    with pytest.raises(PromptError, match=r"x\.jsonl: expected prompts of suite mine, got an empt"):
        from_file(file, "\n \n")
    file.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(PromptError, match="UTF-8"):
        read_suites([f"mine={file}"])


# The hub.

Rows = Sequence[Mapping[str, object]]
Publish = Callable[[str, Rows], None]


@pytest.fixture
def publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Publish:
    """Puts rows of a suite onto a hub that has nothing else, in the file that its pattern means."""

    def snapshot(repo: str, *, repo_type: str, allow_patterns: list[str]) -> str:
        assert repo_type == "dataset"
        assert allow_patterns == [s.files for s in HUB_SUITES.values() if s.repo == repo]
        folder = tmp_path / repo
        folder.mkdir(parents=True, exist_ok=True)
        return str(folder)

    def put(name: str, rows: Rows) -> None:
        suite = HUB_SUITES[name]
        pattern = suite.files.replace("-*", "-00000-of-00001-67c6").replace("*", "2")
        file = tmp_path / suite.repo / pattern
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".parquet":
            parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file)
            (file.parent / "README-test-.md").write_text("not meant")
        else:
            file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    return put


BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
ROWS: list[tuple[str, dict[str, object], str, list[str]]] = [
    ("gsm8k", {"question": "1 + 1?", "answer": "2"}, "gsm8k/test/0", ["1 + 1?" + BOXED]),
    (
        "math500",
        {"problem": "x\u2028?", "unique_id": "test/algebra/1.json"},
        "math500/test/algebra/1.json",
        ["x\u2028?" + BOXED],
    ),
    ("aime24", {"id": 60, "problem": "a?"}, "aime24/0", ["a?" + BOXED]),
    ("aime25", {"problem_idx": 1, "problem": "b?"}, "aime25/0", ["b?" + BOXED]),
    (
        "humaneval",
        {"task_id": "HumanEval/3", "prompt": "def f():\n"},
        "HumanEval/3",
        [
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            "```python\ndef f():\n\n```"
        ],
    ),
    ("mbpp", {"task_id": 11, "prompt": "Write f."}, "mbpp/11", ["Write f."]),
    (
        "swe-bench-lite",
        {"instance_id": "a__b-1", "problem_statement": "It breaks."},
        "a__b-1",
        ["Problem statement:\nIt breaks.\nPlease fix this issue."],
    ),
    ("mt-bench", {"prompt_id": 81, "prompt": ["One.", "Two."]}, "mt-bench/81", ["One.", "Two."]),
    ("alpaca", {"instruction": "Sort.", "input": ""}, "alpaca/0", ["Sort."]),
    ("alpaca", {"instruction": "Sort.", "input": "2, 1"}, "alpaca/0", ["Sort.\n\nInput:\n2, 1"]),
]


@pytest.mark.parametrize(("name", "row", "prompt_id", "turns"), ROWS)
def test_a_row_of_the_hub_becomes_a_prompt_of_the_papers_form(
    name: str, row: dict[str, object], prompt_id: str, turns: list[str], publish: Publish
) -> None:
    publish(name, [row])
    (suite,) = read_suites([name], "hub")
    assert suite.prompts == (BenchPrompt(id=prompt_id, turns=tuple(turns)),)
    assert suite.source == f"hub {HUB_SUITES[name].repo}"


def test_livecodebench_says_where_the_code_goes(publish: Publish) -> None:
    rows = [
        {"question_id": "a", "question_content": "Sum up.", "starter_code": "class Solution:"},
        {"question_id": "b", "question_content": "Sort it.", "starter_code": ""},
    ]
    publish("livecodebench", rows)
    (suite,) = read_suites(["livecodebench"])  # no packaged sample: the hub is asked
    assert [prompt.id for prompt in suite.prompts] == ["livecodebench/a", "livecodebench/b"]
    (starter,), (free,) = (prompt.turns for prompt in suite.prompts)
    assert "Sum up." in starter
    assert "```python\nclass Solution:\n```" in starter
    assert "Sort it." in free
    assert "standard input" in free
    assert "standard input" not in starter


def test_the_hubs_templates_are_those_of_the_packaged_samples(publish: Publish) -> None:
    (packaged,) = read_suites(["gsm8k"])
    prompt = packaged.prompts[0]
    publish("gsm8k", [{"question": prompt.turns[0].removesuffix(BOXED)}])
    assert read_suites(["gsm8k"], "hub")[0].prompts[0].turns == prompt.turns
    (packaged,) = read_suites(["humaneval"])
    before, _, rest = packaged.prompts[0].turns[0].partition("```python\n")
    publish("humaneval", [{"task_id": "x", "prompt": rest.removesuffix("\n```")}])
    assert read_suites(["humaneval"], "hub")[0].prompts[0].turns[0] == f"{before}```python\n{rest}"


def test_without_a_network_the_remedy_is_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("Name or service not known\nand more")

    monkeypatch.setattr(hub, "snapshot_download", offline)
    with pytest.raises(DownloadError) as caught:
        read_suites(["aime24"])
    assert str(caught.value) == (
        "suite aime24: expected the data set HuggingFaceH4/aime_2024 from the hub or its local "
        "cache, got Name or service not known. Check the network (HF_ENDPOINT, HF_TOKEN), or give "
        "a file: aime24=FILE.jsonl."
    )


def test_without_pyarrow_the_error_says_how_to_install_it(
    publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match=r'pip install "ddtree\[bench\]"'):
        read_suites(["aime24"])
    publish("math500", [{"problem": "x?", "unique_id": "1"}])  # JSON lines need none
    assert len(read_suites(["math500"], "hub")[0].prompts) == 1


@pytest.mark.parametrize(
    ("row", "got"),
    [
        ({"query": "1 + 1?"}, "KeyError: 'question'"),
        ({"question": 3}, "TypeError: question is int"),
    ],
)
def test_a_data_set_that_has_changed_is_named(
    row: dict[str, object], got: str, publish: Publish
) -> None:
    publish("gsm8k", [row])
    with pytest.raises(DownloadError, match=f"gsm8k, near row 0 of openai/gsm8k: .*, got {got}"):
        read_suites(["gsm8k"], "hub")


def test_a_data_set_without_the_files_is_named(publish: Publish) -> None:
    with pytest.raises(DownloadError, match=r"expected files main/test-\*\.parquet in openai/gsm"):
        read_suites(["gsm8k"], "hub")
