"""The stage "respond": each answer is the target's own, whatever decodes beside it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from ddtree.cache.batch import BatchCache
from ddtree.errors import CheckpointError, OptionError, PromptError
from ddtree.models import kernels
from ddtree.models.target import Target
from ddtree.pair import Pair
from ddtree.train.prompts import TrainingPrompt, read_prompts
from ddtree.train.respond import RespondConfig, _Batch, respond
from ddtree.train.responses import Response, read_responses
from ddtree.train.run_respond import RespondJob, run_respond
from ddtree.train.samples import SampleSet
from ddtree.train.target_source import TargetSource
from tests.support.checkpoints import write_target
from tests.support.models import tiny_model
from tests.support.tokenizers import tiny_tokenizer

TEXTS = ["hello", "why not", "the lazy dog jumps over the fox", "w", "brown fox", "over", "hi dog"]
PROMPTS = [TrainingPrompt(source="test", prompt=text) for text in TEXTS]


def target(architecture: str = "llama") -> Target:
    return Target(tiny_model(architecture), tiny_tokenizer(), name=f"tiny {architecture}")


def answered(
    target: Target, prompts: list[TrainingPrompt], config: RespondConfig
) -> list[Response]:
    return [answer.response for answer in respond(target, prompts, config)]


def said(responses: list[Response]) -> dict[int, tuple[int, ...]]:
    return {r.index: r.response_ids for r in responses}


@pytest.mark.parametrize("architecture", ["llama", "mistral-window", "qwen2-mixed", "qwen3-tied"])
@pytest.mark.parametrize("num_rows", [1, 3, 16])
def test_a_greedy_answer_is_that_of_plain_decoding(architecture: str, num_rows: int) -> None:
    config = RespondConfig(max_new_tokens=20, num_rows=num_rows, sampled_share=0)
    answers = {r.prompt: r for r in answered(target(architecture), PROMPTS, config)}
    assert len(answers) == len(PROMPTS)
    pair = Pair(target(architecture), None)
    for prompt in PROMPTS:
        alone = pair.generate(prompt.prompt, method="ar", max_new_tokens=20)
        assert answers[prompt.prompt].response_ids == alone.token_ids
        assert answers[prompt.prompt].finished == (alone.finish_reason == "stop")


@pytest.mark.skipif(not kernels.PAIRS_AVAILABLE, reason="no bfloat16 products here")
def test_a_mixed_target_answers_as_it_decodes_alone(source: TargetSource, tmp_path: Path) -> None:
    mixed = replace(source, dtype="mixed")
    loaded = mixed.load()
    config = RespondConfig(max_new_tokens=20, num_rows=5, sampled_share=0)
    answers = {r.prompt: r for r in answered(loaded, PROMPTS, config)}
    for prompt in PROMPTS:
        alone = Pair(loaded, None).generate(prompt.prompt, method="ar", max_new_tokens=20)
        assert answers[prompt.prompt].response_ids == alone.token_ids
    assert mixed.description()["dtype"] == "mixed", "its samples are not those of float32"


def test_a_sampled_answer_does_not_depend_on_its_neighbours() -> None:
    options = {"max_new_tokens": 15, "sampled_share": 1.0, "samples_per_prompt": 3}
    runs = [
        said(answered(target(), PROMPTS, RespondConfig(num_rows=rows, **options)))
        for rows in (1, 4, 32)
    ]
    assert runs[0] == runs[1] == runs[2]
    assert len(runs[0]) == 3 * len(PROMPTS)
    assert len({runs[0][i] for i in range(3)}) == 3, "samples of one prompt differ"


@pytest.mark.parametrize("architecture", ["llama", "mistral-window", "qwen2-mixed"])
def test_what_a_prompt_shares_with_a_neighbour_changes_nothing(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same answers and features, and far fewer prompt tokens run."""
    filled = []

    def run_batch(self: Target, token_ids: torch.Tensor, cache: BatchCache, **options: Any) -> Any:
        if cache.filling is not None:
            filled.append(token_ids.shape[1])
        return plain_run(self, token_ids, cache, **options)

    plain_run = Target.run_batch
    monkeypatch.setattr(Target, "run_batch", run_batch)
    config = RespondConfig(max_new_tokens=12, num_rows=5, samples_per_prompt=3)
    runs, counts = [], []
    for shares in (True, False):
        filled.clear()
        with monkeypatch.context() as patch:
            if not shares:
                patch.setattr(_Batch, "_alike", lambda self, request: (None, 0))
            found = list(respond(target(architecture), PROMPTS, config, capture=[0, 1]))
        runs.append({answer.response.index: answer for answer in found})
        counts.append(sum(filled))
    assert runs[0].keys() == runs[1].keys()
    for index, answer in runs[0].items():
        other = runs[1][index]
        assert answer.response.response_ids == other.response.response_ids
        if answer.sample is not None and other.sample is not None:
            assert torch.allclose(
                answer.sample.features.float(), other.sample.features.float(), atol=1e-2
            )
            assert torch.equal(answer.sample.token_ids, other.sample.token_ids)
    assert counts[0] < counts[1] / 2


def test_the_share_that_is_sampled_is_about_the_share_asked_for() -> None:
    prompts = [TrainingPrompt(source="test", prompt=f"hello {i}") for i in range(200)]
    config = RespondConfig(max_new_tokens=1, sampled_share=0.4, temperature=0.7)
    temperatures = [r.temperature for r in answered(target(), prompts, config)]
    assert set(temperatures) == {0.0, 0.7}
    assert 55 < temperatures.count(0.7) < 105


def test_a_stop_token_ends_an_answer_and_frees_its_row() -> None:
    model = tiny_model("llama")
    free = answered(target(), PROMPTS, RespondConfig(max_new_tokens=12, sampled_share=0))
    stop_id = free[0].response_ids[4]
    model.generation_config.eos_token_id = stop_id
    try:
        config = RespondConfig(max_new_tokens=12, num_rows=2, sampled_share=0)
        stopped = {r.index: r for r in answered(target(), PROMPTS, config)}
    finally:
        model.generation_config.eos_token_id = None
    for response in free:
        ids = response.response_ids
        end = ids.index(stop_id) + 1 if stop_id in ids else len(ids)
        assert stopped[response.index].response_ids == ids[:end]
        assert stopped[response.index].finished == (stop_id in ids)


class KilledError(Exception):
    """Stands for a kill."""


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    return file


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TargetSource:
    return TargetSource(name=str(write_target(tmp_path_factory.mktemp("target"))))


Run = Callable[..., list[Response]]


@pytest.fixture
def run(source: TargetSource, prompt_file: Path) -> Run:
    """Runs the stage; the responses by index."""

    def call(
        out: Path, *, layers: tuple[int, ...] = (), num_workers: int = 1, **options: object
    ) -> list[Response]:
        config = RespondConfig(**{"max_new_tokens": 10, "num_rows": 2, **options})
        job = RespondJob(
            target=source,
            prompt_files=[prompt_file],
            out=out,
            config=config,
            layer_ids=layers,
            num_workers=num_workers,
        )
        run_respond(job, Console(quiet=True))
        return sorted(read_responses(out / "responses.jsonl"), key=lambda r: r.index)

    return call


def test_an_interrupted_run_goes_on_and_ends_with_the_same_answers(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = (0, 2)
    whole = run(tmp_path / "whole", layers=layers)

    def killed(*args: object, **kwargs: object) -> object:
        for number, answer in enumerate(respond(*args, **kwargs)):
            if number == 3:
                raise KilledError
            yield answer

    monkeypatch.setattr("ddtree.train.run_respond.respond", killed)
    with pytest.raises(KilledError):
        run(tmp_path / "cut", layers=layers)
    assert len(SampleSet(tmp_path / "cut" / "samples")) == 3
    file = tmp_path / "cut" / "responses.jsonl"
    with file.open("a") as opened:
        opened.write('{"index": 5, "source": "te')  # a kill in the middle of a line
    monkeypatch.undo()
    asked: list[int] = []

    def counted(*args: object, done: frozenset[int], **options: object) -> object:
        asked.append(len(TEXTS) - len(done))
        return respond(*args, done=done, **options)

    monkeypatch.setattr("ddtree.train.run_respond.respond", counted)
    assert run(tmp_path / "cut", num_rows=3, layers=layers) == whole
    assert asked == [len(TEXTS) - 3]
    assert run(tmp_path / "cut", layers=layers) == whole, "a finished run stays as it is"
    assert SampleSet(tmp_path / "cut" / "samples").indices == list(range(len(TEXTS)))


def test_several_workers_give_the_responses_and_the_description_of_one(
    run: Run, tmp_path: Path
) -> None:
    one = run(tmp_path / "one", layers=(0, 2))
    assert run(tmp_path / "two", layers=(0, 2), num_workers=2) == one
    for card in ("respond.json", "samples/features.json"):
        assert (tmp_path / "two" / card).read_text() == (tmp_path / "one" / card).read_text()
    samples = [SampleSet(tmp_path / out / "samples") for out in ("one", "two")]
    for mine, other in zip(*samples, strict=True):
        assert mine.index == other.index
        assert torch.equal(mine.token_ids, other.token_ids)
        assert torch.allclose(mine.features.float(), other.features.float(), rtol=1e-3, atol=1e-3)


def test_without_layers_no_samples_are_recorded(run: Run, tmp_path: Path) -> None:
    run(tmp_path / "out")
    assert not (tmp_path / "out" / "samples").exists()
    assert json.loads((tmp_path / "out" / "respond.json").read_text())["layer_ids"] == []


def test_a_response_of_one_token_leaves_no_sample(run: Run, tmp_path: Path) -> None:
    assert len(run(tmp_path / "out", layers=(0,), max_new_tokens=1)) == len(TEXTS)
    assert len(SampleSet(tmp_path / "out" / "samples")) == 0


def test_a_line_that_is_no_response_is_named_and_stays(run: Run, tmp_path: Path) -> None:
    run(tmp_path / "out")
    file = tmp_path / "out" / "responses.jsonl"
    file.write_text(file.read_text() + "{}\n")
    with pytest.raises(CheckpointError, match=f"line {len(TEXTS) + 1}: expected a result"):
        run(tmp_path / "out")


def test_a_folder_of_another_run_is_refused_by_what_changed(run: Run, tmp_path: Path) -> None:
    run(tmp_path / "out")
    before = (tmp_path / "out" / "responses.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match="other values of max_new_tokens, seed"):
        run(tmp_path / "out", max_new_tokens=11, seed=1)
    assert (tmp_path / "out" / "responses.jsonl").read_bytes() == before


def write(lines: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / "p.jsonl").write_text(lines)
        return folder / "p.jsonl"

    return make


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "none.jsonl", "none.jsonl: expected a readable file"),
        (write(""), "expected prompts, got an empty file"),
        (write('{"prompt": "hi"}\n{"prompt": \n'), "line 2: expected an object"),
        (write('["hi"]\n'), "line 1"),
        (write('{"prompt": ""}\n'), "line 1"),
        (write('{"prompt": 3}\n'), "line 1"),
        (write('{"turns": []}\n'), "line 1"),
    ],
)
def test_a_bad_prompt_file_is_named_with_its_line(
    make: Callable[[Path], Path], message: str, tmp_path: Path
) -> None:
    with pytest.raises(PromptError, match=message):
        read_prompts([make(tmp_path)])


def test_prompts_come_from_plain_and_zipped_files_once_each(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "one"}\n\n{"turns": ["two", "more"]}\n')
    zipped = gzip.compress(b'{"prompt": "two"}\n{"prompt": "three", "source": "s"}\n')
    (tmp_path / "b.jsonl.gz").write_bytes(zipped)
    found = read_prompts([tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"])
    assert [(p.source, p.prompt) for p in found] == [("a", "one"), ("a", "two"), ("s", "three")]


def test_line_separators_inside_a_string_do_not_end_a_line(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a\u2028b\u0085c"}\n', encoding="utf-8")
    assert [p.prompt for p in read_prompts([tmp_path / "p.jsonl"])] == ["a\u2028b\u0085c"]


def test_a_target_without_a_chat_template_is_an_error() -> None:
    bare = Target(tiny_model("llama"), None, name="bare")
    with pytest.raises(PromptError, match="no tokenizer"):
        list(respond(bare, PROMPTS, RespondConfig()))


@pytest.mark.parametrize(
    "options",
    [
        {"num_rows": 0},
        {"samples_per_prompt": 0},
        {"sampled_share": 1.5},
        {"temperature": -1.0},
        {"max_new_tokens": 0},
    ],
)
def test_options_out_of_range_are_named(options: dict[str, float]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        RespondConfig(**options)
