"""Outside arms: transformers' own generation on our target, greedy, and saying what ours says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import GenerationConfig

from ddtree.bench.outside import Assistant, load_assistant, run_outside
from ddtree.bench.records import Arm, ArmRecord
from ddtree.errors import ModelNotFoundError, OptionError, PairMismatchError
from ddtree.models.loading import load_target
from ddtree.models.target import Target
from tests.support.checkpoints import write_target
from tests.support.models import greedy_reference, tiny_model
from tests.support.tokenizers import tiny_tokenizer

PROMPT = [5, 17, 42, 8, 23, 11, 2]
METHODS = ("hf-generate", "prompt-lookup", "assistant")

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("outside") / "target")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Target:
    """As the command line has it: with our attention and, where they exist, packed layers."""
    return load_target(folder)


@pytest.fixture
def shared() -> Iterator[Target]:
    """Over the shared model, whose generation config is put back."""
    model = tiny_model("llama")
    before = model.generation_config
    yield Target(model, tiny_tokenizer(), name="tiny")
    model.generation_config = before


def run(method: str, target: Target, max_new_tokens: int = 20) -> ArmRecord:
    small = Assistant(name="small", model=tiny_model("llama-tied"))
    return run_outside(
        Arm(name=method, method=method),
        target,
        PROMPT,
        max_new_tokens=max_new_tokens,
        assistant=small if method == "assistant" else None,
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_target_that_we_loaded_says_with_transformers_what_it_says_with_us(
    method: str, loaded: Target
) -> None:
    record = run(method, loaded)
    plain = greedy_reference(loaded.model, PROMPT, 20)
    assert list(record.token_ids) == plain
    assert record.elapsed_s > 0
    assert (record.arm, record.prefill_s, record.rounds, record.node_bins) == (method, None, (), ())


@pytest.mark.parametrize("method", METHODS)
def test_a_stop_token_ends_the_text_as_it_ends_ours(method: str, shared: Target) -> None:
    free = greedy_reference(shared.model, PROMPT, 20)
    shared.model.generation_config = GenerationConfig(eos_token_id=[free[6], 60])
    assert list(run(method, shared).token_ids) == free[: free.index(free[6]) + 1]


@pytest.mark.parametrize("method", METHODS)
def test_defaults_of_the_checkpoint_change_nothing_and_are_there_afterwards(
    method: str, shared: Target
) -> None:
    plain = greedy_reference(shared.model, PROMPT, 20)
    penalised = GenerationConfig(repetition_penalty=3.0, min_new_tokens=3)
    shared.model.generation_config = penalised
    assert greedy_reference(shared.model, PROMPT, 20) != plain
    assert list(run(method, shared).token_ids) == plain
    assert shared.model.generation_config is penalised


def test_what_transformers_refuses_is_named(
    shared: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("no assisted generation for this cache")

    monkeypatch.setattr(shared.model, "generate", refuse)
    with pytest.raises(OptionError, match=r"got prompt-lookup: no assisted .* Leave prompt-lookup"):
        run("prompt-lookup", shared)


def test_an_assistant_is_loaded_as_the_target_was(folder: Path, loaded: Target) -> None:
    small = load_assistant(str(folder), loaded)
    assert small.name == str(folder)
    assert (small.model.dtype, small.model.device) == (loaded.dtype, loaded.device)


def test_an_assistant_with_another_tokenizer_is_refused(folder: Path, loaded: Target) -> None:
    silent = Target(tiny_model("llama"), None, name="silent")
    with pytest.raises(PairMismatchError, match=f"assistant {folder}: expected the tokenizer of"):
        load_assistant(str(folder), silent)


def test_an_assistant_that_is_not_there_is_called_an_assistant(loaded: Target) -> None:
    with pytest.raises(ModelNotFoundError, match=r"^assistant: expected a hub id"):
        load_assistant("./nowhere", loaded)
