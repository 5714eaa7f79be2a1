"""speculators' DFlash checkpoints: the same drafts as z-lab's, and nothing silently wrong."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ddtree.errors import CheckpointError, OptionError, PairMismatchError, UnsupportedModelError
from ddtree.models.drafter import DFlashDrafter
from ddtree.models.drafter_config import parse_drafter_config
from ddtree.models.loading import load_drafter, load_target, read_drafter_config
from ddtree.models.speculators import parse_speculators_config, speculators_json
from ddtree.models.target import Target
from ddtree.pair import Pair
from ddtree.types import METHODS, Marginals
from tests.support.checkpoints import (
    Tensors,
    speculators_config,
    write_drafter,
    write_speculators,
    write_target,
)
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
def proposed(drafter: DFlashDrafter) -> Marginals:
    session = drafter.start(16)
    generator = torch.Generator().manual_seed(1)
    session.extend(torch.randn(12, 2 * HIDDEN_SIZE, generator=generator))
    return session.propose(7, num_depths=drafter.num_depths, num_ranks=VOCAB_SIZE)


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


# Lossless: the drafter decides how fast, never what.


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 5}], ids=str)
@pytest.mark.parametrize("architecture", ["llama-tied", "qwen2-mixed"])
def test_every_method_says_what_the_target_says(
    architecture: str, options: dict[str, float], tmp_path: Path
) -> None:
    target = tiny_target(architecture)
    folder = write_speculators(tmp_path, architecture, draft_token_ids=THIRD)
    pair = Pair(target, load_drafter(folder, target))
    texts = {
        method: pair.generate(PROMPT, method=method, budget=6, max_new_tokens=20, **options)
        for method in METHODS
    }
    assert len({generation.token_ids for generation in texts.values()}) == 1
    if not options:
        reference = greedy_reference(tiny_model(architecture), PROMPT, 20)
        assert list(texts["ddtree"].token_ids) == reference
    proposals = [set(r.tree.token_ids[1:].tolist()) for r in texts["ddtree"].rounds if r.tree]
    assert set().union(*proposals) <= set(THIRD)
    assert any(proposals)


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
def test_a_configuration_that_is_written_is_read_back(changes: dict[str, object]) -> None:
    config = parse_drafter_config(drafter_config(**changes, num_target_layers=None), "test")
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


# What is broken.

BROKEN_CONFIGS: list[tuple[type[Exception], dict[str, object], tuple[str, ...]]] = [
    (UnsupportedModelError, {"speculators_model_type": "eagle3"}, ("'eagle3'", "DFlash")),
    (UnsupportedModelError, {"speculators_model_type": None}, ("speculators_model_type None",)),
    (UnsupportedModelError, {"dflash_config": {}}, ("dflash_config beside",)),
    (UnsupportedModelError, {"projector_type": "domino"}, ("projector_type 'domino'",)),
    (UnsupportedModelError, {"shift_label": True}, ("shift_label",)),
    (UnsupportedModelError, {"sample_from_anchor": True}, ("sample_from_anchor true",)),
    (
        UnsupportedModelError,
        {"speculators_config": {"proposal_methods": [{"speculative_tokens": 8}]}},
        ("speculative_tokens 8 of block_size 8", "no sample_from_anchor"),
    ),
    (UnsupportedModelError, {"quantization_config": {"a": 1}}, ("quantization_config",)),
    (UnsupportedModelError, {"target_hidden_size": 64}, ("target_hidden_size 64", "32")),
    (
        UnsupportedModelError,
        {"aux_hidden_state_layer_ids": [0, 2]},
        ("aux_hidden_state_layer_ids [0, 2]", "the embedding's output"),
    ),
    (UnsupportedModelError, {"output_multiplier": 0.5}, ("output_multiplier 0.5",)),
    (CheckpointError, {"sample_from_anchor": "no"}, ("sample_from_anchor: expected true",)),
    (CheckpointError, {"sliding_window_non_causal": 1}, ("sliding_window_non_causal: ", "got 1")),
    (CheckpointError, {"transformer_layer_config": None}, ("transformer_layer_config: ", "None")),
    (CheckpointError, {"transformer_layer_config": []}, ("expected an object, got []",)),
    (CheckpointError, {"aux_hidden_state_layer_ids": None}, ("aux_hidden_state_layer_ids: ",)),
    (CheckpointError, {"aux_hidden_state_layer_ids": [2, 2]}, ("distinct", "[2, 2]")),
    (CheckpointError, {"aux_hidden_state_layer_ids": [-1]}, ("indices", "[-1]")),
    (CheckpointError, {"block_size": 1}, ("block_size: expected a whole number >= 2, got 1",)),
    (CheckpointError, {"mask_token_id": None}, ("mask_token_id: expected a whole", "None")),
    (CheckpointError, {"draft_vocab_size": None}, ("draft_vocab_size: expected", "None")),
    (CheckpointError, {"draft_vocab_size": 0}, ("draft_vocab_size: ", "got 0")),
    (CheckpointError, {"draft_vocab_size": 62}, ("draft_vocab_size: expected at most 61",)),
    (CheckpointError, {"num_hidden_layers": 3}, ("num_hidden_layers: expected 2, as in", "got 3")),
    (PairMismatchError, {"mask_token_id": VOCAB_SIZE}, ("mask_token_id: expected an id below 61",)),
    (PairMismatchError, {"aux_hidden_state_layer_ids": [5]}, ("target_layer_ids", "below 4")),
]
BROKEN_DECODERS: list[tuple[type[Exception], dict[str, object], tuple[str, ...]]] = [
    (CheckpointError, {"hidden_size": None}, ("transformer_layer_config: hidden_size: ", "None")),
    (CheckpointError, {"vocab_size": None}, ("transformer_layer_config: vocab_size: ", "None")),
    (CheckpointError, {"layer_types": [FULL]}, ("layer_types: expected 2 of",)),
    (
        CheckpointError,
        {"use_sliding_window": True, "sliding_window": 5},
        ("layer_types: expected one type per layer",),
    ),
    (UnsupportedModelError, {"partial_rotary_factor": 0.5}, ("partial_rotary_factor",)),
    (UnsupportedModelError, {"hidden_act": "gelu"}, ("hidden_act 'gelu'",)),
    (UnsupportedModelError, {"final_logit_softcapping": 30.0}, ("final_logit_softcapping 30.0",)),
    (UnsupportedModelError, {"quantization_config": {"a": 1}}, ("quantization_config",)),
    (PairMismatchError, {"vocab_size": 100}, ("vocab_size: expected 61", "got 100")),
]


@pytest.mark.parametrize(("kind", "changes", "named"), BROKEN_CONFIGS, ids=str)
def test_a_broken_configuration_is_named(
    kind: type[Exception],
    changes: dict[str, object],
    named: tuple[str, ...],
    tmp_path: Path,
    target: Target,
) -> None:
    assert_named(kind, write_speculators(tmp_path, **changes), target, named)


@pytest.mark.parametrize(("kind", "changes", "named"), BROKEN_DECODERS, ids=str)
def test_a_broken_decoder_is_named(
    kind: type[Exception],
    changes: dict[str, object],
    named: tuple[str, ...],
    tmp_path: Path,
    target: Target,
) -> None:
    assert_named(kind, write_speculators(tmp_path, decoder=changes), target, named)


def assert_named(
    kind: type[Exception], folder: Path, target: Target, named: tuple[str, ...]
) -> None:
    with pytest.raises(kind) as caught:
        load_drafter(folder, target)
    message = str(caught.value)
    for part in (*named, str(folder)):
        assert part in message
    assert caught.value.remedy.endswith(".")


def drop(key: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(key)


def put(key: str, tensor: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({key: tensor})


def change(key: str, *index: int, to: float) -> Callable[[Tensors], object]:
    def edit(tensors: Tensors) -> None:
        tensors[key][index] = to

    return edit


INT = torch.int64
# Each folder holds a drafter of the tokens 1, 4, 7, ..., 58: their offsets are 1, 3, 5, ...
BROKEN_TENSORS: list[tuple[type[Exception], Callable[[Tensors], object], tuple[str, ...]]] = [
    (CheckpointError, drop("d2t"), ("d2t: expected int64 [20]", "no such tensor")),
    (CheckpointError, drop("t2d"), ("t2d: expected bool [61]", "no such tensor")),
    (CheckpointError, drop("lm_head.weight"), ("lm_head.weight [20, 32]", "got none")),
    (CheckpointError, drop("fc.weight"), ("1 missing: fc.weight [32, 64]",)),
    (CheckpointError, put("x", torch.zeros(2)), ("1 left over: x [2]",)),
    (CheckpointError, put("d2t", torch.zeros(20)), ("int64 [20]", "got float32 [20]")),
    (CheckpointError, put("d2t", torch.zeros(19, dtype=INT)), ("int64 [20]", "got int64 [19]")),
    (CheckpointError, put("t2d", torch.zeros(61, dtype=INT)), ("bool [61]", "got int64 [61]")),
    (CheckpointError, put("t2d", torch.zeros(20).bool()), ("bool [61]", "got bool [20]")),
    (CheckpointError, change("d2t", 19, to=42), ("from 0 to 60", "19 + 42 = 61 at index 19")),
    (CheckpointError, change("d2t", 0, to=-1), ("from 0 to 60", "0 + -1 = -1 at index 0")),
    (CheckpointError, change("d2t", 1, to=0), ("ascending, distinct", "got 1, 1 at index 0")),
    (CheckpointError, change("d2t", 3, to=0), ("ascending, distinct", "got 7, 3 at index 2")),
    (CheckpointError, change("t2d", 2, to=True), ("t2d: expected true for", "true at index 2")),
    (CheckpointError, change("t2d", 4, to=False), ("t2d: expected true for", "false at index 4")),
    (
        CheckpointError,
        put("lm_head.weight", torch.zeros(61, 32)),
        ("lm_head.weight: expected [20, 32], got [61, 32]",),
    ),
    (
        CheckpointError,
        put("embed_tokens.weight", torch.zeros(20, 32)),
        ("embed_tokens.weight: expected [61, 32], got [20, 32]",),
    ),
    (
        CheckpointError,
        put("lm_head.weight", torch.zeros(20, 32).to(torch.float8_e4m3fn)),
        ("lm_head.weight: expected float32, bfloat16 or float16", "float8"),
    ),
    (
        CheckpointError,
        put("verifier_norm.weight", torch.zeros(3)),
        ("verifier_norm.weight: expected [32], got [3]",),
    ),
    (
        UnsupportedModelError,
        change("lm_head.weight", 2, 5, to=9.0),
        ("lm_head.weight: ", "others in 1 of 20 rows, the first that of token 7, by up to"),
    ),
    (
        UnsupportedModelError,
        change("embed_tokens.weight", 60, 0, to=math.nan),
        ("embed_tokens.weight: ", "others in 1 of 61 rows, the first that of token 60"),
    ),
    (
        UnsupportedModelError,
        put("layers.0.self_attn.g_proj.weight", torch.zeros(2)),
        ("g_proj",),
    ),
]


@pytest.mark.parametrize(("kind", "edit", "named"), BROKEN_TENSORS)
def test_broken_tensors_are_named(
    kind: type[Exception],
    edit: Callable[[Tensors], object],
    named: tuple[str, ...],
    tmp_path: Path,
    target: Target,
) -> None:
    folder = write_speculators(tmp_path, draft_token_ids=THIRD)
    assert load_drafter(folder, target).draft_token_ids.tolist() == THIRD
    assert_named(kind, write_speculators(tmp_path, draft_token_ids=THIRD, edit=edit), target, named)


def test_a_map_beside_a_whole_vocabulary_must_change_nothing(
    tmp_path: Path, target: Target
) -> None:
    folder = write_speculators(tmp_path, edit=put("d2t", torch.zeros(VOCAB_SIZE, dtype=INT)))
    assert_named(CheckpointError, folder, target, ("t2d: expected bool [61]", "no such tensor"))


def test_the_drafter_of_another_target_is_known_by_its_embedding(tmp_path: Path) -> None:
    folder = write_speculators(tmp_path, "llama")
    named = ("embed_tokens.weight", "others in 61 of 61 rows", "tiny qwen3")
    assert_named(UnsupportedModelError, folder, tiny_target("qwen3"), named)


def test_a_target_whose_head_has_a_bias_is_not_told_by_rows(tmp_path: Path) -> None:
    model = copy.deepcopy(tiny_model("llama"))
    model.set_output_embeddings(torch.nn.Linear(HIDDEN_SIZE, VOCAB_SIZE))
    with pytest.raises(UnsupportedModelError, match="a head with a bias"):
        load_drafter(write_speculators(tmp_path), Target(model, None, name="biased"))


def test_the_taps_are_counted_from_the_embedding(target: Target) -> None:
    config = speculators_config(aux_hidden_state_layer_ids=[1, NUM_LAYERS])
    assert parse_speculators_config(config, "test").target_layer_ids == (0, NUM_LAYERS - 1)
