"""Medusa heads say what the published formula says, and files that are not theirs are refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ddtree.errors import (
    CheckpointError,
    PairMismatchError,
    UnsupportedModelError,
    UserError,
)
from ddtree.models.loading import describe_drafter, load_drafter
from ddtree.models.medusa import MedusaDrafter, MedusaSession
from ddtree.models.target import Target
from ddtree.prefill import prefill
from ddtree.provenance import drafter_digest
from ddtree.types import Marginals
from tests.support.checkpoints import Tensors
from tests.support.models import (
    ARCHITECTURES,
    HIDDEN_SIZE,
    VOCAB_SIZE,
    tiny_model,
    tiny_target,
)
from tests.support.sources import NUM_HEADS, medusa_tensors, write_medusa

PROMPT = [5, 17, 42, 8, 23, 11, 2, 40]
LAYOUTS = [
    {},
    {"num_layers": 2},
    {"linears": False},
    {"num_heads": 1},
]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama")


def by_token(marginals: Marginals) -> Tensor:
    """The log-probs of all tokens, [L, V] by token id."""
    everything = torch.full((marginals.num_depths, VOCAB_SIZE), -torch.inf)
    return everything.scatter(1, marginals.token_ids, marginals.log_probs)


@torch.inference_mode()
def proposed(drafter: MedusaDrafter, prompt: list[int], num_depths: int = 0) -> Tensor:
    session = prefill(drafter.target, drafter, prompt, 16).context.session
    marginals = session.propose(
        9, num_depths=num_depths or drafter.num_depths, num_ranks=VOCAB_SIZE
    )
    return by_token(marginals)


@torch.inference_mode()
def by_formula(tensors: Tensors, num_layers: int, prompt: list[int]) -> Tensor:
    """Each head on what the target's head reads at the last position of the prompt."""
    model = tiny_model("llama")
    hidden = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0, -1]
    rows = []
    for head in range(len({name.split(".")[0] for name in tensors})):
        x = hidden
        for layer in range(num_layers):
            name = f"{head}.{layer}.linear"
            x = x + functional.silu(tensors[f"{name}.weight"] @ x + tensors[f"{name}.bias"])
        rows.append(tensors.get(f"{head}.{num_layers}.weight", model.lm_head.weight) @ x)
    return torch.stack(rows).log_softmax(-1)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("pickled", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_head_predicts_the_next_position_by_the_published_formula(
    layout: dict, pickled: bool, packed: bool, target: Target, tmp_path: Path
) -> None:
    tensors = medusa_tensors(**layout)
    num_layers, num_heads = layout.get("num_layers", 1), layout.get("num_heads", NUM_HEADS)
    folder = write_medusa(
        tmp_path / "heads",
        tensors=tensors,
        pickled=pickled,
        medusa_num_layers=num_layers,
        medusa_num_heads=min(2, num_heads),
    )
    drafter = load_drafter(folder, target, packed=packed)
    assert drafter.num_depths == num_heads
    expected = by_formula(tensors, num_layers, PROMPT)
    torch.testing.assert_close(proposed(drafter, PROMPT), expected, atol=1e-4, rtol=1e-4)


def test_heads_that_were_never_trained_say_again_what_the_target_says(
    target: Target, tmp_path: Path
) -> None:
    """Training starts from blocks of zeros and copies of the target's head."""
    tensors = medusa_tensors()
    for name, tensor in tensors.items():
        copy = tiny_model("llama").lm_head.weight.detach() if ".1." in name else 0 * tensor
        tensors[name] = copy.clone()
    drafter = load_drafter(write_medusa(tmp_path / "heads", tensors=tensors), target)
    with torch.inference_mode():
        root = prefill(target, None, PROMPT, 16).logits.log_softmax(-1)
    expected = root.expand(NUM_HEADS, -1)
    torch.testing.assert_close(proposed(drafter, PROMPT), expected, atol=1e-4, rtol=1e-4)


def test_fewer_depths_are_the_first_ones(target: Target, tmp_path: Path) -> None:
    drafter = load_drafter(write_medusa(tmp_path / "heads"), target)
    assert proposed(drafter, PROMPT, 2).equal(proposed(drafter, PROMPT)[:2])


def test_requests_know_nothing_of_each_other(target: Target, tmp_path: Path) -> None:
    drafter = load_drafter(write_medusa(tmp_path / "heads"), target)
    alone = proposed(drafter, PROMPT)
    with torch.inference_mode():
        one = prefill(target, drafter, PROMPT, 16).context.session
        other = prefill(target, drafter, PROMPT[::-1], 16).context.session
        options = {"num_depths": NUM_HEADS, "num_ranks": VOCAB_SIZE}
        assert not by_token(other.propose(9, **options)).equal(alone)
        assert by_token(one.propose(9, **options)).equal(alone)
        assert by_token(one.propose(9, **options)).equal(alone)


def test_a_session_holds_one_row_however_long_the_prompt(target: Target, tmp_path: Path) -> None:
    drafter = load_drafter(write_medusa(tmp_path / "heads"), target)
    with torch.inference_mode():
        session = prefill(target, drafter, PROMPT * 9, 16).context.session
    assert isinstance(session, MedusaSession)
    assert session.length == 9 * len(PROMPT)
    assert session._hidden is not None
    assert session._hidden.untyped_storage().nbytes() == 4 * HIDDEN_SIZE


def test_the_heads_are_told_by_their_weights_packed_or_plain(
    target: Target, tmp_path: Path
) -> None:
    folder = write_medusa(tmp_path / "heads")
    digests = {drafter_digest(load_drafter(folder, target, packed=p)) for p in (True, False)}
    assert len(digests) == 1
    other = write_medusa(tmp_path / "other", tensors=medusa_tensors(seed=1))
    assert drafter_digest(load_drafter(other, target)) not in digests


def test_half_precision_is_the_targets(tmp_path: Path) -> None:
    half = Target(ARCHITECTURES["llama-tied"]().to(torch.bfloat16), None, name="half")
    drafter = load_drafter(write_medusa(tmp_path / "heads"), half)
    assert {p.dtype for p in drafter.network.parameters()} == {torch.bfloat16}
    assert torch.isfinite(proposed(drafter, PROMPT)).all()


def test_what_is_loaded_is_told(target: Target, tmp_path: Path) -> None:
    told: list[str] = []
    folder = write_medusa(tmp_path / "heads")
    load_drafter(folder, target, say=told.append)
    assert told == [
        f"{folder}: 4 Medusa heads with output layers of their own, made for some/target"
    ]
    assert "2 or more Medusa heads" in describe_drafter(str(folder), target.shape)


# What is refused.


class _Trap:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("trap",)


def _cut(folder: Path, file: str) -> None:
    whole = (folder / file).read_bytes()
    (folder / file).write_bytes(whole[: len(whole) // 2])


def _replaced(content: object) -> Callable[[Path], object]:
    return lambda folder: torch.save(content, folder / "medusa_lm_head.pt")


def _config(folder: Path, **content: object) -> None:
    (folder / "config.json").write_text(json.dumps(content))


def _with(edit: Callable[[Tensors], object], **changes: object) -> Callable[[Path], object]:
    return lambda folder: write_medusa(folder, edit=edit, **changes)


BROKEN: dict[str, tuple[Callable[[Path], object], type[UserError], str]] = {
    "fewer heads than declared": (
        _with(lambda t: None, medusa_num_heads=6),
        CheckpointError,
        r"missing: 4\.0\.linear\.weight",
    ),
    "a head in the middle is gone": (
        _with(lambda t: [t.pop(name) for name in list(t) if name[0] == "1"]),
        CheckpointError,
        r"3 missing: 1\.0\.linear\.weight",
    ),
    "one linear layer is gone": (
        _with(lambda t: t.pop("2.1.weight")),
        CheckpointError,
        r"1 missing: 2\.1\.weight \[61, 32\]",
    ),
    "a bias is gone": (
        _with(lambda t: t.pop("0.0.linear.bias")),
        CheckpointError,
        r"missing: 0\.0\.linear\.bias",
    ),
    "another number of layers": (
        _with(lambda t: None, medusa_num_layers=2),
        CheckpointError,
        r"0\.1\.linear\.weight.*left over: 0\.1\.weight",
    ),
    "a tensor too many": (
        _with(lambda t: t.update({"0.1.bias": torch.zeros(61)})),
        CheckpointError,
        r"left over: 0\.1\.bias",
    ),
    "a wild index": (
        _with(lambda t: t.update({"99999999999.0.linear.bias": torch.zeros(32)})),
        CheckpointError,
        r"left over: 99999999999\.0\.linear\.bias",
    ),
    "another hidden size": (
        _with(lambda t: t.update({"1.0.linear.bias": torch.zeros(31)})),
        CheckpointError,
        r"misshapen: 1\.0\.linear\.bias \[31\] instead of \[32\]",
    ),
    "another vocabulary": (
        _with(lambda t: t.update({"3.1.weight": torch.zeros(60, 32)})),
        CheckpointError,
        r"misshapen: 3\.1\.weight",
    ),
    "quantised": (
        _with(lambda t: t.update({"3.1.weight": torch.zeros(61, 32, dtype=torch.int8)})),
        CheckpointError,
        r"quantised: 3\.1\.weight",
    ),
    "not finite": (
        _with(lambda t: t["0.0.linear.weight"].fill_(torch.nan)),
        CheckpointError,
        r"0\.0\.linear\.weight: expected finite",
    ),
    "no weights": (
        lambda folder: (folder / "medusa_lm_head.safetensors").unlink(),
        CheckpointError,
        r"medusa_lm_head\.safetensors or medusa_lm_head\.pt",
    ),
    "cut short": (
        lambda folder: _cut(folder, "medusa_lm_head.safetensors"),
        CheckpointError,
        r"medusa_lm_head\.safetensors: expected a readable",
    ),
    "no number of heads": (
        lambda folder: write_medusa(folder, medusa_num_heads="2"),
        CheckpointError,
        r"config\.json: medusa_num_heads: .*'2'",
    ),
    "no heads": (
        lambda folder: write_medusa(folder, medusa_num_heads=0),
        CheckpointError,
        r"medusa_num_heads: .*got 0",
    ),
    "layers below zero": (
        lambda folder: write_medusa(folder, medusa_num_layers=-1),
        CheckpointError,
        r"medusa_num_layers: .*got -1",
    ),
    "declared for a wider target": (
        lambda folder: write_medusa(folder, hidden_size=4096),
        PairMismatchError,
        r"hidden_size: expected 32 .* got 4096",
    ),
    "vLLM's layout": (
        lambda folder: _config(folder, model_type="medusa", num_heads=3),
        UnsupportedModelError,
        r"vLLM's layout of Medusa heads",
    ),
}
BROKEN_PICKLES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut short": (lambda folder: _cut(folder, "medusa_lm_head.pt"), r"may be truncated"),
    "empty": (lambda folder: (folder / "medusa_lm_head.pt").write_bytes(b""), r"may be truncated"),
    "no tensors": (_replaced([1, 2]), r"got list"),
    "something else among them": (_replaced({"0.0.linear.weight": 3}), r"tensors by name"),
    "code": (_replaced({"0.0.linear.weight": _Trap()}), r"never loaded"),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("how", BROKEN)
def test_broken_heads_are_refused_by_name(how: str, target: Target, tmp_path: Path) -> None:
    folder = write_medusa(tmp_path / "heads")
    load_drafter(folder, target)
    damage, kind, named = BROKEN[how]
    damage(folder)
    with pytest.raises(kind, match=named):
        load_drafter(folder, target)


@pytest.mark.parametrize("how", BROKEN_PICKLES)
def test_a_pickled_file_is_read_for_tensors_alone(
    how: str, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_medusa(tmp_path / "heads", pickled=True)
    load_drafter(folder, target)
    damage, named = BROKEN_PICKLES[how]
    damage(folder)
    with pytest.raises(CheckpointError, match=named):
        load_drafter(folder, target)
    assert not (tmp_path / "trap").exists()
