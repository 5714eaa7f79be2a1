"""Drafters that are broken, or of a kind that would load and be wrong: each is refused by name.

One row a kind: how it is broken, which error says so, and what the message must name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ddtree.errors import (
    CheckpointError,
    ModelNotFoundError,
    PairMismatchError,
    UnsupportedModelError,
    UserError,
)
from ddtree.models.loading import load_drafter
from ddtree.models.target import Target
from tests.support.checkpoints import Tensors, edit_json, write_drafter, write_speculators
from tests.support.models import HIDDEN_SIZE, NUM_LAYERS, VOCAB_SIZE, tiny_target

Edit = Callable[[Tensors], object]
Damage = Callable[[Path], object]
# What speculators' rows can propose: 1, 4, 7, ..., 58, so that their offsets are 1, 3, 5, ...
THIRD = list(range(1, VOCAB_SIZE, 3))
FULL = "full_attention"
WEIGHTS = "model.safetensors"
Q_PROJ = "layers.1.self_attn.q_proj.weight"
INT, FLOAT8 = torch.int64, torch.float8_e4m3fn
SHARDED = {"sharded": True, "prefix": "model."}

pytestmark = pytest.mark.usefixtures("unchecked")


@dataclass(frozen=True)
class Broken:
    """One row."""

    how: str
    write: Damage
    kind: type[UserError]
    named: tuple[str, ...]


def refused(how: str, write: Damage, *named: str) -> Broken:
    """It would load and be wrong."""
    return Broken(how, write, UnsupportedModelError, named)


def broken(how: str, write: Damage, *named: str) -> Broken:
    """It says or holds something that cannot be right."""
    return Broken(how, write, CheckpointError, named)


def misfit(how: str, write: Damage, *named: str) -> Broken:
    """It belongs to another target."""
    return Broken(how, write, PairMismatchError, named)


# How a checkpoint is written.


def plain(edit: Edit | None = None, **changes: object) -> Damage:
    """In z-lab's format; `changes` are to config.json."""
    return lambda folder: write_drafter(folder, edit=edit, **changes)


def nested(edit: Edit | None = None, **changes: object) -> Damage:
    """In z-lab's format; `changes` are to its dflash_config."""
    inner = {"mask_token_id": 3, "target_layer_ids": [0, 2], **changes}
    return plain(edit, dflash_config={k: v for k, v in inner.items() if v is not None})


def spec(edit: Edit | None = None, **changes: object) -> Damage:
    """In speculators' format, of a third of the tokens; `changes` are to the top of config.json."""
    return lambda folder: write_speculators(folder, draft_token_ids=THIRD, edit=edit, **changes)


def decoder(**changes: object) -> Damage:
    """In speculators' format; `changes` are to its transformer_layer_config."""
    return spec(decoder=changes)


def then(write: Damage, *damages: Damage) -> Damage:
    """Written, then damaged file by file."""

    def both(folder: Path) -> None:
        for step in (write, *damages):
            step(folder)

    return both


def file(name: str, content: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content)


def cut(name: str, keep: int) -> Damage:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:keep])


def unlink(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def declare(**changes: object) -> Damage:
    """Other values in config.json; a key with None is left out."""
    return lambda folder: edit_json(folder / "config.json", **changes)


def rename(name: str, new: str) -> Damage:
    return lambda folder: (folder / name).rename(folder / new)


def drop(key: str) -> Edit:
    return lambda tensors: tensors.pop(key)


def put(key: str, *shape: int, dtype: torch.dtype = torch.float32) -> Edit:
    return lambda tensors: tensors.update({key: torch.zeros(shape).to(dtype)})


def move(key: str, new: str) -> Edit:
    return lambda tensors: tensors.update({new: tensors.pop(key)})


def change(key: str, *index: int, to: float) -> Edit:
    def edit(tensors: Tensors) -> None:
        tensors[key][index] = to

    return edit


def own_embedding_alone(tensors: Tensors) -> None:
    del tensors["lm_head.weight"]
    tensors["embed_tokens.weight"] += 1


# What is refused.

FILES = [
    Broken("no folder content", lambda folder: None, ModelNotFoundError, ("a config.json",)),
    Broken(
        "no config.json",
        then(plain(), unlink("config.json")),
        ModelNotFoundError,
        ("a config.json",),
    ),
    broken("config.json cut short", then(plain(), cut("config.json", 50)), "expected JSON"),
    broken("config.json empty", then(plain(), file("config.json", b"")), "expected JSON"),
    broken("config.json not UTF-8", then(plain(), file("config.json", b"\xff\xfe")), "JSON"),
    broken("config.json a list", then(plain(), file("config.json", b"[1]")), "object, got list"),
    broken("config.json null", then(plain(), file("config.json", b"null")), "got NoneType"),
    broken("no weights", then(plain(), unlink(WEIGHTS)), "*.safetensors", "none in"),
    broken(
        "weights in a pickle",
        then(plain(), rename(WEIGHTS, "pytorch_model.bin")),
        "*.safetensors",
        "none in",
    ),
    broken("weights empty", then(plain(), file(WEIGHTS, b"")), WEIGHTS, "download it again"),
    broken("half a header", then(plain(), cut(WEIGHTS, 4)), WEIGHTS, "download it again"),
    broken("header without data", then(plain(), cut(WEIGHTS, 5000)), WEIGHTS, "download it again"),
    broken("a text file", then(plain(), file(WEIGHTS, b"version https://git-lfs")), WEIGHTS),
    broken(
        "a header that is no JSON",
        then(plain(), file(WEIGHTS, (8).to_bytes(8, "little") + b"not json")),
        WEIGHTS,
    ),
    broken(
        "a shard is not there",
        then(plain(sharded=True), unlink("model-00002-of-00002.safetensors")),
        "12 missing: hidden_norm.weight [32]",
    ),
    broken(
        "a shard is cut short",
        then(plain(sharded=True), cut("model-00002-of-00002.safetensors", 3000)),
        "model-00002-of-00002.safetensors",
    ),
    broken(
        "a shard of speculators' is a text file",
        then(spec(), file("model-00002-of-00002.safetensors", b"moved")),
        "model-00002-of-00002.safetensors",
    ),
    broken(
        "the whole file beside its shards",
        then(plain(), plain(sharded=True)),
        "each tensor once",
        "fc.weight again",
    ),
    broken(
        "a tensor with and without prefix",
        plain(put("model.norm.weight", 32)),
        "each tensor once",
        "norm.weight again",
    ),
]

Z_LAB_CONFIG = [
    refused(
        "a target",
        then(plain(), declare(architectures=["Qwen3ForCausalLM"], dflash_config=None)),
        "architectures ['Qwen3ForCausalLM'] without a dflash_config",
    ),
    refused("Domino", plain(projector_type="domino"), "projector_type 'domino'"),
    refused("DSpark", nested(projector_type="dspark"), "projector_type 'dspark'"),
    refused("another projector", nested(projector_type="causal_v5"), "projector_type 'causal_v5'"),
    refused("shifted labels", nested(shift_label=True), "shift_label"),
    refused("sampled from the anchor", nested(sample_from_anchor=True), "sample_from_anchor"),
    refused("GPTQ", plain(quantization_config={"quant_method": "gptq"}), "quantization_config"),
    refused("MiMo's RoPE", plain(partial_rotary_factor=0.5), "partial_rotary_factor"),
    refused(
        "MiMo's RoPE, nested",
        plain(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        "partial_rotary_factor",
    ),
    refused("MiMo's values", plain(attention_value_scale=0.7), "attention_value_scale"),
    refused("MiMo's sinks, declared", plain(attention_sink_bias=True), "attention_sink_bias"),
    refused("another activation", plain(hidden_act="gelu"), "hidden_act 'gelu'"),
    broken("no block_size", plain(block_size=None), "block_size", "None"),
    broken("a block of the root alone", plain(block_size=1), "block_size", "got 1"),
    broken(
        "too many layers to be true",
        then(plain(), declare(num_hidden_layers=2**20)),
        "num_hidden_layers: expected a whole number <= 1000",
    ),
    broken(
        "too wide to be true",
        then(plain(), declare(intermediate_size=2**70)),
        "intermediate_size: expected a whole number <= 2147483648",
    ),
    broken("no mask token", nested(mask_token_id=None), "mask_token_id", "None"),
    broken("a mask token below 0", nested(mask_token_id=-1), "mask_token_id", "-1"),
    broken("a tap twice", nested(target_layer_ids=[2, 2]), "target_layer_ids", "[2, 2]"),
    broken("no taps at all", nested(target_layer_ids=[]), "target_layer_ids", "[]"),
    broken("heads that do not divide", plain(num_key_value_heads=3), "num_key_value_heads"),
    broken("an odd head", plain(head_dim=7), "head_dim", "7"),
    broken(
        "a window without a size", plain(layer_types=["sliding_attention"] * 2), "sliding_window"
    ),
    broken("a layer too few", plain(layer_types=[FULL]), "layer_types"),
    broken("linear attention", plain(layer_types=[FULL, "linear_attention"]), "linear_attention"),
    broken("RoPE that moves", plain(rope_scaling={"rope_type": "dynamic"}), "'dynamic'"),
    broken("YaRN without a factor", plain(rope_scaling={"rope_type": "yarn"}), "factor"),
    broken("NaN as a number", plain(output_multiplier=math.nan), "output_multiplier", "nan"),
    misfit("another width", plain(hidden_size=16), "hidden_size", "expected 32", "got 16"),
    misfit("another vocabulary", plain(vocab_size=62), "vocab_size", "expected 61", "got 62"),
    misfit("another depth", plain(num_target_layers=5), "num_target_layers", "4", "got 5"),
    misfit(
        "a tap too deep", nested(target_layer_ids=[0, NUM_LAYERS]), "target_layer_ids", "(0, 4)"
    ),
    misfit("a mask token too high", nested(mask_token_id=VOCAB_SIZE), "mask_token_id", "got 61"),
    misfit("too many tokens", nested(draft_vocab_size=62), "draft_vocab_size", "got 62"),
]

Z_LAB_TENSORS = [
    refused(
        "MiMo's sinks",
        plain(put("layers.0.self_attn.attention_sink_bias", 4)),
        "layers.0.self_attn.attention_sink_bias",
    ),
    refused(
        "MiMo's sinks, in a shard",
        plain(put("layers.0.self_attn.attention_sink_bias", 4), **SHARDED),
        "attention_sink_bias",
    ),
    refused("MiMo's mask", then(plain(), file("mask_embedding.pt", b"")), "mask_embedding.pt"),
    refused(
        "Laguna's fused projection",
        plain(put("layers.0.self_attn.qkv_proj.weight", 64, 32)),
        "layers.0.self_attn.qkv_proj.weight",
    ),
    refused(
        "Laguna's gate",
        plain(put("layers.0.self_attn.g_proj.weight", 4, 32), prefix="model."),
        "layers.0.self_attn.g_proj.weight",
    ),
    refused(
        "Laguna's norms of features",
        plain(put("aux_hidden_norms.0.weight", 32)),
        "aux_hidden_norms.0.weight",
    ),
    broken("Domino's GRU", plain(put("prefix_gru.weight_ih_l0", 3, 32)), "left over: prefix_gru"),
    broken("a head in z-lab's format", plain(put("lm_head.weight", 61, 32)), "lm_head.weight [61"),
    broken("no input layer", plain(drop("fc.weight")), "1 missing: fc.weight [32, 64]"),
    broken("no last norm", plain(drop("norm.weight"), **SHARDED), "1 missing: norm.weight [32]"),
    broken("no projection", plain(drop(Q_PROJ)), f"1 missing: {Q_PROJ} [32, 32]"),
    broken(
        "a layer more than declared",
        plain(put("layers.2.self_attn.q_norm.weight", 8)),
        "1 left over: layers.2.self_attn.q_norm.weight [8]",
    ),
    broken(
        "a bias that is not declared",
        plain(put("layers.0.self_attn.o_proj.bias", 32)),
        "1 left over: layers.0.self_attn.o_proj.bias [32]",
    ),
    broken(
        "a bias that is declared alone",
        plain(drop("layers.0.self_attn.q_proj.bias"), attention_bias=True),
        "1 missing: layers.0.self_attn.q_proj.bias [32]",
    ),
    broken(
        "another width of a projection",
        plain(put(Q_PROJ, 32, 16), **SHARDED),
        f"1 misshapen: {Q_PROJ} [32, 16] instead of [32, 32]",
    ),
    broken("a norm with two axes", plain(put("norm.weight", 32, 1)), "norm.weight [32, 1]"),
    broken(
        "a tap more than declared",
        nested(target_layer_ids=[0, 1, 2], edit=put("fc.weight", 32, 64)),
        "fc.weight [32, 64] instead of [32, 96]",
    ),
    broken(
        "a tensor under another name",
        plain(move(Q_PROJ, "layers.1.self_attn.query.weight")),
        f"1 missing: {Q_PROJ}",
        "1 left over: layers.1.self_attn.query.weight",
    ),
    broken(
        "quantised without a word",
        plain(move("fc.weight", "fc.qweight")),
        "1 missing: fc.weight",
        "1 left over: fc.qweight",
    ),
    broken("int8", plain(put("fc.weight", 32, 64, dtype=torch.int8)), "1 quantised: fc.weight"),
    broken("float8", plain(put("fc.weight", 32, 64, dtype=FLOAT8)), "1 quantised: fc.weight"),
    broken("NaN", plain(change("fc.weight", 3, 4, to=math.nan)), "fc.weight", "in 1 of 2048"),
    broken("infinity", plain(change(Q_PROJ, 0, to=-math.inf)), Q_PROJ, "in 32 of 1024 places"),
]

# What we write beside z-lab's format: a draft vocabulary and a transition head.
OURS = [
    broken(
        "no ids of the vocabulary",
        then(plain(draft_token_ids=THIRD), unlink("draft_vocabulary.json")),
        "draft_vocabulary.json: expected a file with 20 token ids",
    ),
    broken(
        "ids that config.json does not declare",
        then(plain(), file("draft_vocabulary.json", b'{"token_ids": [1, 2]}')),
        "draft_vocabulary.json: expected draft_vocab_size",
    ),
    broken("an id too high", plain(draft_token_ids=[1, VOCAB_SIZE]), "got 61 at index 1"),
    broken("an id twice", plain(draft_token_ids=[4, 4]), "got 4, 4 at index 0"),
    broken(
        "ids that are no list",
        then(plain(draft_token_ids=THIRD), file("draft_vocabulary.json", b'{"token_ids": 3}')),
        "draft_vocabulary.json: expected token_ids",
    ),
    broken(
        "no transition head",
        nested(transition_rank=4),
        "3 missing: candidate_selector.predecessor_codebook [61, 4]",
    ),
    broken(
        "a transition head that is not declared",
        plain(put("candidate_selector.successor_codebook", 61, 4)),
        "1 left over: candidate_selector.successor_codebook [61, 4]",
    ),
    broken("a head of rank 0", nested(transition_rank=0), "transition_rank", "got 0"),
]

SPECULATORS_CONFIG = [
    refused("Eagle 3", spec(speculators_model_type="eagle3"), "'eagle3'", "DFlash"),
    refused("no kind", spec(speculators_model_type=None), "speculators_model_type None"),
    refused("two formats", spec(dflash_config={}), "dflash_config beside"),
    refused("Domino", spec(projector_type="domino"), "projector_type 'domino'"),
    refused("shifted labels", spec(shift_label=True), "shift_label true"),
    refused(
        "slots that nobody tells the position of",
        spec(speculators_config={"proposal_methods": [{"speculative_tokens": 8}]}),
        "speculative_tokens 8 of block_size 8",
        "no sample_from_anchor",
    ),
    refused("FP8", spec(quantization_config={"quant_method": "fp8"}), "quantization_config"),
    refused("FP8, nested", decoder(quantization_config={"a": 1}), "quantization_config"),
    refused("narrower features", spec(target_hidden_size=64), "target_hidden_size 64", "32"),
    refused(
        "the embedding as a feature",
        spec(aux_hidden_state_layer_ids=[0, 2]),
        "aux_hidden_state_layer_ids [0, 2]",
    ),
    refused("a multiplier", spec(output_multiplier=0.5), "output_multiplier 0.5"),
    refused("a cap", decoder(final_logit_softcapping=30.0), "final_logit_softcapping 30.0"),
    refused("partial RoPE", decoder(partial_rotary_factor=0.5), "partial_rotary_factor"),
    refused("another activation", decoder(hidden_act="gelu"), "hidden_act 'gelu'"),
    broken("an anchor that is text", spec(sample_from_anchor="no"), "sample_from_anchor: expected"),
    broken("a flag that is 1", spec(sliding_window_non_causal=1), "sliding_window_non_causal: "),
    broken("no decoder", spec(transformer_layer_config=None), "transformer_layer_config: ", "None"),
    broken("a decoder that is a list", spec(transformer_layer_config=[]), "an object, got []"),
    broken("no taps", spec(aux_hidden_state_layer_ids=None), "aux_hidden_state_layer_ids: "),
    broken("a tap twice", spec(aux_hidden_state_layer_ids=[2, 2]), "distinct", "[2, 2]"),
    broken("a tap below 0", spec(aux_hidden_state_layer_ids=[-1]), "indices", "[-1]"),
    broken("a block of the root alone", spec(block_size=1), "block_size: expected", "got 1"),
    broken("no mask token", spec(mask_token_id=None), "mask_token_id: expected", "None"),
    broken("no draft_vocab_size", spec(draft_vocab_size=None), "draft_vocab_size: expected"),
    broken("no token to propose", spec(draft_vocab_size=0), "draft_vocab_size: ", "got 0"),
    broken("too many tokens", spec(draft_vocab_size=62), "draft_vocab_size: expected at most 61"),
    broken(
        "a block too long to be true", spec(block_size=2**20), "block_size: expected", "<= 1000"
    ),
    broken("two depths", spec(num_hidden_layers=3), "num_hidden_layers: expected 2, as in"),
    broken(
        "no width", decoder(hidden_size=None), "transformer_layer_config: hidden_size: ", "None"
    ),
    broken("no vocabulary", decoder(vocab_size=None), "transformer_layer_config: vocab_size: "),
    broken("a layer too few", decoder(layer_types=[FULL]), "layer_types: expected 2 of"),
    broken(
        "windows of unknown layers",
        decoder(use_sliding_window=True, sliding_window=5),
        "layer_types: expected one type per layer",
    ),
    misfit(
        "a mask token too high", spec(mask_token_id=VOCAB_SIZE), "mask_token_id: expected an id"
    ),
    misfit("a tap too deep", spec(aux_hidden_state_layer_ids=[5]), "target_layer_ids", "below 4"),
    misfit("another vocabulary", decoder(vocab_size=100), "vocab_size: expected 61", "got 100"),
    misfit("another width", decoder(hidden_size=16), "hidden_size: expected 32", "got 16"),
]

SPECULATORS_TENSORS = [
    broken("no d2t", spec(drop("d2t")), "d2t: expected int64 [20]", "no such tensor"),
    broken("no t2d", spec(drop("t2d")), "t2d: expected bool [61]", "no such tensor"),
    broken("no head of few tokens", spec(drop("lm_head.weight")), "lm_head.weight [20, 32]"),
    broken("no input layer", spec(drop("fc.weight")), "1 missing: fc.weight [32, 64]"),
    broken("something more", spec(put("x", 2)), "1 left over: x [2]"),
    broken("d2t of floats", spec(put("d2t", 20)), "d2t: expected int64 [20]", "got float32"),
    broken("NaN in d2t", spec(lambda t: t.update(d2t=t["d2t"] * math.nan)), "d2t", "got float32"),
    broken("d2t too short", spec(put("d2t", 19, dtype=INT)), "d2t: expected", "got int64 [19]"),
    broken("t2d of integers", spec(put("t2d", 61, dtype=INT)), "t2d", "got int64 [61]"),
    broken("t2d too short", spec(put("t2d", 20, dtype=torch.bool)), "t2d", "got bool [20]"),
    broken("d2t too high", spec(change("d2t", 19, to=42)), "d2t", "19 + 42 = 61 at index 19"),
    broken("d2t below 0", spec(change("d2t", 0, to=-1)), "d2t", "0 + -1 = -1 at index 0"),
    broken("a token twice", spec(change("d2t", 1, to=0)), "d2t", "got 1, 1 at index 0"),
    broken("tokens not sorted", spec(change("d2t", 3, to=0)), "d2t", "got 7, 3 at index 2"),
    broken("a token too many in t2d", spec(change("t2d", 2, to=True)), "t2d", "true at index 2"),
    broken("a token missing in t2d", spec(change("t2d", 4, to=False)), "t2d", "false at index 4"),
    broken(
        "d2t of all tokens without t2d",
        lambda folder: write_speculators(folder, edit=put("d2t", VOCAB_SIZE, dtype=INT)),
        "t2d: expected bool [61]",
    ),
    broken(
        "a head of all tokens",
        spec(put("lm_head.weight", 61, 32)),
        "lm_head.weight: expected [20, 32], got [61, 32]",
    ),
    broken(
        "an embedding of few tokens",
        spec(put("embed_tokens.weight", 20, 32)),
        "embed_tokens.weight: expected [61, 32], got [20, 32]",
    ),
    broken(
        "a head in float8",
        spec(put("lm_head.weight", 20, 32, dtype=FLOAT8)),
        "lm_head.weight: expected float32, bfloat16 or float16",
    ),
    broken(
        "the verifier's norm of another width",
        spec(put("verifier_norm.weight", 3)),
        "verifier_norm.weight: expected [32], got [3]",
    ),
    broken(
        "the verifier's head of another vocabulary",
        spec(put("verifier_lm_head.weight", 60, HIDDEN_SIZE)),
        "verifier_lm_head.weight: expected [20, 32] or [61, 32], got [60, 32]",
    ),
    broken(
        "NaN in an embedding of its own",
        spec(change("embed_tokens.weight", 60, 0, to=math.nan)),
        "embed_tokens.weight: expected finite numbers",
        "in 1 of 1952 places",
    ),
    broken(
        "infinity in a head of its own",
        spec(change("lm_head.weight", 2, to=math.inf)),
        "lm_head.weight: expected finite numbers",
        "in 32 of 640 places",
    ),
    broken(
        "an embedding of its own and no head",
        lambda folder: write_speculators(folder, edit=own_embedding_alone),
        "lm_head.weight: expected a head beside embed_tokens.weight",
        "others in 61 of 61 rows",
    ),
    broken("NaN in the network", spec(change("norm.weight", 1, to=math.nan)), "norm.weight"),
    refused(
        "Laguna's gate",
        spec(put("layers.0.self_attn.g_proj.weight", 4, 32)),
        "layers.0.self_attn.g_proj.weight",
    ),
    refused(
        "MiMo's sinks",
        spec(put("layers.1.self_attn.attention_sink_bias", 4)),
        "layers.1.self_attn.attention_sink_bias",
    ),
    refused("MiMo's mask", then(spec(), file("mask_embedding.pt", b"")), "mask_embedding.pt"),
]

TABLES = {
    "files": FILES,
    "z-lab config": Z_LAB_CONFIG,
    "z-lab tensors": Z_LAB_TENSORS,
    "ours": OURS,
    "speculators config": SPECULATORS_CONFIG,
    "speculators tensors": SPECULATORS_TENSORS,
}
ROWS = [
    pytest.param(row, id=f"{table}: {row.how}") for table, rows in TABLES.items() for row in rows
]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama")


@pytest.mark.parametrize("row", ROWS)
def test_it_is_refused_by_name(row: Broken, tmp_path: Path, target: Target) -> None:
    row.write(tmp_path)
    with pytest.raises(row.kind) as caught:
        load_drafter(tmp_path, target)
    error, message = caught.value, str(caught.value)
    assert type(error) is row.kind
    for part in (error.argument, error.expected, error.got, error.remedy, str(tmp_path)):
        assert part, error
        assert part in message
    for name in row.named:
        assert name in message
    assert error.remedy.endswith(".")


@pytest.mark.parametrize("write", [plain(), plain(**SHARDED), nested(), spec(), decoder()])
def test_what_the_rows_break_loads_when_it_is_whole(
    write: Damage, tmp_path: Path, target: Target
) -> None:
    write(tmp_path)
    assert load_drafter(tmp_path, target).num_depths == 7
