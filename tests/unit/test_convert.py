"""Conversion: there and back again bit for bit, with the target's two tensors and no model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ddtree.cli.app import main
from ddtree.convert import Conversion, convert
from ddtree.errors import (
    CacheWriteError,
    CheckpointError,
    ModelNotFoundError,
    OptionError,
    PairMismatchError,
    UnsupportedModelError,
)
from ddtree.models import zoo
from ddtree.models.drafter import DFlashDrafter
from ddtree.models.loading import load_drafter, load_target
from tests.support.checkpoints import (
    drafter_config,
    edit_json,
    speculators_tensors,
    write_drafter,
    write_speculators,
    write_target,
)
from tests.support.drafters import feed
from tests.support.models import HIDDEN_SIZE, VOCAB_SIZE, tiny_model

THIRD = list(range(1, VOCAB_SIZE, 3))
FULL, SLIDING = "full_attention", "sliding_attention"

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("targets")
    return {a: write_target(root / a, a, tokenizer=False) for a in ("llama", "llama-tied")}


@pytest.fixture
def llama(targets: dict[str, Path]) -> str:
    return str(targets["llama"])


def there(source: Path, out: Path, target: str | None) -> Conversion:
    return convert(source, to="speculators", out=out, target=target)


def back(source: Path, out: Path, target: str | None = None) -> Conversion:
    return convert(source, to="z-lab", out=out, target=target)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        other[key].dtype == tensor.dtype and other[key].equal(tensor) for key, tensor in one.items()
    )


@torch.inference_mode()
def proposed(drafter: DFlashDrafter) -> tuple[torch.Tensor, torch.Tensor]:
    session = drafter.start(16)
    feed(session, torch.randn(12, 2 * HIDDEN_SIZE, generator=torch.Generator().manual_seed(1)))
    marginals = session.propose(7, num_depths=drafter.num_depths, num_ranks=VOCAB_SIZE)
    return marginals.token_ids, marginals.log_probs


# There and back.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("token_ids", [None, THIRD], ids=["whole", "reduced"])
@pytest.mark.parametrize("architecture", ["llama", "llama-tied"])
def test_there_and_back_the_tensors_are_the_same_bits_and_the_marginals_the_same_numbers(
    architecture: str,
    token_ids: list[int] | None,
    dtype: torch.dtype,
    targets: dict[str, Path],
    tmp_path: Path,
) -> None:
    def cast(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({key: tensor.to(dtype) for key, tensor in tensors.items()})

    source = write_drafter(tmp_path / "source", draft_token_ids=token_ids, edit=cast)
    name = str(targets[architecture])
    one, two = tmp_path / "speculators", tmp_path / "z-lab"
    done = there(source, one, name)
    assert (done.source_format, done.format, done.target) == ("z-lab", "speculators", name)
    assert done.num_tensors == len(weights(source)) + (2 if token_ids is None else 4)
    assert back(one, two).target == name  # as the checkpoint says itself
    assert same(weights(source), weights(two))
    target = load_target(name, device="cpu")
    drafts = [proposed(load_drafter(folder, target)) for folder in (source, one, two)]
    for token_ids_, log_probs in drafts[1:]:
        assert token_ids_.equal(drafts[0][0])
        assert log_probs.equal(drafts[0][1])
    configs = [load_drafter(folder, target).config for folder in (source, two)]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("token_ids", [None, THIRD], ids=["whole", "reduced"])
def test_the_tensors_are_those_of_the_published_format(
    token_ids: list[int] | None, llama: str, tmp_path: Path
) -> None:
    there(write_drafter(tmp_path / "a", draft_token_ids=token_ids), tmp_path / "b", llama)
    written = weights(tmp_path / "b")
    assert same(speculators_tensors("llama", token_ids), written)
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["speculators_model_type"] == "dflash"
    assert config["aux_hidden_state_layer_ids"] == [1, 3]
    assert config["draft_vocab_size"] == len(token_ids or range(VOCAB_SIZE))
    assert config["transformer_layer_config"]["vocab_size"] == VOCAB_SIZE
    verifier = {"name_or_path": llama, "architectures": ["LlamaForCausalLM"]}
    assert config["speculators_config"]["verifier"] == verifier


def test_back_and_there_again_the_tensors_are_the_same_bits(llama: str, tmp_path: Path) -> None:
    source = write_speculators(tmp_path / "a", draft_token_ids=THIRD)
    back(source, tmp_path / "b", llama)
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == [
        "config.json",
        "draft_vocabulary.json",
        "model.safetensors",
        "provenance.json",
    ]
    there(tmp_path / "b", tmp_path / "c", llama)
    assert same(weights(source), weights(tmp_path / "c"))


def test_windows_and_their_causality_survive(llama: str, tmp_path: Path) -> None:
    layers = {"layer_types": [SLIDING, FULL], "sliding_window": 5}
    for i, declared in enumerate(({}, {"is_causal": False})):
        source = write_drafter(tmp_path / f"{i}", **layers, **declared)
        there(source, tmp_path / f"{i}-there", llama)
        back(tmp_path / f"{i}-there", tmp_path / f"{i}-back")
        target = load_target(llama, device="cpu")
        pair = [load_drafter(f, target).config for f in (source, tmp_path / f"{i}-back")]
        assert pair[0] == pair[1]
        assert pair[0].causal == (not declared, False)


def test_a_drafter_without_copies_is_converted_without_a_target(tmp_path: Path) -> None:
    def newer(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["embed_tokens.weight"], tensors["lm_head.weight"]

    done = back(write_speculators(tmp_path / "a", edit=newer), tmp_path / "b")
    assert done.target is None
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert "num_target_layers" not in json.loads((tmp_path / "b" / "config.json").read_text())


def test_of_the_target_two_tensors_are_enough(llama: str, tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", tokenizer=False)
    whole = weights(target)
    two = {key: whole[key] for key in ("model.embed_tokens.weight", "lm_head.weight")}
    save_file(two, target / "model.safetensors")
    source = write_drafter(tmp_path / "source")
    there(source, tmp_path / "a", str(target))
    there(source, tmp_path / "b", llama)
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))


def test_the_target_of_the_embedded_drafter_is_known(
    llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_drafter(tmp_path / "source")
    monkeypatch.setattr(zoo, "drafter_folder", lambda alias: source)
    monkeypatch.setattr(zoo, "target_folder", lambda alias, say=None: Path(llama))
    done = convert("smollm2-135m", to="speculators", out=tmp_path / "out")
    assert done.target == "smollm2-135m"


# An embedding and a head of its own.


def retrain(*keys: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for key in keys:
            tensors[key][3] += 0.01

    return edit


EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("token_ids", [None, THIRD], ids=["whole", "reduced"])
def test_written_anew_a_drafter_keeps_what_is_its_own(
    token_ids: list[int] | None, llama: str, tmp_path: Path
) -> None:
    source = write_speculators(
        tmp_path / "a",
        draft_token_ids=token_ids,
        edit=retrain(EMBEDDING, HEAD),
        sample_from_anchor=True,
    )
    done = there(source, tmp_path / "b", llama)
    assert (done.source_format, done.format) == ("speculators", "speculators")
    assert same(weights(source), weights(tmp_path / "b"))
    target = load_target(llama, device="cpu")
    drafters = [load_drafter(folder, target) for folder in (source, tmp_path / "b")]
    assert drafters[1].config == drafters[0].config
    assert drafters[1].num_depths == 8
    (ids, log_probs), (ids_again, log_probs_again) = map(proposed, drafters)
    assert ids.equal(ids_again)
    assert log_probs.equal(log_probs_again)
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    (method,) = config["speculators_config"]["proposal_methods"]
    assert (config["sample_from_anchor"], method["speculative_tokens"]) == (True, 8)


def test_written_anew_a_drafter_has_what_a_file_of_today_has(llama: str, tmp_path: Path) -> None:
    def other_ages(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[EMBEDDING]
        tensors["verifier_norm.weight"] = torch.ones(HIDDEN_SIZE)
        tensors["verifier_lm_head.weight"] = torch.zeros(VOCAB_SIZE, HIDDEN_SIZE)

    plain = write_speculators(tmp_path / "a", draft_token_ids=THIRD)
    source = write_speculators(tmp_path / "b", draft_token_ids=THIRD, edit=other_ages)
    there(source, tmp_path / "c", llama)
    assert same(weights(plain), weights(tmp_path / "c"))


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (retrain(HEAD), r"lm_head.weight: .*1 of 20 rows.*token 10,"),
        (retrain(EMBEDDING), r"embed_tokens.weight: .*1 of 61 rows.*token 3,"),
        (retrain(EMBEDDING, HEAD), r"embed_tokens.weight: .*stay with speculators' format"),
    ],
)
def test_z_labs_format_has_no_place_for_what_is_its_own(
    edit: Callable[[dict[str, torch.Tensor]], None], named: str, llama: str, tmp_path: Path
) -> None:
    source = write_speculators(tmp_path / "a", draft_token_ids=THIRD, edit=edit)
    with pytest.raises(UnsupportedModelError, match=named):
        back(source, tmp_path / "out", llama)
    assert not (tmp_path / "out").exists()


def test_z_labs_format_has_no_word_for_sampling_from_the_anchor(llama: str, tmp_path: Path) -> None:
    source = write_speculators(tmp_path / "a", sample_from_anchor=True)
    with pytest.raises(OptionError, match=r"config.sample_from_anchor: expected False, got True"):
        back(source, tmp_path / "out", llama)
    assert not (tmp_path / "out").exists()


# Where it comes from, and where it goes.


def test_the_provenance_says_what_was_done_and_keeps_what_was_said_before(
    llama: str, tmp_path: Path
) -> None:
    source = write_drafter(tmp_path / "source")
    (source / "provenance.json").write_text(json.dumps({"seed": 3}))
    there(source, tmp_path / "out", llama)
    told = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert told["before"] == {"seed": 3}
    done = told["conversion"]
    assert (done["source"], done["from"], done["to"]) == (str(source), "z-lab", "speculators")
    assert done["target"] == llama
    assert list(done["weights_sha256"]) == ["model.safetensors"]
    assert {"command", "versions", "date"} <= done.keys()


def test_an_earlier_conversion_is_replaced_and_nothing_else(llama: str, tmp_path: Path) -> None:
    source = write_drafter(tmp_path / "source")
    there(source, tmp_path / "out", llama)
    other = write_drafter(tmp_path / "other", draft_token_ids=THIRD)
    there(other, tmp_path / "out", llama)
    assert "d2t" in weights(tmp_path / "out")
    (tmp_path / "empty").mkdir()
    there(source, tmp_path / "empty", llama)
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(OptionError, match=r"notes\.txt"):
        there(source, tmp_path / "out", llama)


def test_a_folder_or_file_that_is_something_else_is_left_as_it_is(
    llama: str, tmp_path: Path
) -> None:
    source = write_drafter(tmp_path / "source")
    trained = write_drafter(tmp_path / "trained")
    (trained / "provenance.json").write_text("{}")
    (tmp_path / "file").write_text("mine")
    for out in (source, trained, Path(llama), tmp_path / "file"):
        before = out.read_bytes() if out.is_file() else weights(out)
        with pytest.raises(OptionError, match="--out: expected a new or empty folder") as caught:
            there(source, out, llama)
        assert str(out) in str(caught.value)
        after = out.read_bytes() if out.is_file() else weights(out)
        assert before == after if out.is_file() else same(before, after)


def test_a_converted_folder_is_not_converted_onto_itself(llama: str, tmp_path: Path) -> None:
    there(write_drafter(tmp_path / "source"), tmp_path / "out", llama)
    with pytest.raises(OptionError, match="which is the source"):
        back(tmp_path / "out", tmp_path / "out")
    assert "lm_head.weight" in weights(tmp_path / "out")


def test_a_failure_leaves_no_folder(
    llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    source = write_drafter(tmp_path / "source")
    monkeypatch.setattr("ddtree.models.drafter_export.save_file", full)
    with pytest.raises(CacheWriteError, match="No space left"):
        there(source, tmp_path / "new" / "out", llama)
    assert list((tmp_path / "new").iterdir()) == []


# What cannot be converted.


def test_an_unknown_format_and_the_same_format_are_named(llama: str, tmp_path: Path) -> None:
    source = write_drafter(tmp_path / "source")
    with pytest.raises(OptionError, match="--to: expected z-lab or speculators, got 'gguf'"):
        convert(source, to="gguf", out=tmp_path / "out", target=llama)
    with pytest.raises(OptionError, match="in this format already"):
        back(source, tmp_path / "out", llama)


def test_a_missing_target_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"--target: expected the target of .*got none"):
        there(write_drafter(tmp_path / "a"), tmp_path / "out", None)
    with pytest.raises(OptionError, match=r"--target: .*'/somewhere/else', .* cannot be had"):
        back(write_speculators(tmp_path / "b"), tmp_path / "out")
    with pytest.raises(ModelNotFoundError, match="'/nowhere'"):
        there(tmp_path / "a", tmp_path / "out", "/nowhere")


def lack_the_head(target: Path) -> None:
    tensors = weights(target)
    del tensors["lm_head.weight"]
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def quantise_the_embedding(target: Path) -> None:
    tensors = weights(target)
    key = "model.embed_tokens.weight"
    tensors[key] = tensors[key].to(torch.int8)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def truncate(target: Path) -> None:
    file = target / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lack_the_head, "lm_head.weight: expected a tensor [61, 32] of floating"),
        (quantise_the_embedding, "model.embed_tokens.weight: expected a tensor [61, 32]"),
        (truncate, "a readable safetensors file"),
    ],
)
def test_a_broken_target_is_named(
    damage: Callable[[Path], None], named: str, tmp_path: Path
) -> None:
    target = write_target(tmp_path / "target", tokenizer=False)
    damage(target)
    with pytest.raises(CheckpointError) as caught:
        there(write_drafter(tmp_path / "a"), tmp_path / "out", str(target))
    assert named in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_target_that_does_not_fit_is_named(llama: str, tmp_path: Path) -> None:
    source = write_drafter(tmp_path / "a", num_target_layers=9)
    with pytest.raises(PairMismatchError, match="num_target_layers: expected 4"):
        there(source, tmp_path / "out", llama)


def test_what_speculators_has_no_words_for_stays_in_z_labs_format(
    llama: str, tmp_path: Path
) -> None:
    source = write_drafter(tmp_path / "a", output_multiplier=0.5)
    with pytest.raises(OptionError, match=r"output_multiplier: expected 1\.0, got 0\.5"):
        there(source, tmp_path / "out", llama)
    assert not (tmp_path / "out").exists()


def test_a_size_that_only_the_target_knows_is_filled_in(llama: str, tmp_path: Path) -> None:
    source = write_drafter(tmp_path / "a", vocab_size=None, num_target_layers=None)
    there(source, tmp_path / "b", llama)
    back(tmp_path / "b", tmp_path / "c")
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    expected = drafter_config()
    assert config["vocab_size"] == expected["vocab_size"]
    assert config["num_target_layers"] == tiny_model("llama").config.num_hidden_layers


# The command line.


def test_the_command_prints_the_folder_and_says_the_rest(
    llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_drafter(tmp_path / "a", draft_token_ids=THIRD), tmp_path / "out"

    def run(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr("sys.argv", ["ddtree", "convert", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0, *capsys.readouterr()

    options = ("--to", "speculators", "--out", str(out))
    code, printed, said = run(str(source), *options, "--target", llama)
    assert (code, printed) == (0, f"{out}\n")
    assert "from z-lab to speculators, 29 tensors, 20 tokens that it can propose" in said
    code, printed, said = run(str(source), *options)
    assert (code, printed) == (2, "")
    assert said.startswith("error: --target: expected the target of")
    edit_json(source / "config.json", block_size=0)
    code, printed, said = run(str(source), *options, "--target", llama)
    assert (code, printed) == (2, "")
    assert "block_size" in said
