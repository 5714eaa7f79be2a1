"""Whatever marginals come from, the text is the target's: Medusa heads and PARD beside DFlash."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ddtree
from ddtree.models.loading import load_drafter
from ddtree.models.target import Target
from tests.support.models import VOCAB_SIZE, greedy_reference, tiny_model, tiny_target
from tests.support.sources import medusa_tensors, write_medusa, write_pard
from tests.support.tokenizers import tiny_tokenizer

PROMPT = [(7 * i + 3) % VOCAB_SIZE for i in range(12)]
NUM_NEW = 20
SOURCES: dict[str, Callable[[Path], Path]] = {
    "medusa": write_medusa,
    "medusa over the target's head": lambda folder: write_medusa(
        folder, tensors=medusa_tensors(linears=False), pickled=True
    ),
    "pard": lambda folder: write_pard(folder, tokenizer=False),
    "pard qwen3": lambda folder: write_pard(folder, "qwen3-tied", tokenizer=False),
    "pard of fewer tokens": lambda folder: write_pard(folder, vocab_size=VOCAB_SIZE - 6),
}
# Every source on one architecture, one of each kind on another, beyond its window.
CASES = [("llama", source) for source in SOURCES]
CASES += [("qwen2-mixed", source) for source in ("medusa", "pard")]
SAMPLED = {"temperature": 1.0, "top_p": 0.95, "seed": 5}
GREEDY = {"temperature": 0.0}


def with_tokenizer(architecture: str) -> Target:
    return Target(tiny_model(architecture), tiny_tokenizer(), name=architecture)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sources")
    return {name: write(root / name) for name, write in SOURCES.items()}


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("architecture", "source"), CASES)
def test_every_method_and_budget_says_what_the_target_says(
    architecture: str, source: str, options: dict, folders: dict[str, Path]
) -> None:
    target = with_tokenizer(architecture)
    pair = ddtree.Pair(target, load_drafter(folders[source], target))
    options = {**options, "max_new_tokens": NUM_NEW}
    arms = (("ar", 0), ("dflash", 12), ("ddtree", 1), ("ddtree", 16))
    texts = {
        arm: pair.generate(PROMPT, method=arm[0], budget=arm[1], **options).token_ids
        for arm in arms
    }
    assert len(set(texts.values())) == 1
    if options["temperature"] == 0:
        reference = greedy_reference(tiny_model(architecture), PROMPT, NUM_NEW)
        assert list(texts["ar", 0]) == reference


@pytest.mark.parametrize("source", ["medusa", "pard"])
def test_a_budget_that_chooses_itself_measures_the_pass_and_leaves_no_trace(
    source: str, folders: dict[str, Path]
) -> None:
    target = with_tokenizer("llama")
    pair = ddtree.Pair(target, load_drafter(folders[source], target))
    assert pair.experience.profile.draft > 0
    reference = greedy_reference(tiny_model("llama"), PROMPT, NUM_NEW)
    for _ in range(2):
        generation = pair.generate(PROMPT, max_new_tokens=NUM_NEW)
        assert list(generation.token_ids) == reference


def test_a_pard_model_that_is_the_target_is_always_right_at_the_first_depth(
    tmp_path: Path,
) -> None:
    """What stands behind the root's own row is the target's next token, masks or not."""
    folder = write_pard(tmp_path / "same", model=tiny_model("llama"), tokenizer=False)
    target = tiny_target("llama")
    pair = ddtree.Pair(target, load_drafter(folder, target))
    rounds = pair.generate(PROMPT, lookup=False, budget=1, max_new_tokens=1 + 2 * 10).rounds
    assert [r.num_tokens for r in rounds] == [1, *[2] * 10]


def test_the_same_with_noise_that_the_drafter_hears(tmp_path: Path) -> None:
    folder = write_pard(tmp_path / "same", model=tiny_model("llama"), tokenizer=False)
    target = tiny_target("llama")
    pair = ddtree.Pair(target, load_drafter(folder, target))
    options = {"temperature": 1.0, "seed": 2, "budget": 1, "max_new_tokens": 41, "lookup": False}
    coupled = pair.generate(PROMPT, **options)
    alone = pair.generate(PROMPT, **options, coupled=False)
    assert coupled.token_ids == alone.token_ids
    assert coupled.acceptance_length > alone.acceptance_length + 0.2


def test_heads_hear_the_noise_too(tmp_path: Path) -> None:
    target = tiny_target("llama")
    pair = ddtree.Pair(target, load_drafter(write_medusa(tmp_path / "heads"), target))
    options = {"temperature": 1.0, "seed": 2, "budget": 8, "max_new_tokens": NUM_NEW}
    texts = {pair.generate(PROMPT, **options, coupled=c).token_ids for c in (True, False)}
    texts.add(pair.generate(PROMPT, **options, method="ar").token_ids)
    assert len(texts) == 1


@pytest.mark.parametrize("source", ["medusa", "pard"])
def test_two_requests_at_once_do_not_mix(source: str, folders: dict[str, Path]) -> None:
    target = with_tokenizer("llama")
    pair = ddtree.Pair(target, load_drafter(folders[source], target))
    prompts = (PROMPT, PROMPT[::-1])
    options = {"budget": 8, "max_new_tokens": NUM_NEW, "lookup": False}
    alone = [pair.generate(prompt, **options) for prompt in prompts]
    streams = [pair.stream(prompt, **options) for prompt in prompts]
    last = [None, None]
    running = {0, 1}
    while running:
        for i in sorted(running):
            piece = next(streams[i], None)
            if piece is None:
                running.remove(i)
            else:
                last[i] = piece
    for generation, together in zip(alone, last, strict=True):
        assert together.token_ids == generation.token_ids
        # The same trees too: what a drafter says hangs on its own request alone.
        assert [r.num_tokens for r in together.rounds] == [r.num_tokens for r in generation.rounds]


def test_transformers_generate_takes_them_too(folders: dict[str, Path]) -> None:
    model = tiny_model("llama")
    target = with_tokenizer("llama")
    ids = torch.tensor([PROMPT])
    reference = greedy_reference(model, PROMPT, NUM_NEW)
    for source in ("medusa", "pard"):
        sequence = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_NEW,
            do_sample=False,
            custom_generate=ddtree.custom_generate,
            drafter=load_drafter(folders[source], target),
            budget=8,
        )
        assert sequence[0, len(PROMPT) :].tolist() == reference
