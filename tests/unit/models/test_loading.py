"""Loading targets and drafters from folders: what fits is read whole, what does not is named."""

from __future__ import annotations

import copy
import errno
import fnmatch
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

import ddtree
from ddtree.errors import (
    BackendError,
    CacheWriteError,
    CheckpointError,
    ModelNotFoundError,
    OptionError,
    PairMismatchError,
    UnsupportedModelError,
    UserError,
)
from ddtree.models import folder as model_folder
from ddtree.models import kernels, loading
from ddtree.models.drafter import DFlashDrafter
from ddtree.models.loading import load_drafter, load_target
from ddtree.models.packed import PackedLinear, PairLinear
from ddtree.models.target import Target
from tests.support import drafters
from tests.support.checkpoints import (
    Tensors,
    drafter_tensors,
    edit_json,
    write_drafter,
    write_target,
)
from tests.support.models import (
    HIDDEN_SIZE,
    VOCAB_SIZE,
    drafter_config,
    greedy_reference,
    tiny_model,
    tiny_target,
)
from tests.support.tokenizers import tiny_tokenizer

PROMPT = [5, 17, 42, 8, 23, 11, 2]
MASK_AND_TAPS = {"mask_token_id": 3, "target_layer_ids": [0, 2]}
Q_PROJ = "layers.1.self_attn.q_proj.weight"

pytestmark = pytest.mark.usefixtures("unchecked")


def refusal(kind: type[UserError], call: Callable[[], object], *named: str) -> str:
    """The message of the error, which must hold all that STYLE 15 asks for."""
    with pytest.raises(kind) as caught:
        call()
    error, message = caught.value, str(caught.value)
    for part in (error.argument, error.expected, error.got, error.remedy, *named):
        assert part, error
        assert part in message
    assert error.remedy.endswith(".")
    return message


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("written") / "target")


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy of the target to break."""
    return Path(shutil.copytree(written, tmp_path / "target"))


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama")


# Drafters that load.


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"prefix": "model."},
        {"sharded": True},
        {"sharded": True, "prefix": "model."},
    ],
    ids=str,
)
def test_tensors_are_read_from_every_layout(
    layout: dict[str, object], tmp_path: Path, target: Target
) -> None:
    drafter = load_drafter(write_drafter(tmp_path, **layout), target, packed=False)
    loaded = drafter.network.state_dict()
    expected = drafter_tensors(drafter_config())
    assert loaded.keys() == expected.keys()
    assert all(loaded[name].equal(tensor) for name, tensor in expected.items())
    assert drafter.layer_ids == (0, 2)
    assert drafter.num_depths == 7


VARIANTS: list[dict[str, object]] = [
    {"block_size": None, "dflash_config": {**MASK_AND_TAPS, "block_size": 4}},
    {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5},
    {"output_multiplier": 0.5, "final_logit_softcapping": 20.0, "input_embedding_scale": 2.0},
    {"attention_bias": True},
    {"vocab_size": None, "num_target_layers": None},
    {"dflash_config": {"mask_token_id": VOCAB_SIZE - 1, "target_layer_ids": [3]}},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_every_variant_of_the_format_loads_and_drafts_without_changing_the_text(
    changes: dict[str, object], tmp_path: Path, target: Target
) -> None:
    pair = ddtree.Pair(target, load_drafter(write_drafter(tmp_path, **changes), target))
    generation = pair.generate(PROMPT, budget=16, max_new_tokens=20)
    assert list(generation.token_ids) == greedy_reference(tiny_model("llama"), PROMPT, 20)
    assert max(int(r.tree.depths.max()) for r in generation.rounds if r.tree) > 1


def test_a_mask_id_beyond_the_tokenizer_is_fine_within_the_embedding(tmp_path: Path) -> None:
    config = copy.deepcopy(tiny_model("llama").config)
    config.vocab_size = VOCAB_SIZE + 3
    wide = Target(LlamaForCausalLM(config), tiny_tokenizer(), name="wide")
    last = VOCAB_SIZE + 2
    assert len(wide.tokenizer) <= last < wide.vocab_size

    def write(mask_id: int) -> Path:
        taps = {**MASK_AND_TAPS, "mask_token_id": mask_id}
        return write_drafter(tmp_path, vocab_size=wide.vocab_size, dflash_config=taps)

    pair = ddtree.Pair(wide, load_drafter(write(last), wide))
    assert pair.generate("hello", budget=16, max_new_tokens=4).num_tokens == 4
    refusal(
        PairMismatchError,
        lambda: load_drafter(write(last + 1), wide),
        "mask_token_id",
        f"an id below {last + 1}, the rows of the target's embedding",
        f"got {last + 1}",
    )


@pytest.mark.parametrize("architecture", ["llama", "llama-tied"])
def test_the_drafters_logits_are_its_hidden_states_times_the_targets_head(
    architecture: str, tmp_path: Path
) -> None:
    written = write_target(tmp_path / "target", architecture, tokenizer=False)
    tensors = load_file(written / "model.safetensors")
    assert ("lm_head.weight" in tensors) == (architecture == "llama")
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    target = load_target(written)
    drafter = load_drafter(write_drafter(tmp_path / "drafter"), target)
    hidden: list[torch.Tensor] = []
    drafter.network.norm.register_forward_hook(lambda *call: hidden.append(call[-1]))
    with torch.inference_mode():
        session = drafter.start(8)
        drafters.feed(session, torch.randn(5, 2 * HIDDEN_SIZE))
        marginals = session.propose(7, num_depths=7, num_ranks=VOCAB_SIZE)
        expected = (hidden[0][1:] @ head.T).log_softmax(dim=-1)
    got = torch.empty_like(expected).scatter_(1, marginals.token_ids, marginals.log_probs)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


def test_a_drafter_takes_the_targets_dtype_and_keeps_its_rope_in_float32(
    written: Path, tmp_path: Path, target: Target
) -> None:
    """In bfloat16 the frequencies lose 0.4%: at position 1000 the angle is off by radians."""
    half = load_target(written, dtype="bfloat16")
    folder = write_drafter(tmp_path)
    drafter, exact = load_drafter(folder, half), load_drafter(folder, target)
    assert {p.dtype for p in drafter.network.parameters()} == {torch.bfloat16}
    assert drafter.network.rotary.inv_freq.equal(exact.network.rotary.inv_freq)
    generation = ddtree.Pair(half, drafter).generate(PROMPT, budget=16, max_new_tokens=5)
    assert generation.num_tokens == 5


# Drafters that do not; `test_broken_checkpoints` has the table.


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def put(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: torch.zeros(shape, dtype=dtype)})


def test_a_mask_embedding_on_the_hub_is_fetched_so_that_it_can_be_refused(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = write_drafter(tmp_path / "remote")
    (remote / "mask_embedding.pt").write_bytes(b"")
    (remote / "README.md").write_text("not wanted")

    def download(name: str, *, allow_patterns: list[str]) -> str:
        assert name == "owner/drafter"
        snapshot = tmp_path / "snapshot"
        snapshot.mkdir()
        for file in remote.iterdir():
            if any(fnmatch.fnmatch(file.name, pattern) for pattern in allow_patterns):
                shutil.copy(file, snapshot)
        assert not (snapshot / "README.md").exists()
        return str(snapshot)

    monkeypatch.setattr(model_folder, "snapshot_download", download)
    refusal(
        UnsupportedModelError, lambda: load_drafter("owner/drafter", target), "mask_embedding.pt"
    )


def test_a_target_given_as_drafter_is_recognised(written: Path, target: Target) -> None:
    refusal(
        UnsupportedModelError,
        lambda: load_drafter(written, target),
        "LlamaForCausalLM",
        "Check that --drafter names the drafter and not the target.",
    )


@pytest.mark.parametrize("architectures", [["DFlashDraftModel"], ["DFlash2DraftModel"], None])
def test_a_drafter_given_as_target_is_recognised(
    architectures: list[str] | None, tmp_path: Path
) -> None:
    folder = write_drafter(tmp_path, architectures=architectures)
    message = refusal(UnsupportedModelError, lambda: load_target(folder), str(folder))
    assert "Give it as --drafter" in message


def test_weights_of_another_depth_are_listed_and_the_list_is_short(
    tmp_path: Path, target: Target
) -> None:
    weights = drafter_tensors(drafter_config())
    folder = write_drafter(tmp_path, weights=weights, num_hidden_layers=3)
    message = refusal(
        CheckpointError,
        lambda: load_drafter(folder, target),
        "11 missing: layers.2.input_layernorm.weight [32]",
    )
    assert "and 3 more" in message


# A target's config.json.


@pytest.mark.parametrize(
    ("content", "kind", "named"),
    [
        (None, ModelNotFoundError, "a folder with a config.json"),
        (b"{not json", CheckpointError, "expected JSON"),
        (b"", CheckpointError, "expected JSON"),
        (b"\xff\xfe", CheckpointError, "expected JSON"),
        (b"[1, 2]", CheckpointError, "expected a JSON object, got list"),
        (b"null", CheckpointError, "expected a JSON object, got NoneType"),
    ],
    ids=str,
)
def test_a_broken_config_is_named(
    content: bytes | None, kind: type[UserError], named: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    refusal(kind, lambda: load_target(tmp_path), named, str(tmp_path))


def test_an_unreadable_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    refusal(ModelNotFoundError, lambda: load_target(tmp_path), "a readable config.json")


# Names that lead nowhere.


@pytest.mark.parametrize(
    "name", ["nowhere", "./nowhere", "/no/where", "a/b/c", "~/model", "smollm3-135m"]
)
def test_a_name_that_leads_nowhere_is_repeated_with_what_may_stand_there(
    name: str, target: Target
) -> None:
    refusal(ModelNotFoundError, lambda: load_target(name), repr(name), "smollm2-135m")
    refusal(ModelNotFoundError, lambda: load_drafter(name, target), repr(name), "drafter: ")


def test_a_name_that_the_file_system_refuses_is_an_error_of_ours() -> None:
    refusal(ModelNotFoundError, lambda: load_target("x" * 5000), "File name too long")


@pytest.mark.parametrize(
    "failure",
    [
        LocalEntryNotFoundError("offline, and not in the cache"),
        OSError("the network is unreachable"),
        ConnectionResetError(errno.ECONNRESET, "reset by peer"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_no_network_is_a_model_not_found(
    failure: Exception, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*args: object, **options: object) -> str:
        raise failure

    monkeypatch.setattr(model_folder, "snapshot_download", download)
    refusal(ModelNotFoundError, lambda: load_target("owner/model"), "'owner/model'", "network")
    refusal(ModelNotFoundError, lambda: load_drafter("owner/model", target), "'owner/model'")
    refusal(ModelNotFoundError, lambda: loading.read_target_shape("owner/model"), "'owner/model'")


def test_an_id_that_the_hub_would_not_take_is_a_model_not_found() -> None:
    refusal(ModelNotFoundError, lambda: load_target("owner/mo del"), "'owner/mo del'")


def test_an_http_error_is_a_model_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*args: object, **options: object) -> str:
        error = HfHubHTTPError.__new__(HfHubHTTPError)
        OSError.__init__(error, "401 Client Error: gated repository")
        raise error

    monkeypatch.setattr(model_folder, "snapshot_download", download)
    refusal(ModelNotFoundError, lambda: load_target("owner/gated"), "401 Client Error", "HF_TOKEN")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_cache_that_cannot_be_written_is_not_blamed_on_the_network(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*args: object, **options: object) -> str:
        raise OSError(number, "no luck", "/cache/blob")

    monkeypatch.setattr(model_folder, "snapshot_download", download)
    message = refusal(CacheWriteError, lambda: load_target("owner/model"), "/cache/blob", "HF_HOME")
    assert "network" not in message


# Targets.


def test_a_written_target_says_what_the_model_says(written: Path) -> None:
    target = load_target(written)
    assert target.dtype == torch.float32
    assert target.name == str(written)
    assert target.tokenizer is not None
    generation = ddtree.Pair(target, None).generate(PROMPT, method="ar", max_new_tokens=10)
    assert list(generation.token_ids) == greedy_reference(tiny_model("llama"), PROMPT, 10)


def test_shapes_are_read_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    shape = loading.read_target_shape(str(folder))
    assert (shape.hidden_size, shape.num_layers, shape.vocab_size) == (32, 4, 61)


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (drop("model.layers.1.mlp.up_proj.weight"), "model.layers.1.mlp.up_proj.weight"),
        (drop("lm_head.weight"), "lm_head.weight"),
        (put("model.layers.9.mlp.up_proj.weight", 48, 32), "model.layers.9.mlp.up_proj.weight"),
        (put("model.norm.weight", 16), "model.norm.weight"),
    ],
    ids=["missing", "head missing", "left over", "misshapen"],
)
def test_a_target_with_other_tensors_than_its_config_says_is_refused(
    edit: Callable[[Tensors], object], named: str, folder: Path
) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    refusal(CheckpointError, lambda: load_target(folder), named, str(folder))


@pytest.mark.parametrize("keep", [0, 100, 5000])
def test_truncated_target_weights_are_an_error(keep: int, folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refusal(CheckpointError, lambda: load_target(folder), str(folder), "Download the checkpoint")


def test_a_target_without_weights_is_an_error(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refusal(CheckpointError, lambda: load_target(folder), "model.safetensors")


def test_an_architecture_that_is_not_supported_is_named(tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=8, n_layer=1, n_head=1))
    model.save_pretrained(tmp_path)
    supported = "llama, ministral"
    refusal(UnsupportedModelError, lambda: load_target(tmp_path), "'gpt2'", supported)
    refusal(UnsupportedModelError, lambda: load_target(model), "'gpt2'", supported)
    refusal(UnsupportedModelError, lambda: loading.read_target_shape(str(tmp_path)), "'gpt2'")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": None}, "None"),
        ({"model_type": ["llama"]}, "['llama']"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"hidden_size": 33}, "multiple of the number of attention heads"),
        ({"num_attention_heads": 0}, "zero"),
        ({"dtype": "float33"}, "float33"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "spiral"),
        ({"hidden_act": "wish"}, "wish"),
        ({"num_hidden_layers": 3}, "model.layers.3"),
        ({"num_hidden_layers": 5}, "model.layers.4"),
    ],
    ids=str,
)
def test_a_target_config_that_makes_no_model_is_an_error_of_ours(
    changes: dict[str, object], named: str, folder: Path
) -> None:
    edit_json(folder / "config.json", **changes)
    refusal(UserError, lambda: load_target(folder), named, str(folder))


@pytest.mark.parametrize("content", ["{not json", "[]", "{}"])
@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_broken_tokenizer_files_are_named(file: str, content: str, folder: Path) -> None:
    (folder / file).write_text(content)
    if (file, content) == ("tokenizer_config.json", "{}"):
        assert load_target(folder).tokenizer is not None
        return
    message = refusal(CheckpointError, lambda: load_target(folder), f"tokenizer in {folder}")
    assert "work with token ids" in message


def test_a_folder_without_a_tokenizer_works_with_token_ids(tmp_path: Path) -> None:
    pair = ddtree.load(
        write_target(tmp_path / "target", tokenizer=False), write_drafter(tmp_path / "drafter")
    )
    assert pair.target.tokenizer is None
    generation = pair.generate(PROMPT, budget=16, max_new_tokens=10)
    assert generation.text is None
    assert list(generation.token_ids) == greedy_reference(tiny_model("llama"), PROMPT, 10)


def test_a_tokenizer_can_be_given_beside_a_folder(tmp_path: Path) -> None:
    folder = write_target(tmp_path, tokenizer=False)
    target = load_target(folder, tokenizer=tiny_tokenizer())
    assert target.tokenizer is tiny_tokenizer()


def test_loaded_models_and_tokenizers_are_taken_in_place_of_ids(tmp_path: Path) -> None:
    model = tiny_model("llama")
    pair = ddtree.load(model, write_drafter(tmp_path), tokenizer=tiny_tokenizer())
    assert pair.target.model is model
    assert isinstance(pair.drafter, DFlashDrafter)
    assert pair.generate("hello", budget=16, max_new_tokens=3).text is not None
    again = ddtree.load(model, pair.drafter)
    assert again.drafter is pair.drafter
    assert again.target.tokenizer is None
    assert again.generate(PROMPT, budget=16, max_new_tokens=3).text is None


def test_a_drafter_of_ones_own_is_taken_as_it_is() -> None:
    own = drafters.random_drafter(0, VOCAB_SIZE)
    assert ddtree.load(tiny_model("llama"), own).drafter is own


def test_something_that_is_no_drafter_is_refused() -> None:
    model = tiny_model("llama")
    refusal(OptionError, lambda: ddtree.load(model, model), "drafter", "LlamaForCausalLM")


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"dtype": "float16"}], ids=str)
def test_a_loaded_model_is_not_moved_or_converted(options: dict[str, str]) -> None:
    refusal(OptionError, lambda: load_target(tiny_model("llama"), **options), "device, dtype")


@pytest.fixture
def without_a_mask() -> Iterator[torch.nn.Module]:
    model = tiny_model("llama")
    model.config._attn_implementation = "flash_attention_2"
    yield model
    model.config._attn_implementation = "sdpa"


def test_a_loaded_model_whose_attention_has_no_tree_mask_is_refused(
    without_a_mask: torch.nn.Module,
) -> None:
    refusal(BackendError, lambda: load_target(without_a_mask), "flash_attention_2", "sdpa")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"device": "tpu"}, "'tpu'"),
        ({"device": ""}, "''"),
        ({"dtype": "float64"}, "'float64'"),
        ({"dtype": "int8"}, "'int8'"),
    ],
    ids=str,
)
def test_a_device_or_dtype_that_is_not_here_is_named(
    options: dict[str, str], named: str, written: Path
) -> None:
    refusal(OptionError, lambda: load_target(written, **options), named)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_dtype_asked_for_is_the_dtype_loaded(dtype: str, written: Path) -> None:
    assert load_target(written, dtype=dtype).dtype == getattr(torch, dtype)


@pytest.mark.skipif(not kernels.PAIRS_AVAILABLE, reason="no bfloat16 products here")
def test_a_mixed_target_is_float32_but_for_the_products_of_its_layers_and_its_drafter(
    written: Path, tmp_path: Path
) -> None:
    target = load_target(written, dtype="mixed")
    drafter = load_drafter(write_drafter(tmp_path / "drafter", **MASK_AND_TAPS), target)
    assert (target.dtype, target.products) == (torch.float32, torch.bfloat16)
    assert target.dtype_name == "mixed"
    assert isinstance(drafter, DFlashDrafter)
    for model in (target.model, drafter.network):
        kinds = {type(m) for m in model.modules() if isinstance(m, PackedLinear | torch.nn.Linear)}
        assert kinds == {PairLinear}


def test_a_mixed_target_that_is_not_packed_is_plain_float32_on_any_machine(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "PAIRS_AVAILABLE", False)
    target = load_target(written, dtype="mixed", packed=False)
    assert (target.products, target.dtype_name) == (torch.float32, "torch.float32")


def test_mixed_is_refused_where_nothing_multiplies_bfloat16(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "PAIRS_AVAILABLE", False)
    refusal(OptionError, lambda: load_target(written, dtype="mixed"), "dtype", "AVX512-BF16")


def test_auto_is_float32_on_a_cpu_whatever_the_checkpoint_declares(folder: Path) -> None:
    edit_json(folder / "config.json", dtype="bfloat16")
    assert load_target(folder, device="cpu").dtype == torch.float32


def test_all_stop_tokens_of_the_checkpoint_are_known(folder: Path) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=[7, 9])
    assert load_target(folder).eos_token_ids == {7, 9}
    edit_json(folder / "generation_config.json", eos_token_id=4)
    assert load_target(folder).eos_token_ids == {4}


def test_the_index_of_the_shards_does_not_have_to_be_there(tmp_path: Path, target: Target) -> None:
    folder = write_drafter(tmp_path, sharded=True)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(index["weight_map"]) == 25
    (folder / "model.safetensors.index.json").unlink()
    assert isinstance(load_drafter(folder, target), DFlashDrafter)


def test_a_broken_generation_config_is_an_error_since_stop_tokens_would_be_lost(
    tmp_path: Path,
) -> None:
    folder = write_target(tmp_path)
    (folder / "generation_config.json").write_text("{")
    refusal(CheckpointError, lambda: load_target(folder), "generation_config.json")
