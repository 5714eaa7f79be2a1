"""The stage "features": one pass over a response gives what was recorded while it was said."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from ddtree.errors import CheckpointError, ContextLengthError, OptionError, PromptError
from ddtree.models.target import Target
from ddtree.train.features import compute_samples
from ddtree.train.prompts import TrainingPrompt
from ddtree.train.respond import RespondConfig, respond
from ddtree.train.responses import Response, read_responses
from ddtree.train.run_features import FeaturesJob, run_features
from ddtree.train.run_respond import RespondJob, run_respond
from ddtree.train.samples import Sample, SampleSet
from ddtree.train.target_source import TargetSource
from tests.support.checkpoints import write_target
from tests.support.models import NUM_LAYERS, VOCAB_SIZE, tiny_model
from tests.support.tokenizers import tiny_tokenizer

LAYER_IDS = (0, 2)
TEXTS = ["hello", "why not", "the lazy dog jumps over the fox", "brown fox", "over", "hi dog"]
PROMPTS = [TrainingPrompt(source="test", prompt=text) for text in TEXTS]


def target(architecture: str = "llama") -> Target:
    return Target(tiny_model(architecture), tiny_tokenizer(), name=f"tiny {architecture}")


def assert_close(one: Sample, other: Sample) -> None:
    assert (one.index, one.num_prompt_tokens) == (other.index, other.num_prompt_tokens)
    assert torch.equal(one.token_ids, other.token_ids)
    assert torch.equal(one.top_ids, other.top_ids)
    for field in ("features", "top_log_probs"):
        mine, theirs = getattr(one, field), getattr(other, field)
        assert mine.dtype == theirs.dtype == torch.float16
        assert torch.allclose(mine.float(), theirs.float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("architecture", ["llama", "mistral-window", "qwen2-mixed"])
def test_a_pass_over_a_response_gives_what_was_recorded(architecture: str) -> None:
    config = RespondConfig(max_new_tokens=15, num_rows=3)
    answers = list(respond(target(architecture), PROMPTS, config, capture=LAYER_IDS))
    recorded = {a.response.index: a.sample for a in answers}
    responses = [answer.response for answer in answers]
    computed = list(compute_samples(target(architecture), responses, LAYER_IDS))
    assert len(computed) == len(PROMPTS)
    for sample in computed:
        assert sample.num_response_tokens == 15
        assert_close(sample, recorded[sample.index])


def test_features_and_favourites_are_the_models_own() -> None:
    response = Response(
        index=4, source="", prompt="hello", temperature=0, response_ids=(5, 9, 2), finished=False
    )
    (sample,) = compute_samples(target(), [response], LAYER_IDS)
    with torch.inference_mode():
        ids = sample.token_ids[None].long()
        output = tiny_model("llama")(ids, output_hidden_states=True)
    hidden = torch.cat([output.hidden_states[i + 1][0, :-1] for i in LAYER_IDS], dim=-1)
    assert torch.allclose(sample.features.float(), hidden, rtol=1e-3, atol=1e-3)
    first = sample.num_prompt_tokens - 1
    log_probs, order = output.logits[0, first:-1].log_softmax(-1).sort(descending=True)
    assert torch.equal(sample.top_ids, order[:, :16].int())
    assert torch.allclose(sample.top_log_probs.float(), log_probs[:, :16], rtol=1e-3, atol=1e-3)
    assert sample.token_ids[-3:].tolist() == [5, 9, 2]


def test_what_has_a_sample_or_is_too_short_is_passed_over_and_parts_make_the_whole() -> None:
    lengths = [3, 1, 2, 4, 2, 3]
    responses = [
        Response(
            index=i,
            source="",
            prompt="hello",
            temperature=0,
            response_ids=(7,) * length,
            finished=True,
        )
        for i, length in enumerate(lengths)
    ]

    def indices(**options: object) -> list[int]:
        return [s.index for s in compute_samples(target(), responses, LAYER_IDS, **options)]

    assert indices(done={0, 5}) == [2, 3, 4]
    assert indices(part=(0, 2)) == [0, 3, 5]
    assert indices(part=(1, 2)) == [2, 4]


# The stage as a person runs it.


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TargetSource:
    return TargetSource(name=str(write_target(tmp_path_factory.mktemp("target"))))


@pytest.fixture
def responses_file(tmp_path: Path) -> Path:
    """Six responses as they may come from elsewhere: without an index."""
    config = RespondConfig(max_new_tokens=8)
    answers = sorted(respond(target(), PROMPTS, config), key=lambda a: a.response.index)
    lines = [
        json.dumps({"prompt": a.response.prompt, "response_ids": a.response.response_ids})
        for a in answers
    ]
    path = tmp_path / "r.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


Run = Callable[..., str]


@pytest.fixture
def run(source: TargetSource, responses_file: Path) -> Run:
    """Runs the stage; what it printed."""

    def call(out: Path, **options: object) -> str:
        job = {"target": source, "responses": responses_file, "layer_ids": LAYER_IDS, **options}
        said = io.StringIO()
        run_features(FeaturesJob(out=out, **job), Console(file=said, width=200))
        return said.getvalue()

    return call


class KilledError(Exception):
    """Stands for a kill."""


def test_an_interrupted_run_goes_on_and_ends_with_the_same_samples(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = run(tmp_path / "whole")
    assert "6 samples" in said
    asked: list[int] = []

    def killed(*args: object, **options: object) -> Iterator[Sample]:
        for number, sample in enumerate(compute_samples(*args, **options)):
            if number == 2:
                raise KilledError
            asked.append(sample.index)
            yield sample

    monkeypatch.setattr("ddtree.train.run_features.compute_samples", killed)
    for _ in range(2):
        with pytest.raises(KilledError):
            run(tmp_path / "cut")
    monkeypatch.undo()
    said = run(tmp_path / "cut")
    assert asked == [0, 1, 2, 3]
    assert "4 of 6 samples are there already" in said
    whole, cut = (SampleSet(tmp_path / name / "samples") for name in ("whole", "cut"))
    assert cut.indices == whole.indices == list(range(6))
    for one, other in zip(whole, cut, strict=True):
        assert_close(one, other)
    assert "6 of 6 samples are there already" in run(tmp_path / "cut")


def test_recorded_samples_are_not_computed_again(
    run: Run, source: TargetSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    out = tmp_path / "out"
    options = {"target": source, "prompt_files": [prompts], "out": out}
    config = RespondConfig(max_new_tokens=8)
    run_respond(RespondJob(**options, config=config, layer_ids=LAYER_IDS), Console(quiet=True))
    assert len(SampleSet(out / "samples")) == 6
    monkeypatch.setattr("ddtree.train.run_features.compute_samples", None)
    assert "6 of 6" in run(out, responses=out / "responses.jsonl")
    with pytest.raises(CheckpointError, match="other values of layer_ids"):
        run(out, layer_ids=(0, 1))


def test_samples_of_another_target_or_of_other_responses_are_refused(
    run: Run, responses_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run(out)
    other = write_target(tmp_path / "other", "llama-tied")
    with pytest.raises(CheckpointError, match="other values of target, weights_sha256"):
        run(out, target=TargetSource(name=str(other)))
    lines = gzip.decompress(responses_file.read_bytes()).decode().split("\n")
    (tmp_path / "swapped.jsonl").write_text("\n".join([lines[1], lines[0], *lines[2:]]))
    with pytest.raises(CheckpointError, match="sample 0: expected the response of that index"):
        run(out, responses=tmp_path / "swapped.jsonl")


def test_short_responses_are_counted_and_only_short_ones_are_an_error(
    run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "short.jsonl"
    file.write_text('{"prompt": "a", "response_ids": [3]}\n{"prompt": "a", "response_ids": [3, 4]}')
    said = run(tmp_path / "out", responses=file)
    assert "1 responses of under 2 tokens are left out" in said
    assert SampleSet(tmp_path / "out" / "samples").indices == [1]
    file.write_text('{"prompt": "a", "response_ids": [3]}\n')
    with pytest.raises(PromptError, match="expected a response of at least 2 tokens, got 1"):
        run(tmp_path / "none", responses=file)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("layer_ids", [(), (0, NUM_LAYERS), (-1,), (1, 1)])
def test_a_layer_that_is_not_there_is_named(
    layer_ids: tuple[int, ...], run: Run, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match="layers: expected different layer ids from 0 to 3"):
        run(tmp_path / "out", layer_ids=layer_ids)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("response_ids", "kind", "message"),
    [
        ([1, VOCAB_SIZE], PromptError, "response 0: expected token ids from 0 to 60"),
        ([1] * 300, ContextLengthError, "within the context of 256"),
    ],
)
def test_a_response_that_the_target_cannot_read_is_named(
    response_ids: list[int], kind: type[Exception], message: str, run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text(json.dumps({"prompt": "hello", "response_ids": response_ids}))
    with pytest.raises(kind, match=message):
        run(tmp_path / "out", responses=file)


def test_no_workers_are_refused(source: TargetSource, tmp_path: Path) -> None:
    job = {"target": source, "responses": tmp_path, "out": tmp_path, "layer_ids": LAYER_IDS}
    with pytest.raises(OptionError, match="num_workers: expected a whole number >= 1, got 0"):
        FeaturesJob(**job, num_workers=0)


# Files of responses.

GOOD = '{"prompt": "hi", "response_ids": [1, 2]}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "r.jsonl: expected a readable file"),
        ("", "expected responses, got an empty file"),
        ("\n\n", "expected responses, got an empty file"),
        (GOOD + '{"prompt": "hi", "resp', "line 2: expected a response"),
        ("[1]", "line 1: expected a response"),
        ('{"response_ids": [1]}', "line 1: .* got prompt None"),
        ('{"prompt": " ", "response_ids": [1]}', "line 1"),
        (GOOD + '{"prompt": "hi"}', "line 2: .* got response_ids None"),
        ('{"prompt": "hi", "response_ids": []}', "line 1"),
        ('{"prompt": "hi", "response_ids": [1, -2]}', "line 1"),
        ('{"prompt": "hi", "response_ids": [1, true]}', "line 1"),
        ('{"prompt": "hi", "response_ids": [1], "index": "a"}', "line 1: .* got index 'a'"),
        ('{"prompt": "hi", "response_ids": [1], "temperature": "a"}', "line 1: .* temperature"),
        (GOOD + '{"prompt": "hi", "response_ids": [1], "index": 0}', "line 2: .* second time"),
    ],
)
def test_a_bad_file_of_responses_is_named_with_its_line(
    content: str | None, message: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "r.jsonl").write_text(content)
    with pytest.raises(PromptError, match=message):
        read_responses(tmp_path / "r.jsonl")


def test_a_damaged_zip_is_named(tmp_path: Path) -> None:
    raw = bytearray(gzip.compress(GOOD.encode() * 50))
    raw[15:20] = b"\xff" * 5
    (tmp_path / "r.jsonl.gz").write_bytes(raw)
    with pytest.raises(PromptError, match="expected a readable file"):
        read_responses(tmp_path / "r.jsonl.gz")


def test_without_an_index_the_line_counts_from_0(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text(GOOD + "\n" + GOOD.replace("hi", "a\u2028b"), encoding="utf-8")
    assert [(r.index, r.prompt, r.source) for r in read_responses(file)] == [
        (0, "hi", "r"),
        (2, "a\u2028b", "r"),
    ]
