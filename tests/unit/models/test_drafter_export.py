"""A drafter that is written is the drafter that is read; an older one is replaced whole or not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import Qwen3Config

from ddtree.errors import CacheWriteError, CheckpointError, OptionError
from ddtree.models import drafter_export
from ddtree.models.drafter import DFlashDrafter
from ddtree.models.drafter_config import DrafterConfig, parse_drafter_config
from ddtree.models.drafter_export import config_json, save_drafter
from ddtree.models.drafter_network import DFlashNetwork
from ddtree.models.loading import load_drafter
from ddtree.models.target import Target
from tests.support.checkpoints import drafter_shapes
from tests.support.models import VOCAB_SIZE, dflash_drafter, drafter_config, tiny_target

FULL, SLIDING = "full_attention", "sliding_attention"
PROVENANCE = {"command": "ddtree train fit", "seed": 3, "nested": {"loss": 1.5}}
THIRD = tuple(range(1, VOCAB_SIZE, 3))

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama")


@pytest.fixture
def drafter(target: Target) -> DFlashDrafter:
    return dflash_drafter(target)


def save(
    drafter: DFlashDrafter,
    folder: Path,
    token_ids: tuple[int, ...] | None = None,
    **options: object,
) -> Path:
    save_drafter(
        drafter.network,
        drafter.config,
        folder,
        draft_token_ids=token_ids,
        provenance=PROVENANCE,
        **options,
    )
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# What is written is what is read.


@pytest.mark.parametrize("token_ids", [None, THIRD], ids=["whole", "reduced"])
def test_a_saved_drafter_loads_with_the_same_tensors_and_configuration(
    token_ids: tuple[int, ...] | None, tmp_path: Path, target: Target, drafter: DFlashDrafter
) -> None:
    loaded = load_drafter(
        save(drafter, tmp_path / "new" / "drafter", token_ids), target, packed=False
    )
    size = None if token_ids is None else len(token_ids)
    assert loaded.config == replace(drafter.config, draft_vocab_size=size)
    expected = drafter.network.state_dict()
    got = loaded.network.state_dict()
    assert got.keys() == expected.keys()
    assert all(got[key].equal(value.bfloat16().float()) for key, value in expected.items())
    ids = loaded.draft_token_ids
    assert (None if ids is None else tuple(ids.tolist())) == token_ids


@pytest.mark.parametrize("token_ids", [None, THIRD], ids=["whole", "reduced"])
def test_the_files_are_those_of_the_format_and_two_of_ours(
    token_ids: tuple[int, ...] | None, tmp_path: Path, drafter: DFlashDrafter
) -> None:
    folder = save(drafter, tmp_path / "drafter", token_ids)
    ours = {"provenance.json"} | ({"draft_vocabulary.json"} if token_ids else set())
    assert files(folder).keys() == {"config.json", "model.safetensors"} | ours
    assert json.loads((folder / "provenance.json").read_text()) == PROVENANCE
    if token_ids:
        vocabulary = json.loads((folder / "draft_vocabulary.json").read_text())
        assert vocabulary == {"token_ids": list(token_ids)}
    tensors = load_file(folder / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == drafter_shapes(drafter_config())
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert {path.stat().st_mode for path in folder.iterdir()} == {
        (folder / "config.json").stat().st_mode
    }
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_another_dtype_may_be_asked_for(
    dtype: torch.dtype, tmp_path: Path, drafter: DFlashDrafter
) -> None:
    folder = save(drafter, tmp_path / "drafter", dtype=dtype)
    tensors = load_file(folder / "model.safetensors")
    expected = drafter.network.state_dict()
    assert all(tensors[key].equal(value.to(dtype)) for key, value in expected.items())
    declared = json.loads((folder / "config.json").read_text())["torch_dtype"]
    assert declared == str(dtype).removeprefix("torch.")


def test_saving_leaves_the_network_as_it_was(tmp_path: Path, drafter: DFlashDrafter) -> None:
    network = drafter.network.train()
    before = {key: value.clone() for key, value in network.state_dict().items()}
    save(drafter, tmp_path / "drafter")
    assert network.training
    assert all(p.requires_grad and p.dtype == torch.float32 for p in network.parameters())
    assert all(value.equal(before[key]) for key, value in network.state_dict().items())


# The configuration, there and back.


@st.composite
def configs(draw: st.DrawFn) -> DrafterConfig:
    num_layers = draw(st.integers(1, 4))
    window = draw(st.integers(1, 4096))
    kinds = st.sampled_from([None, window])
    windows = tuple(draw(st.lists(kinds, min_size=num_layers, max_size=num_layers)))
    by_window = tuple(size is not None for size in windows)
    positive = st.floats(1e-6, 1e6)
    default = st.just({"rope_type": "default"})
    linear = st.fixed_dictionaries({"rope_type": st.just("linear"), "factor": positive})
    yarn = st.fixed_dictionaries(
        {"rope_type": st.just("yarn"), "factor": positive},
        optional={"original_max_position_embeddings": st.integers(1, 8192), "beta_fast": positive},
    )
    heads = draw(st.integers(1, 8))
    optional_count = st.none() | st.integers(1, 10**6)
    return DrafterConfig(
        block_size=draw(st.integers(2, 32)),
        mask_token_id=draw(st.integers(0, 10**6)),
        target_layer_ids=tuple(
            draw(st.lists(st.integers(0, 80), min_size=1, max_size=8, unique=True))
        ),
        num_target_layers=draw(optional_count),
        hidden_size=draw(st.integers(1, 8192)),
        intermediate_size=draw(st.integers(1, 8192)),
        num_layers=num_layers,
        num_heads=heads * draw(st.integers(1, 8)),
        num_kv_heads=heads,
        head_dim=2 * draw(st.integers(1, 128)),
        vocab_size=draw(optional_count),
        rms_norm_eps=draw(positive),
        attention_bias=draw(st.booleans()),
        max_position_embeddings=draw(st.integers(1, 10**6)),
        rope_parameters={**draw(default | linear | yarn), "rope_theta": draw(positive)},
        windows=windows,
        causal=draw(st.sampled_from([by_window, (True,) * num_layers, (False,) * num_layers])),
        output_multiplier=draw(positive),
        final_logit_softcapping=draw(st.none() | positive),
        input_embedding_scale=draw(positive),
        draft_vocab_size=draw(optional_count),
    )


@given(config=configs())
def test_every_configuration_comes_back_from_its_json(config: DrafterConfig) -> None:
    text = json.dumps(config_json(config))
    assert parse_drafter_config(json.loads(text), "test") == config


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
WRITTEN = [
    ({}, {"layer_types": [FULL] * 2, "sliding_window": None, "use_sliding_window": False}),
    ({}, {"rope_theta": 10000.0, "rope_scaling": None, "architectures": ["DFlashDraftModel"]}),
    (
        {"layer_types": [SLIDING, FULL], "sliding_window": 8},
        {"layer_types": [SLIDING, FULL], "sliding_window": 8, "use_sliding_window": True},
    ),
    ({"rope_scaling": YARN}, {"rope_theta": 10000.0, "rope_scaling": YARN}),
]


@pytest.mark.parametrize(("changes", "expected"), WRITTEN, ids=str)
def test_the_keys_at_the_top_are_qwen3s(
    changes: dict[str, object], expected: dict[str, object]
) -> None:
    written = config_json(parse_drafter_config(drafter_config(**changes), "test"))
    assert {key: written[key] for key in expected} == expected
    nested = {"mask_token_id": 3, "target_layer_ids": [0, 2]}
    assert written["dflash_config"] == nested


NESTED = [
    {"is_causal": True},
    {"output_multiplier": 0.5, "final_logit_softcapping": 20.0, "input_embedding_scale": 2.0},
    {"draft_vocab_size": 20},
]


@pytest.mark.parametrize("keys", NESTED, ids=str)
def test_what_qwen3_does_not_know_is_nested(keys: dict[str, object]) -> None:
    written = config_json(parse_drafter_config(drafter_config(**keys), "test"))
    assert keys.items() <= written["dflash_config"].items()
    assert not keys.keys() & written.keys()


def test_a_configuration_that_others_wrote_is_written_as_it_is() -> None:
    path = Path(__file__).parents[3] / "recipes" / "smollm2-135m" / "v0" / "config.json"
    shipped = json.loads(path.read_text())
    config = parse_drafter_config(shipped, "v0")
    written = config_json(config)
    assert parse_drafter_config(written, "test") == config
    # Of the target's tokens it says nothing, and the dtype is known where weights are written.
    unknown = {"torch_dtype", "bos_token_id", "eos_token_id"}
    assert written == {key: value for key, value in shipped.items() if key not in unknown}


@pytest.mark.parametrize(
    "changes",
    [{}, {"layer_types": [SLIDING, FULL], "sliding_window": 8}, {"rope_scaling": YARN}],
    ids=str,
)
def test_transformers_reads_it_as_a_qwen3_configuration(
    changes: dict[str, object], tmp_path: Path, target: Target
) -> None:
    drafter = dflash_drafter(target, **changes)
    read = Qwen3Config.from_pretrained(save(drafter, tmp_path / "drafter", THIRD))
    assert read.model_type == "qwen3"
    assert (read.hidden_size, read.num_hidden_layers, read.vocab_size) == (32, 2, VOCAB_SIZE)
    assert read.dtype == torch.bfloat16
    assert read.layer_types == changes.get("layer_types", [FULL, FULL])
    assert read.sliding_window == changes.get("sliding_window")
    rope = {"rope_theta": 10000.0, "rope_type": "default", **changes.get("rope_scaling", {})}
    assert rope.items() <= read.rope_parameters.items()
    assert read.dflash_config["draft_vocab_size"] == len(THIRD)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"windows": (8, 4), "causal": (True, True)}, "config.windows"),
        ({"causal": (True, False)}, "config.causal"),
        ({"windows": (8, 8), "causal": (True, False)}, "config.causal"),
    ],
    ids=str,
)
def test_layers_that_the_format_has_no_words_for_are_refused(
    changes: dict[str, object], named: str, tmp_path: Path, drafter: DFlashDrafter
) -> None:
    config = replace(drafter.config, **changes)
    with pytest.raises(OptionError) as caught:
        save_drafter(
            drafter.network, config, tmp_path / "drafter", draft_token_ids=None, provenance={}
        )
    assert caught.value.argument == named
    assert not (tmp_path / "drafter").exists()


# An older drafter is replaced whole or not at all.


def test_an_older_drafter_is_replaced_and_none_of_its_files_stays(
    tmp_path: Path, target: Target, drafter: DFlashDrafter
) -> None:
    folder = save(drafter, tmp_path / "drafter", THIRD)
    save(dflash_drafter(target, seed=1), folder)
    assert files(folder).keys() == {"config.json", "model.safetensors", "provenance.json"}
    newer = dflash_drafter(target, seed=1).network.state_dict()
    loaded = load_drafter(folder, target, packed=False).network.state_dict()
    assert all(loaded[key].equal(value.bfloat16().float()) for key, value in newer.items())
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


class Killed(BaseException):
    """Not an Exception: what an interrupt or a kill looks like from inside."""


@pytest.mark.parametrize("failure", [Killed(), OSError(28, "No space left on device")], ids=repr)
@pytest.mark.parametrize("older", [True, False])
def test_a_failure_while_writing_leaves_the_older_drafter_as_it_was(
    older: bool,
    failure: BaseException,
    tmp_path: Path,
    drafter: DFlashDrafter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "drafter"
    before = files(save(drafter, folder, THIRD)) if older else None

    def save_file(tensors: dict[str, torch.Tensor], file: Path, **options: object) -> None:
        file.write_bytes(b"half of it")
        raise failure

    monkeypatch.setattr(drafter_export, "save_file", save_file)
    with pytest.raises(Killed if isinstance(failure, Killed) else CacheWriteError) as caught:
        save(drafter, folder)
    if isinstance(caught.value, CacheWriteError):
        assert str(folder) in str(caught.value)
        assert "No space left" in str(caught.value)
    assert (files(folder) if folder.exists() else None) == before
    assert len(list(tmp_path.iterdir())) == older


@pytest.mark.parametrize("failure", [Killed(), PermissionError(13, "no")], ids=repr)
def test_a_failure_between_the_two_renames_puts_the_older_drafter_back(
    failure: BaseException,
    tmp_path: Path,
    drafter: DFlashDrafter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = save(drafter, tmp_path / "drafter", THIRD)
    before = files(folder)
    rename = Path.rename

    def failing(path: Path, target: Path) -> Path:
        if path.name == "made":
            assert not folder.exists()
            raise failure
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(Killed if isinstance(failure, Killed) else CacheWriteError):
        save(drafter, folder)
    assert files(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path, drafter: DFlashDrafter) -> None:
    folder = save(drafter, tmp_path / "drafter")
    (folder / "thesis.tex").write_text("years of work")
    before = files(folder)
    with pytest.raises(OptionError) as caught:
        save(drafter, folder)
    assert "thesis.tex" in str(caught.value)
    assert "Name another folder" in str(caught.value)
    assert files(folder) == before


def test_an_empty_folder_is_taken(tmp_path: Path, target: Target, drafter: DFlashDrafter) -> None:
    (tmp_path / "drafter").mkdir()
    assert load_drafter(save(drafter, tmp_path / "drafter"), target).num_depths == 7


def test_a_file_in_the_way_is_named(tmp_path: Path, drafter: DFlashDrafter) -> None:
    (tmp_path / "drafter").write_text("a file")
    for folder in (tmp_path / "drafter", tmp_path / "drafter" / "below"):
        with pytest.raises(CacheWriteError) as caught:
            save(drafter, folder)
        assert str(folder) in str(caught.value)
    assert (tmp_path / "drafter").read_text() == "a file"


# What does not belong together is not written.


@pytest.mark.parametrize(
    ("declared", "token_ids", "expected", "got"),
    [
        (3, (1, 2), "3 token ids", "2"),
        (3, None, "token_ids, a list of token ids", "[]"),
        (None, (), "token_ids, a list of token ids", "[]"),
        (None, (2, 1), "ascending", "2, 1 at index 0"),
        (None, (1, 1), "ascending", "1, 1 at index 0"),
        (None, (1, VOCAB_SIZE), "< 61", "61 at index 1"),
        (None, torch.tensor([1, 2]), "whole numbers", "tensor(1) at index 0"),
    ],
    ids=str,
)
def test_a_broken_vocabulary_is_not_written(
    declared: int | None,
    token_ids: tuple[int, ...] | None,
    expected: str,
    got: str,
    tmp_path: Path,
    drafter: DFlashDrafter,
) -> None:
    config = replace(drafter.config, draft_vocab_size=declared)
    with pytest.raises(CheckpointError) as caught:
        save_drafter(
            drafter.network,
            config,
            tmp_path / "drafter",
            draft_token_ids=token_ids,
            provenance={},
        )
    assert "draft_vocabulary.json" in caught.value.argument
    assert expected in caught.value.expected
    assert caught.value.got == got
    assert list(tmp_path.iterdir()) == []


def test_a_network_of_another_configuration_is_not_written(
    tmp_path: Path, drafter: DFlashDrafter
) -> None:
    config = parse_drafter_config(drafter_config(num_hidden_layers=3), "test")
    with pytest.raises(CheckpointError, match=r"11 missing: layers\.2"):
        save_drafter(
            drafter.network, config, tmp_path / "drafter", draft_token_ids=None, provenance={}
        )
    assert list(tmp_path.iterdir()) == []


def test_a_provenance_that_is_no_json_is_a_bug_of_the_caller_and_costs_nothing(
    tmp_path: Path, drafter: DFlashDrafter
) -> None:
    folder = save(drafter, tmp_path / "drafter")
    before = files(folder)
    with pytest.raises(TypeError):
        save_drafter(
            drafter.network,
            drafter.config,
            folder,
            draft_token_ids=None,
            provenance={"path": tmp_path},
        )
    assert files(folder) == before


def test_biases_are_written_too(tmp_path: Path, target: Target) -> None:
    biased = dflash_drafter(target, attention_bias=True)
    assert isinstance(biased.network, DFlashNetwork)
    loaded = load_drafter(save(biased, tmp_path / "drafter"), target)
    assert loaded.config.attention_bias
    bias = biased.network.state_dict()["layers.0.self_attn.q_proj.bias"]
    got = loaded.network.state_dict()["layers.0.self_attn.q_proj.bias"]
    assert got.equal(bias.bfloat16().float())
