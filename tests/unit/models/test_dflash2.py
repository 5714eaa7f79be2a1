"""DFlash2: convolutions and selector against loops written from CHECKPOINTS C, and its files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import ddtree
from ddtree.convert import convert
from ddtree.errors import CheckpointError, OptionError, UnsupportedModelError, UserError
from ddtree.models.dflash2 import GroupedConvolution
from ddtree.models.drafter import DFlashDrafter
from ddtree.models.drafter_config import parse_drafter_config
from ddtree.models.drafter_export import config_json, save_drafter
from ddtree.models.loading import load_drafter, load_target
from ddtree.models.target import Target
from ddtree.train.fit import FrozenHead, hidden_of_blocks
from ddtree.train.packing import pack
from ddtree.types import METHODS, Marginals
from tests.support.checkpoints import (
    DFLASH2,
    Tensors,
    drafter_shapes,
    drafter_tensors,
    write_drafter,
    write_speculators,
    write_target,
)
from tests.support.models import (
    VOCAB_SIZE,
    drafter_config,
    greedy_reference,
    tiny_model,
    tiny_target,
)
from tests.support.samples import random_samples
from tests.unit.models.test_drafter import ROOT, Naive, fed, pair_of, random_features

FULL = "full_attention"
PREDECESSORS = "candidate_selector.predecessor_codebook"
SUCCESSORS = "candidate_selector.successor_codebook"
PROJECTION = "candidate_selector.hidden_projection.weight"
BASE = "layers.1.mlp_conv.base_kernel"
DYNAMIC = "layers.0.attention_conv.kernel_projection.weight"
PROMPT = [5, 17, 42, 8, 23, 11, 2]

pytestmark = pytest.mark.usefixtures("unchecked")


def second(**keys: object) -> dict[str, object]:
    """The tiny DFlash2 configuration with other keys nested; those that are None left out."""
    nested = {**DFLASH2["dflash_config"], **keys}
    return {**DFLASH2, "dflash_config": {k: v for k, v in nested.items() if v is not None}}


VARIANTS: dict[str, dict[str, object]] = {
    "as published, smaller": second(),
    "full layers": {**second(), "layer_types": [FULL, FULL]},
    "causal": {**second(), "is_causal": True},
    "one tap": second(conv_kernel_size=1),
    "three taps": second(conv_kernel_size=3),
    "more taps than slots": {**second(conv_kernel_size=5), "block_size": 3},
    "a weight per channel": second(conv_group_size=1),
    "a weight for all channels": second(conv_group_size=32),
    "scaled and capped": {
        **second(),
        "output_multiplier": 0.19611613513818404,
        "final_logit_softcapping": 2.0,
        "input_embedding_scale": 3.0,
    },
}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama")


@torch.inference_mode()
def hidden_of(drafter: DFlashDrafter, features: Tensor, root_id: int = ROOT) -> Tensor:
    """[L, D] of the drafted slots, from the network that decodes."""
    session = fed(drafter, features, 6, 1, 4)
    session._take_in()
    ids = torch.full((drafter.config.block_size,), drafter.config.mask_token_id)
    ids[0] = root_id
    return drafter.network(drafter.embed(ids), session._stores)[1:]


@torch.inference_mode()
def proposed(drafter: DFlashDrafter, features: Tensor, num_ranks: int = VOCAB_SIZE) -> Marginals:
    session = fed(drafter, features)
    return session.propose(ROOT, num_depths=drafter.num_depths, num_ranks=num_ranks)


# The convolutions.


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_convolutions_are_what_the_format_describes(variant: str) -> None:
    drafter, naive = pair_of(**VARIANTS[variant])
    features = random_features(drafter)
    expected = naive.hidden(features.double(), ROOT)
    got = hidden_of(drafter, features)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-4)


def swapped_sides(weights: Tensors) -> None:
    weights[BASE] = weights[BASE].flip(0)


def swapped_taps(weights: Tensors) -> None:
    weights[BASE] = weights[BASE].flip(1)


def interleaved_groups(weights: Tensors) -> None:
    taps_by_group = weights[DYNAMIC].unflatten(0, (4, -1))
    weights[DYNAMIC] = taps_by_group.transpose(0, 1).flatten(0, 1)


def nothing_dynamic(weights: Tensors) -> None:
    weights[DYNAMIC] = torch.zeros_like(weights[DYNAMIC])


MISTAKES = [swapped_sides, swapped_taps, interleaved_groups, nothing_dynamic]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_comparison_can_fail_other_weights_change_the_result(
    mistake: Callable[[Tensors], None],
) -> None:
    drafter, naive = pair_of(**second())
    features = random_features(drafter)
    mistake(naive.weights)
    difference = naive.hidden(features.double(), ROOT) - hidden_of(drafter, features)
    assert difference.abs().max() > 0.05


def test_a_new_convolution_with_nothing_dynamic_changes_nothing() -> None:
    conv = GroupedConvolution(8, kernel_size=3, group_size=2)
    torch.nn.init.zeros_(conv.kernel_projection.weight)
    x = torch.randn(2, 6, 8)
    assert conv(x, torch.sin, 3).equal(x.sin())


def test_blocks_side_by_side_see_nothing_of_each_other() -> None:
    conv = GroupedConvolution(8, kernel_size=3, group_size=2)
    torch.nn.init.normal_(conv.base_kernel)
    x = torch.randn(2, 12, 8)
    together = conv(x, torch.sin, 4)
    alone = [conv(block, torch.sin, 4) for block in x.split(4, dim=1)]
    torch.testing.assert_close(together, torch.cat(alone, dim=1))
    changed = x.clone()
    changed[:, 3] += 1.0
    assert conv(changed, torch.sin, 4)[:, 4:].equal(together[:, 4:])
    assert not conv(changed, torch.sin, 6)[:, 4:6].equal(conv(x, torch.sin, 6)[:, 4:6])


@pytest.mark.parametrize("num_depths", [7, 2], ids=["whole blocks", "short blocks"])
@torch.inference_mode()
def test_packed_blocks_of_training_equal_the_decoders_pass(num_depths: int) -> None:
    target = tiny_target("qwen3")
    drafter, naive = pair_of(target, **second(), block_size=num_depths + 1)
    samples = random_samples(target, list(drafter.layer_ids), 5)[3:]
    # Neighbours whose positions run on: only the block's size says where one ends.
    first = samples[1].num_prompt_tokens
    anchors = [[samples[0].num_prompt_tokens], [first, first + num_depths + 1]]
    batch = pack(samples, anchors, num_depths)
    # A network for whole blocks serves shorter ones too.
    network = pair_of(target, **second())[0].network
    hidden = hidden_of_blocks(network, FrozenHead.of(target, None), batch)
    for row, sample in enumerate(samples):
        for column, anchor in enumerate(anchors[row]):
            features = sample.features[:anchor].double()
            alone = naive.hidden(features, int(sample.token_ids[anchor]))
            torch.testing.assert_close(hidden[row, column].double(), alone, rtol=0, atol=3e-4)


# The selector.


def scores_behind(naive: Naive, logits: Tensor, slot: Tensor, previous: int) -> Tensor:
    """[V]: unary(next) + <A[previous] * (W h), S[next]>, term by term."""
    before, after = (naive.weights[key].tolist() for key in (PREDECESSORS, SUCCESSORS))
    projected = [float(row @ slot) for row in naive.weights[PROJECTION]]
    out = logits.tolist()
    for token in range(VOCAB_SIZE):
        for r, number in enumerate(projected):
            out[token] += before[previous][r] * number * after[token][r]
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize("variant", ["as published, smaller", "scaled and capped"])
def test_scores_behind_a_token_are_what_the_format_describes(variant: str) -> None:
    drafter, naive = pair_of(**VARIANTS[variant])
    features = random_features(drafter)
    hidden = naive.hidden(features.double(), ROOT)
    logits, marginals = naive.logits(hidden), proposed(drafter, features)
    assert marginals.transitions is not None
    candidates = [set(row.topk(6).indices.tolist()) for row in logits]
    assert [set(row.tolist()) for row in marginals.token_ids] == candidates
    rows = [(0, ROOT, marginals.log_probs[0], marginals.token_ids[0])]
    for depth in range(1, drafter.num_depths):
        for rank, previous in enumerate(marginals.token_ids[depth - 1].tolist()):
            behind = marginals.transitions.log_probs[depth - 1, rank]
            ranks = marginals.transitions.ranks[depth - 1, rank]
            rows.append((depth, previous, behind, marginals.token_ids[depth, ranks]))
    assert len(rows) == 1 + 6 * 6
    for depth, previous, log_probs, token_ids in rows:
        assert set(token_ids.tolist()) == candidates[depth]
        scores = scores_behind(naive, logits[depth], hidden[depth], previous)[token_ids]
        # Normalised over the candidates, which keep their share of the vocabulary.
        share = logits[depth].softmax(0)[token_ids].sum().log()
        expected = scores.log_softmax(0) + share
        torch.testing.assert_close(log_probs.double(), expected, rtol=0, atol=1e-3)


def test_the_parent_and_the_root_change_the_order_of_what_follows() -> None:
    """Else the test above would hold for a selector that is passed over."""
    drafter, _ = pair_of(**second())
    features = random_features(drafter)
    marginals = proposed(drafter, features)
    assert marginals.transitions is not None
    orders = {tuple(row.tolist()) for row in marginals.transitions.ranks[0]}
    assert len(orders) > 1
    with torch.inference_mode():
        other = fed(drafter, features).propose(ROOT + 1, num_depths=7, num_ranks=6)
        drafter.network.candidate_selector.predecessor_codebook[ROOT] = 0.0
    assert not other.token_ids[0].equal(marginals.token_ids[0])
    without_root = proposed(drafter, features)
    assert without_root.log_probs[0].diff().abs().sum() > 0
    assert not without_root.log_probs[0].equal(marginals.log_probs[0])


@pytest.mark.parametrize(("top_k", "expected"), [(6, 6), (1, 1), (99, VOCAB_SIZE)])
@pytest.mark.parametrize("num_ranks", [3, VOCAB_SIZE])
def test_selector_top_k_says_how_many_candidates_there_are(
    num_ranks: int, top_k: int, expected: int
) -> None:
    """Whatever is asked for: they share one probability out between them."""
    drafter, _ = pair_of(**second(selector_top_k=top_k))
    marginals = proposed(drafter, random_features(drafter), num_ranks)
    assert marginals.num_ranks == expected
    assert marginals.transitions is not None
    assert marginals.transitions.ranks.shape == (6, expected, expected)


# Text.


@pytest.mark.parametrize(
    ("variant", "packed"), [("as published, smaller", True), ("scaled and capped", False)]
)
def test_every_method_says_what_generate_says(
    variant: str, packed: bool, tmp_path: Path, target: Target
) -> None:
    drafter = load_drafter(write_drafter(tmp_path, **VARIANTS[variant]), target, packed=packed)
    pair = ddtree.Pair(target, drafter)
    reference = greedy_reference(tiny_model("llama"), PROMPT, 12)
    for method in METHODS:
        generation = pair.generate(PROMPT, budget=16, max_new_tokens=12, method=method)
        assert list(generation.token_ids) == reference, method
        deepest = max(int(r.tree.depths.max()) for r in generation.rounds if r.tree)
        assert (method == "ar") == (deepest == 0)
        assert method == "ar" or deepest > 1


def test_one_seed_gives_one_text_whatever_the_method(tmp_path: Path, target: Target) -> None:
    pair = ddtree.Pair(target, load_drafter(write_drafter(tmp_path, **second()), target))
    options = {"max_new_tokens": 12, "temperature": 0.8, "seed": 3}
    texts = {
        method: pair.generate(PROMPT, budget=16, method=method, **options).token_ids
        for method in METHODS
    }
    assert texts["ar"] == texts["dflash"] == texts["ddtree"]
    greedy = pair.generate(PROMPT, budget=16, max_new_tokens=12).token_ids
    assert texts["ar"] != greedy


def test_it_drafts_in_the_targets_dtype(tmp_path: Path) -> None:
    half = load_target(write_target(tmp_path / "target", tokenizer=False), dtype="bfloat16")
    drafter = load_drafter(write_drafter(tmp_path / "drafter", **second()), half)
    assert {p.dtype for p in drafter.network.parameters()} == {torch.bfloat16}
    generation = ddtree.Pair(half, drafter).generate(PROMPT, budget=16, max_new_tokens=6)
    assert generation.num_tokens == 6
    assert max(int(r.tree.depths.max()) for r in generation.rounds if r.tree) > 1


# Files.


@pytest.mark.parametrize(
    "layout", [{}, {"prefix": "model."}, {"sharded": True}], ids=["one file", "prefixed", "sharded"]
)
def test_a_checkpoint_of_the_format_loads_tensor_by_tensor(
    layout: dict[str, object], tmp_path: Path, target: Target
) -> None:
    drafter = load_drafter(write_drafter(tmp_path, **layout, **second()), target, packed=False)
    expected = drafter_tensors(drafter_config(**second()))
    assert len(expected) == 15 * 2 + 6
    loaded = drafter.network.state_dict()
    assert loaded.keys() == expected.keys()
    assert all(loaded[name].equal(tensor) for name, tensor in expected.items())


def test_an_export_is_a_checkpoint_of_the_format(tmp_path: Path, target: Target) -> None:
    source = write_drafter(tmp_path / "source", **VARIANTS["scaled and capped"])
    drafter = load_drafter(source, target, packed=False)
    out = tmp_path / "out"
    save_drafter(
        drafter.network,
        drafter.config,
        out,
        draft_token_ids=None,
        provenance={},
        dtype=torch.float32,
    )
    assert {path.name for path in out.iterdir()} == {
        "config.json",
        "model.safetensors",
        "provenance.json",
    }
    written = json.loads((out / "config.json").read_text())
    assert written["architectures"] == ["DFlash2DraftModel"]
    assert second()["dflash_config"].items() <= written["dflash_config"].items()
    before, after = (load_file(folder / "model.safetensors") for folder in (source, out))
    assert before.keys() == after.keys()
    assert all(after[name].equal(tensor) for name, tensor in before.items())
    again = load_drafter(out, target, packed=False)
    assert again.config == drafter.config
    features = random_features(drafter)
    assert proposed(again, features).token_ids.equal(proposed(drafter, features).token_ids)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_configuration_comes_back_from_its_json(variant: str) -> None:
    config = parse_drafter_config(drafter_config(**VARIANTS[variant]), "test")
    assert parse_drafter_config(json.loads(json.dumps(config_json(config))), "test") == config


def test_a_draft_vocabulary_cannot_be_written_in_this_format(
    tmp_path: Path, target: Target
) -> None:
    drafter, _ = pair_of(target, **second())
    with pytest.raises(OptionError, match="draft_vocab_size"):
        save_drafter(
            drafter.network,
            drafter.config,
            tmp_path / "out",
            draft_token_ids=[1, 2, 3],
            provenance={},
        )
    assert not (tmp_path / "out").exists()


def test_the_speculators_format_has_no_words_for_it(tmp_path: Path) -> None:
    source = write_drafter(tmp_path / "source", **second())
    target = write_target(tmp_path / "target", tokenizer=False)
    out = tmp_path / "out"
    with pytest.raises(OptionError, match="DFlash2") as caught:
        convert(source, to="speculators", out=out, target=str(target))
    assert "stay with z-lab's" in caught.value.remedy
    assert not out.exists()


@pytest.mark.parametrize("key", ["conv_kernel_size", "selector_rank"])
@pytest.mark.parametrize("place", ["top", "decoder"])
def test_its_keys_in_the_speculators_format_are_refused_by_name(
    key: str, place: str, tmp_path: Path, target: Target
) -> None:
    changes = {key: 2} if place == "top" else {"decoder": {key: 2}}
    folder = write_speculators(tmp_path, **changes)
    with pytest.raises(UnsupportedModelError, match=f"{key} 2"):
        load_drafter(folder, target)


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def put(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: torch.zeros(shape, dtype=dtype)})


BROKEN_TENSORS = [
    (drop(PREDECESSORS), f"1 missing: {PREDECESSORS} [61, 5]"),
    (drop(SUCCESSORS), f"1 missing: {SUCCESSORS} [61, 5]"),
    (drop(PROJECTION), f"1 missing: {PROJECTION} [5, 32]"),
    (drop(BASE), f"1 missing: {BASE} [2, 2, 32]"),
    (drop(DYNAMIC), f"1 missing: {DYNAMIC} [32, 32]"),
    (put(PREDECESSORS, 61, 6), f"1 misshapen: {PREDECESSORS} [61, 6] instead of [61, 5]"),
    (put(SUCCESSORS, 60, 5), f"1 misshapen: {SUCCESSORS} [60, 5] instead of [61, 5]"),
    (put(BASE, 2, 3, 32), f"1 misshapen: {BASE} [2, 3, 32] instead of [2, 2, 32]"),
    (put(DYNAMIC, 16, 32), f"1 misshapen: {DYNAMIC} [16, 32] instead of [32, 32]"),
    (put(SUCCESSORS, 61, 5, dtype=torch.int8), f"1 quantised: {SUCCESSORS}"),
    (put(f"{SUCCESSORS}.weight", 61, 5), f"1 left over: {SUCCESSORS}.weight [61, 5]"),
    (put("layers.2.mlp_conv.base_kernel", 2, 2, 32), "1 left over: layers.2.mlp_conv.base_kernel"),
]


@pytest.mark.parametrize(("edit", "named"), BROKEN_TENSORS, ids=[n for _, n in BROKEN_TENSORS])
def test_a_tensor_that_does_not_fit_is_named_with_its_shape(
    edit: Callable[[Tensors], object], named: str, tmp_path: Path, target: Target
) -> None:
    folder = write_drafter(tmp_path, edit=edit, **second())
    with pytest.raises(CheckpointError) as caught:
        load_drafter(folder, target)
    assert named in str(caught.value)


BROKEN_KEYS = [
    ({"conv_kernel_size": 3}, "8 misshapen", "base_kernel [2, 2, 32] instead of [2, 3, 32]"),
    (
        {"conv_group_size": 8},
        "4 misshapen",
        "kernel_projection.weight [32, 32] instead of [16, 32]",
    ),
    ({"selector_rank": 4}, "3 misshapen", f"{PREDECESSORS} [61, 5] instead of [61, 4]"),
    ({"conv_group_size": 5}, "conv_group_size", "a divisor of hidden_size 32"),
    ({"conv_kernel_size": 0}, "conv_kernel_size", "got 0"),
    ({"selector_top_k": -1}, "selector_top_k", "got -1"),
    ({"selector_rank": "5"}, "selector_rank", "got '5'"),
    ({"draft_vocab_size": 20}, "draft_vocab_size", "got 20"),
    *(
        ({key: None}, f"config.json: {key}", "got none")
        for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    ),
]


@pytest.mark.parametrize(("keys", "named", "detail"), BROKEN_KEYS, ids=str)
def test_a_key_that_does_not_fit_is_named(
    keys: dict[str, object], named: str, detail: str, tmp_path: Path, target: Target
) -> None:
    weights = drafter_tensors(drafter_config(**second()))
    folder = write_drafter(tmp_path, weights=weights, **second(**keys))
    with pytest.raises(UserError) as caught:
        load_drafter(folder, target)
    assert isinstance(caught.value, CheckpointError)
    assert named in str(caught.value)
    assert detail in str(caught.value)


def test_its_tensors_behind_a_plain_configuration_are_left_over(
    tmp_path: Path, target: Target
) -> None:
    weights = drafter_tensors(drafter_config(**second()))
    with pytest.raises(CheckpointError, match=r"11 left over: candidate_selector\."):
        load_drafter(write_drafter(tmp_path, weights=weights), target)


def test_the_table_of_the_format_is_what_the_network_has() -> None:
    drafter, _ = pair_of(**second())
    shapes = {key: tuple(value.shape) for key, value in drafter.network.state_dict().items()}
    assert shapes == drafter_shapes(drafter_config(**second()))
