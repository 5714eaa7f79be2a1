"""speculators' DFlash checkpoints: the same drafts as z-lab's, and nothing silently wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ddtree.errors import OptionError, UnsupportedModelError
from ddtree.models.drafter import DFlashDrafter
from ddtree.models.drafter_config import parse_drafter_config
from ddtree.models.loading import load_drafter, load_target, read_drafter_config
from ddtree.models.speculators import parse_speculators_config, speculators_json
from ddtree.models.target import Target
from ddtree.pair import Pair
from ddtree.provenance import drafter_digest
from ddtree.types import METHODS, Marginals
from tests.support.checkpoints import (
    Tensors,
    speculators_config,
    write_drafter,
    write_speculators,
    write_target,
)
from tests.support.drafters import feed
from tests.support.models import (
    HIDDEN_SIZE,
    NUM_LAYERS,
    VOCAB_SIZE,
    drafter_config,
    greedy_reference,
    tiny_model,
    tiny_target,
)

PROMPT = [5, 17, 42, 8, 23, 11, 2]
# A third of the target's tokens; the mask token (3) is not among them and need not be.
THIRD = list(range(1, VOCAB_SIZE, 3))
FULL, SLIDING = "full_attention", "sliding_attention"

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama")


@torch.inference_mode()
def proposed(drafter: DFlashDrafter, *, num_depths: int | None = None) -> Marginals:
    session = drafter.start(16)
    generator = torch.Generator().manual_seed(1)
    feed(session, torch.randn(12, 2 * HIDDEN_SIZE, generator=generator))
    return session.propose(7, num_depths=num_depths or drafter.num_depths, num_ranks=VOCAB_SIZE)


def assert_same_drafts(one: DFlashDrafter, other: DFlashDrafter) -> None:
    expected, got = proposed(one), proposed(other)
    assert got.token_ids.equal(expected.token_ids)
    assert got.log_probs.equal(expected.log_probs)


# What is read.


@pytest.mark.parametrize("token_ids", [None, THIRD, [7]], ids=["whole", "a third", "one token"])
@pytest.mark.parametrize("architecture", ["llama", "llama-tied"])
def test_the_drafts_are_those_of_the_same_drafter_in_z_labs_format(
    architecture: str, token_ids: list[int] | None, tmp_path: Path
) -> None:
    target = tiny_target(architecture)
    plain = write_drafter(tmp_path / "z-lab", draft_token_ids=token_ids)
    other = write_speculators(tmp_path / "speculators", architecture, draft_token_ids=token_ids)
    loaded = load_drafter(other, target)
    assert_same_drafts(load_drafter(plain, target), loaded)
    assert loaded.layer_ids == (0, 2)
    ids = loaded.draft_token_ids
    assert (None if ids is None else ids.tolist()) == token_ids


@pytest.mark.parametrize("non_causal", [False, True])
def test_sliding_layers_are_causal_unless_declared_otherwise(
    non_causal: bool, tmp_path: Path, target: Target
) -> None:
    layers = {"layer_types": [SLIDING, FULL], "sliding_window": 5}
    folder = write_speculators(
        tmp_path / "speculators", decoder=layers, sliding_window_non_causal=non_causal
    )
    declared = {"is_causal": False} if non_causal else {}
    plain = write_drafter(tmp_path / "z-lab", **layers, **declared)
    loaded = load_drafter(folder, target)
    assert loaded.config.causal == (not non_causal, False)
    assert loaded.config.windows == (5, None)
    assert_same_drafts(load_drafter(plain, target), loaded)


def test_what_older_files_carry_of_the_target_and_newer_ones_leave_out_changes_nothing(
    tmp_path: Path, target: Target
) -> None:
    def older(tensors: Tensors) -> None:
        tensors["verifier_norm.weight"] = torch.ones(HIDDEN_SIZE)
        tensors["verifier_lm_head.weight"] = torch.zeros(VOCAB_SIZE, HIDDEN_SIZE)

    def newer(tensors: Tensors) -> None:
        del tensors["embed_tokens.weight"], tensors["lm_head.weight"]

    def identity(tensors: Tensors) -> None:
        tensors["d2t"] = torch.zeros(VOCAB_SIZE, dtype=torch.int64)
        tensors["t2d"] = torch.ones(VOCAB_SIZE, dtype=torch.bool)

    plain = load_drafter(write_speculators(tmp_path / "plain"), target)
    for edit in (older, newer, identity):
        folder = write_speculators(tmp_path / edit.__name__, edit=edit)
        loaded = load_drafter(folder, target)
        assert loaded.draft_token_ids is None
        assert_same_drafts(plain, loaded)


def test_copies_rounded_to_bfloat16_are_the_targets(tmp_path: Path, target: Target) -> None:
    def round_all(tensors: Tensors) -> None:
        for key in ("embed_tokens.weight", "lm_head.weight"):
            tensors[key] = tensors[key].bfloat16()

    rounded = write_speculators(tmp_path / "rounded", edit=round_all, draft_token_ids=THIRD)
    exact = write_speculators(tmp_path / "exact", draft_token_ids=THIRD)
    assert_same_drafts(load_drafter(exact, target), load_drafter(rounded, target))
    half = load_target(
        write_target(tmp_path / "target", tokenizer=False), device="cpu", dtype="bfloat16"
    )
    assert load_drafter(exact, half).draft_token_ids.tolist() == THIRD


def test_a_packed_target_lends_its_head_too(tmp_path: Path) -> None:
    packed = load_target(write_target(tmp_path / "target", tokenizer=False), device="cpu")
    folder = write_speculators(tmp_path / "drafter", draft_token_ids=THIRD)
    assert load_drafter(folder, packed).draft_token_ids.tolist() == THIRD


def test_loading_says_the_format_and_what_the_drafter_can_propose(
    tmp_path: Path, target: Target
) -> None:
    said: list[str] = []
    load_drafter(write_speculators(tmp_path, draft_token_ids=THIRD), target, say=said.append)
    (line,) = said
    assert "speculators' format" in line
    assert f"drafts 20 of {VOCAB_SIZE} tokens, made for /somewhere/else" in line
    load_drafter(write_drafter(tmp_path / "z-lab"), target, say=said.append)
    assert said == [line]


def test_the_configuration_is_read_without_weights(tmp_path: Path) -> None:
    folder = write_speculators(tmp_path, draft_token_ids=THIRD)
    (folder / "model.safetensors").unlink()
    config = read_drafter_config(str(folder))
    assert (config.draft_vocab_size, config.target_layer_ids) == (20, (0, 2))


# An embedding and a head of its own.


def retrain(*keys: str) -> Callable[[Tensors], None]:
    """Other numbers in every row of these tensors."""

    def edit(tensors: Tensors) -> None:
        generator = torch.Generator().manual_seed(9)
        for key in keys:
            tensors[key] += torch.randn(tensors[key].shape, generator=generator)

    return edit


EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("token_ids", [None, THIRD], ids=["whole", "a third"])
def test_an_embedding_and_a_head_of_its_own_are_used(
    token_ids: list[int] | None, packed: bool, tmp_path: Path, target: Target
) -> None:
    folder = write_speculators(tmp_path, draft_token_ids=token_ids, edit=retrain(EMBEDDING, HEAD))
    drafter = load_drafter(folder, target, packed=packed)
    stored = load_file(folder / "model.safetensors")
    blocks: list[torch.Tensor] = []
    hidden: list[torch.Tensor] = []
    drafter.network.register_forward_pre_hook(lambda module, given: blocks.append(given[0]))
    drafter.network.register_forward_hook(lambda module, given, made: hidden.append(made))
    marginals = proposed(drafter)
    assert blocks[0].equal(stored[EMBEDDING][[7] + [3] * 7])
    logits = hidden[0][1:] @ stored[HEAD].T
    columns = marginals.token_ids
    if token_ids is not None:
        columns = torch.tensor([token_ids.index(i) for i in columns.flatten()]).view_as(columns)
    expected = logits.log_softmax(-1).gather(1, columns)
    torch.testing.assert_close(marginals.log_probs, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("token_ids", [None, THIRD], ids=["whole", "a third"])
@pytest.mark.parametrize(
    ("keys", "kept"),
    [
        ((), []),
        ((EMBEDDING,), ["embedding"]),
        ((HEAD,), ["head"]),
        ((EMBEDDING, HEAD), ["embedding", "head"]),
    ],
    ids=str,
)
def test_only_what_is_not_the_targets_is_held(
    keys: tuple[str, ...],
    kept: list[str],
    token_ids: list[int] | None,
    tmp_path: Path,
    target: Target,
) -> None:
    folder = write_speculators(tmp_path, draft_token_ids=token_ids, edit=retrain(*keys))
    drafter = load_drafter(folder, target)
    assert list(drafter.own_tensors) == kept
    stored = load_file(folder / "model.safetensors")
    for key, tensor in zip(keys, drafter.own_tensors.values(), strict=True):
        assert tensor.equal(stored[key])


def test_a_single_row_of_its_own_is_enough(tmp_path: Path, target: Target) -> None:
    def retrain_the_mask(tensors: Tensors) -> None:
        tensors[EMBEDDING][3] *= 2

    said: list[str] = []
    folder = write_speculators(tmp_path / "own", edit=retrain_the_mask)
    drafter = load_drafter(folder, target, say=said.append)
    assert drafter.own_tensors["embedding"][3].equal(2 * target.embed(torch.tensor([3]))[0])
    plain = load_drafter(write_speculators(tmp_path / "plain"), target)
    assert not proposed(drafter).log_probs.equal(proposed(plain).log_probs)
    (line,) = said
    assert line.endswith(", with its own embed_tokens.weight (1 of 61 rows differ)")


def test_another_dtype_than_the_targets_is_no_problem(tmp_path: Path) -> None:
    half = load_target(
        write_target(tmp_path / "target", tokenizer=False), device="cpu", dtype="bfloat16"
    )
    folder = write_speculators(tmp_path / "drafter", edit=retrain(EMBEDDING, HEAD))
    drafter = load_drafter(folder, half)
    assert {tensor.dtype for tensor in drafter.own_tensors.values()} == {torch.bfloat16}
    text = Pair(half, drafter).generate(PROMPT, budget=6, max_new_tokens=8)
    assert text.num_tokens == 8


def test_the_digest_of_a_drafter_covers_what_is_its_own(tmp_path: Path, target: Target) -> None:
    folders = {
        edit: write_speculators(tmp_path / str(i), edit=retrain(*edit))
        for i, edit in enumerate(((), (EMBEDDING,), (HEAD,)))
    }
    digests = [
        [drafter_digest(load_drafter(f, target, packed=packed)) for f in folders.values()]
        for packed in (False, True)
    ]
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 3


# Slots that predict the position after their own.


def test_sampling_from_the_anchor_uses_its_slot_too(tmp_path: Path, target: Target) -> None:
    plain = load_drafter(write_speculators(tmp_path / "plain"), target)
    folder = write_speculators(tmp_path / "anchor", sample_from_anchor=True)
    anchor = load_drafter(folder, target)
    assert (plain.num_depths, anchor.num_depths) == (7, 8)
    expected, got = proposed(plain), proposed(anchor)
    assert got.num_depths == 8
    # The same network over the same block, read one slot earlier.
    assert got.log_probs[1:].equal(expected.log_probs)
    assert got.token_ids[1:].equal(expected.token_ids)
    fewer = proposed(anchor, num_depths=3)
    assert fewer.token_ids.equal(got.token_ids[:3])
    assert read_drafter_config(str(folder)).num_depths == 8


# Lossless: the drafter decides how fast, never what.

OWN: dict[str, dict[str, object]] = {
    "borrowed": {},
    "own": {"edit": retrain(EMBEDDING, HEAD)},
    "anchor": {"sample_from_anchor": True},
    "own embedding, anchor": {"edit": retrain(EMBEDDING), "sample_from_anchor": True},
}


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 5}], ids=str)
@pytest.mark.parametrize(
    ("architecture", "own"),
    [
        ("llama-tied", "borrowed"),
        ("llama-tied", "own"),
        ("llama-tied", "own embedding, anchor"),
        ("qwen2-mixed", "borrowed"),
        ("qwen2-mixed", "anchor"),
    ],
)
def test_every_method_says_what_the_target_says(
    architecture: str, own: str, options: dict[str, float], tmp_path: Path
) -> None:
    target = tiny_target(architecture)
    folder = write_speculators(tmp_path, architecture, draft_token_ids=THIRD, **OWN[own])
    pair = Pair(target, load_drafter(folder, target))
    texts = {
        method: pair.generate(PROMPT, method=method, budget=6, max_new_tokens=12, **options)
        for method in METHODS
    }
    assert len({generation.token_ids for generation in texts.values()}) == 1
    if not options:
        reference = greedy_reference(tiny_model(architecture), PROMPT, 12)
        assert list(texts["ddtree"].token_ids) == reference
    proposals = [set(r.tree.token_ids[1:].tolist()) for r in texts["ddtree"].rounds if r.tree]
    assert set().union(*proposals) <= set(THIRD)
    assert any(proposals)
    chain = next(r.tree for r in texts["dflash"].rounds if r.tree)
    assert int(chain.depths.max()) == min(6, pair.drafter.num_depths)


# The configuration, out and in again.


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"layer_types": [SLIDING, FULL], "sliding_window": 5},
        {"layer_types": [SLIDING, FULL], "sliding_window": 5, "is_causal": False},
        {"attention_bias": True, "rms_norm_eps": 1e-5},
    ],
    ids=str,
)
@pytest.mark.parametrize("sample_from_anchor", [False, True])
def test_a_configuration_that_is_written_is_read_back(
    changes: dict[str, object], sample_from_anchor: bool
) -> None:
    plain = parse_drafter_config(drafter_config(**changes, num_target_layers=None), "test")
    config = replace(plain, sample_from_anchor=sample_from_anchor)
    written = speculators_json(
        config, vocab_size=VOCAB_SIZE, dtype=torch.float32, verifier="v", architectures=()
    )
    assert parse_speculators_config(written, "test") == config


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"output_multiplier": 0.5}, "output_multiplier"),
        ({"final_logit_softcapping": 20.0}, "final_logit_softcapping"),
        ({"input_embedding_scale": 2.0}, "input_embedding_scale"),
        ({"is_causal": True}, "causal"),
    ],
    ids=str,
)
def test_what_the_format_has_no_words_for_is_not_written(
    changes: dict[str, object], key: str
) -> None:
    config = parse_drafter_config(drafter_config(**changes), "test")
    with pytest.raises(OptionError, match=f"config.{key}: expected"):
        speculators_json(
            config, vocab_size=VOCAB_SIZE, dtype=torch.float32, verifier="v", architectures=()
        )


# What is unusual.


def test_the_drafter_of_another_target_is_told_by_every_row(tmp_path: Path) -> None:
    said: list[str] = []
    folder = write_speculators(tmp_path, "llama", draft_token_ids=THIRD)
    drafter = load_drafter(folder, tiny_target("qwen3"), say=said.append)
    assert list(drafter.own_tensors) == ["embedding", "head"]
    (line,) = said
    kept = "embed_tokens.weight (61 of 61 rows differ) and lm_head.weight (20 of 20 rows differ)"
    assert line.endswith(f", with its own {kept}; check that tiny qwen3 is its target")


def test_a_target_whose_head_has_a_bias_is_not_told_by_rows(tmp_path: Path) -> None:
    model = copy.deepcopy(tiny_model("llama"))
    model.set_output_embeddings(torch.nn.Linear(HIDDEN_SIZE, VOCAB_SIZE))
    with pytest.raises(UnsupportedModelError, match="a head with a bias"):
        load_drafter(write_speculators(tmp_path), Target(model, None, name="biased"))


def test_the_taps_are_counted_from_the_embedding(target: Target) -> None:
    config = speculators_config(aux_hidden_state_layer_ids=[1, NUM_LAYERS])
    assert parse_speculators_config(config, "test").target_layer_ids == (0, NUM_LAYERS - 1)
