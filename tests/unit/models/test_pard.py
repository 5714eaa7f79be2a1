"""A PARD model with its cache says what the whole sequence says without one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from ddtree.errors import CheckpointError, PairMismatchError, UnsupportedModelError, UserError
from ddtree.models import pard
from ddtree.models.loading import describe_drafter, load_drafter
from ddtree.models.pard import PardDrafter, PardSession
from ddtree.models.target import Target
from ddtree.prefill import prefill
from ddtree.provenance import drafter_digest
from ddtree.types import Marginals
from tests.support.checkpoints import edit_json
from tests.support.models import ARCHITECTURES, VOCAB_SIZE, tiny_model, tiny_target
from tests.support.sources import MASK, PARD_MODELS, write_pard
from tests.support.tokenizers import tiny_tokenizer

TEXT = [5, 17, 42, 8, 23, 11, 2, 40, 33, 21, 9, 30]
NUM_DEPTHS = 12


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama"), tiny_tokenizer(), name="tiny")


def by_token(marginals: Marginals, vocab_size: int = VOCAB_SIZE) -> Tensor:
    """The log-probs of all tokens, [L, V] by token id."""
    everything = torch.full((marginals.num_depths, vocab_size), -torch.inf)
    return everything.scatter(1, marginals.token_ids, marginals.log_probs)


@torch.inference_mode()
def feed(session: PardSession, token_ids: list[int]) -> None:
    session.extend(torch.empty(len(token_ids), 0), torch.tensor(token_ids))


@torch.inference_mode()
def proposed(session: PardSession, root_id: int, num_depths: int = NUM_DEPTHS) -> Tensor:
    return by_token(session.propose(root_id, num_depths=num_depths, num_ranks=VOCAB_SIZE))


@torch.inference_mode()
def without_cache(folder: Path, text: list[int], num_depths: int = NUM_DEPTHS) -> Tensor:
    """The library's own model over the text, whose last token is the root, and the masks."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([[*text, *[MASK] * (num_depths - 1)]])
    return model(ids, use_cache=False).logits[0, -num_depths:].log_softmax(-1)


def assert_close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("architecture", PARD_MODELS)
def test_every_round_says_what_the_whole_text_says(
    architecture: str, packed: bool, target: Target, tmp_path: Path
) -> None:
    folder = write_pard(tmp_path / "pard", architecture)
    session = load_drafter(folder, target, packed=packed).start(4)
    known = 0
    for length in (6, 7, 8, 11):
        feed(session, TEXT[known:length])
        known = length
        for depths in (NUM_DEPTHS, 3):  # a second proposal must not notice the first
            got = proposed(session, TEXT[length], depths)
            assert_close(got, without_cache(folder, TEXT[: length + 1], depths))
        assert session.length == length


def test_tokens_wait_until_something_is_drafted(target: Target, tmp_path: Path) -> None:
    folder = write_pard(tmp_path / "pard")
    session = load_drafter(folder, target).start(4)
    for token in TEXT[:-1]:
        feed(session, [token])
    assert session._cache.length == 0
    assert session.length == len(TEXT) - 1
    assert_close(proposed(session, TEXT[-1]), without_cache(folder, TEXT))
    assert session._cache.length == len(TEXT) - 1


@pytest.mark.parametrize("chunk", [1, 4, 11, 12])
def test_a_long_prompt_goes_in_chunks(
    chunk: int, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pard, "_CHUNK_TOKENS", chunk)
    folder = write_pard(tmp_path / "pard")
    session = load_drafter(folder, target).start(4)
    feed(session, TEXT[:-1])
    assert_close(proposed(session, TEXT[-1]), without_cache(folder, TEXT))


def test_requests_know_nothing_of_each_other(target: Target, tmp_path: Path) -> None:
    folder = write_pard(tmp_path / "pard")
    drafter = load_drafter(folder, target)
    one, other = drafter.start(4), drafter.start(4)
    feed(one, TEXT[:4])
    feed(other, TEXT[::-1])
    proposed(other, 3)
    feed(one, TEXT[4:-1])
    proposed(other, 4)
    assert_close(proposed(one, TEXT[-1]), without_cache(folder, TEXT))


def test_the_target_is_asked_for_no_features(target: Target, tmp_path: Path) -> None:
    drafter = load_drafter(write_pard(tmp_path / "pard"), target)
    assert drafter.layer_ids == ()
    assert drafter.num_depths == NUM_DEPTHS
    with torch.inference_mode():
        ids = torch.tensor(TEXT)
        output = target.prefill(ids, target.new_cache(16), capture=drafter.layer_ids)
        session = prefill(target, drafter, TEXT, 16).context.session
    assert output.features.shape == (len(TEXT), 0)
    assert session.length == len(TEXT)


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE - 6, VOCAB_SIZE + 6])
def test_a_family_may_round_its_vocabulary_up_differently(
    vocab_size: int, target: Target, tmp_path: Path
) -> None:
    folder = write_pard(tmp_path / "pard", vocab_size=vocab_size)
    both = min(vocab_size, VOCAB_SIZE)
    drafter = load_drafter(folder, target)
    session = drafter.start(4)
    feed(session, TEXT[:-1])
    marginals = session.propose(TEXT[-1], num_depths=NUM_DEPTHS, num_ranks=VOCAB_SIZE)
    assert marginals.num_ranks == both
    logits = without_cache(folder, TEXT)[:, :both]
    assert_close(by_token(marginals)[:, :both], logits.log_softmax(-1))


def test_a_token_of_the_targets_padding_is_read_as_a_mask(target: Target, tmp_path: Path) -> None:
    folder = write_pard(tmp_path / "pard", vocab_size=VOCAB_SIZE - 6)
    session = load_drafter(folder, target).start(4)
    feed(session, [*TEXT, VOCAB_SIZE - 1])
    expected = without_cache(folder, [*TEXT, MASK, MASK])[:, : VOCAB_SIZE - 6]
    assert_close(proposed(session, VOCAB_SIZE - 2)[:, : VOCAB_SIZE - 6], expected)


def test_coupling_is_told_which_tokens_the_columns_are(target: Target, tmp_path: Path) -> None:
    told: list[Tensor | None] = []

    class Turned:
        def __call__(self, logits: Tensor, token_ids: Tensor | None) -> Tensor:
            told.append(token_ids)
            return -logits

        def weigh(self, changes: Tensor) -> Tensor:
            return -changes

        def keep(self, changes_behind: object) -> None:
            pass

    for place, size in (("same", VOCAB_SIZE), ("fewer", VOCAB_SIZE - 6)):
        drafter = load_drafter(write_pard(tmp_path / place, vocab_size=size), target)
        session = drafter.start(4)
        feed(session, TEXT[:-1])
        options = {"num_depths": 2, "num_ranks": VOCAB_SIZE}
        with torch.inference_mode():
            plain = session.propose(3, **options)
            turned = session.propose(3, **options, perturb=Turned())
        assert turned.token_ids[:, 0].equal(plain.token_ids[:, -1])
    same, fewer = told
    assert same is None
    assert fewer is not None
    assert fewer.tolist() == list(range(VOCAB_SIZE - 6))


def test_it_is_told_by_its_weights_packed_or_plain(target: Target, tmp_path: Path) -> None:
    folder = write_pard(tmp_path / "pard", "qwen3-tied")
    digests = {drafter_digest(load_drafter(folder, target, packed=p)) for p in (True, False)}
    assert len(digests) == 1


def test_the_dtype_is_the_targets(tmp_path: Path) -> None:
    half = Target(ARCHITECTURES["llama"]().to(torch.bfloat16), None, name="half")
    drafter = load_drafter(write_pard(tmp_path / "pard"), half)
    assert drafter.model.dtype == torch.bfloat16
    session = drafter.start(4)
    feed(session, TEXT)
    assert torch.isfinite(proposed(session, 3)).all()


def test_what_is_loaded_is_told(target: Target, tmp_path: Path) -> None:
    told: list[str] = []
    folder = write_pard(tmp_path / "pard")
    load_drafter(folder, target, say=told.append)
    assert told == [f"{folder}: a PARD drafter, llama of 2 layers, 12 positions in a pass"]
    assert describe_drafter(str(folder), target.shape).endswith("vocabulary 61; fits")
    edit_json(folder / "config.json", vocab_size=64)
    assert "64 for 61: loading compares" in describe_drafter(str(folder), target.shape)


# What is refused.


def _tensors(edit: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def _config(**changes: object) -> Callable[[Path], object]:
    return lambda folder: edit_json(folder / "config.json", **changes)


def _other_tokenizer(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(content))


BROKEN: dict[str, tuple[Callable[[Path], object], type[UserError], str]] = {
    "no mask token": (
        _config(pard_token=None),
        CheckpointError,
        r"pard_token: expected a whole number from 0 to 60, got None",
    ),
    "the mask token of nobody": (_config(pard_token=-1), CheckpointError, r"pard_token.*got -1"),
    "a mask beyond the vocabulary": (
        _config(pard_token=VOCAB_SIZE),
        CheckpointError,
        r"pard_token.*got 61",
    ),
    "a mask in words": (_config(pard_token="<mask>"), CheckpointError, r"pard_token.*'<mask>'"),
    "PARD-2": (_config(spd_type="pard2"), UnsupportedModelError, r"spd_type.*'pard2'"),
    "another architecture": (
        _config(model_type="qwen3_next"),
        UnsupportedModelError,
        r"model_type.*'qwen3_next'",
    ),
    "no layers": (_config(num_hidden_layers=0), CheckpointError, r"num_hidden_layers.*got 0"),
    "a broken configuration": (
        _config(hidden_size="wide"),
        CheckpointError,
        r"drafter .*config\.json: expected the configuration of a llama model",
    ),
    "a tensor is gone": (
        _tensors(lambda t: t.pop("model.layers.1.mlp.up_proj.weight")),
        CheckpointError,
        r"drafter .*missing keys: model\.layers\.1\.mlp\.up_proj\.weight",
    ),
    "a tensor too many": (
        _tensors(lambda t: t.update({"target_proj.weight": torch.zeros(2)})),
        CheckpointError,
        r"drafter .*unexpected keys: target_proj\.weight",
    ),
    "misshapen": (
        _tensors(lambda t: t.update({"model.norm.weight": torch.zeros(2)})),
        CheckpointError,
        r"drafter .*model\.norm\.weight",
    ),
    "not finite": (
        _tensors(lambda t: t["model.norm.weight"].fill_(torch.inf)),
        CheckpointError,
        r"model\.norm\.weight: expected finite",
    ),
    "cut short": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"abc"),
        CheckpointError,
        r"drafter .*readable weights",
    ),
    "other tokens": (
        _other_tokenizer,
        PairMismatchError,
        r"tokenizer: expected the tokens of target tiny, got 'b' as token 3, which is 'a' there, "
        r"and 1 more",
    ),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("how", BROKEN)
def test_broken_models_are_refused_by_name(how: str, target: Target, tmp_path: Path) -> None:
    folder = write_pard(tmp_path / "pard")
    load_drafter(folder, target)
    damage, kind, named = BROKEN[how]
    damage(folder)
    with pytest.raises(kind, match=named):
        load_drafter(folder, target)


def test_without_tokenizers_the_sizes_must_be_equal(tmp_path: Path) -> None:
    bare = tiny_target("llama")
    load_drafter(write_pard(tmp_path / "same", tokenizer=False), bare)
    other = write_pard(tmp_path / "other", vocab_size=VOCAB_SIZE + 3)
    with pytest.raises(PairMismatchError, match=r"vocab_size: expected 61 .* got 64"):
        load_drafter(other, bare)


def test_a_speculators_folder_with_a_mask_token_is_not_taken_for_pard(
    target: Target, tmp_path: Path
) -> None:
    folder = write_pard(tmp_path / "peagle", speculators_model_type="peagle", spd_type=None)
    with pytest.raises(UserError, match="peagle"):
        load_drafter(folder, target)


def test_a_pard_drafter_can_be_bound_to_two_targets(tmp_path: Path) -> None:
    """It knows none of them, so a family shares one folder."""
    folder = write_pard(tmp_path / "pard", tokenizer=False)
    marginals = []
    for architecture in ("llama", "qwen3"):
        drafter = load_drafter(folder, tiny_target(architecture))
        assert isinstance(drafter, PardDrafter)
        session = drafter.start(4)
        feed(session, TEXT)
        marginals.append(proposed(session, 3))
    assert marginals[0].equal(marginals[1])
