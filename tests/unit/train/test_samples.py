"""Samples on disk: what was written is read back, and a kill or a full disk leaves whole shards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from ddtree.errors import CacheWriteError, CheckpointError
from ddtree.train import samples as module
from ddtree.train.samples import (
    Sample,
    SampleSet,
    SampleWriter,
    claim_folder,
    favourites,
    to_half,
)

DESCRIPTION = {"target": "tiny", "layer_ids": [0, 2]}


def sample(index: int, num_response_tokens: int = 3) -> Sample:
    generator = torch.Generator().manual_seed(index)
    length, shape = 4 + num_response_tokens, (num_response_tokens, 2)
    return Sample(
        index=index,
        token_ids=torch.randint(50, (length,), generator=generator, dtype=torch.int32),
        num_prompt_tokens=4,
        features=torch.randn(length - 1, 6, generator=generator).half(),
        top_ids=torch.randint(50, shape, generator=generator, dtype=torch.int32),
        top_log_probs=torch.randn(shape, generator=generator).half(),
    )


def write(folder: Path, indices: list[int]) -> None:
    with SampleWriter(folder) as writer:
        for index in indices:
            writer.add(sample(index))


def assert_same(one: Sample, other: Sample) -> None:
    assert (one.index, one.num_prompt_tokens) == (other.index, other.num_prompt_tokens)
    for field in ("token_ids", "features", "top_ids", "top_log_probs"):
        assert torch.equal(getattr(one, field), getattr(other, field))
        assert getattr(one, field).dtype == getattr(other, field).dtype


def test_what_was_written_is_read_back_in_order_of_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SAMPLES_PER_SHARD", 3)
    write(tmp_path / "s", [7, 2, 9, 4, 30])
    found = SampleSet(tmp_path / "s")
    assert found.indices == [2, 4, 7, 9, 30]
    assert len(list((tmp_path / "s").glob("*"))) == 2
    for one in found:
        assert_same(one, sample(one.index))
    assert found[-1].num_response_tokens == 3
    said = {i: tuple(sample(i).token_ids[4:].tolist()) for i in found.indices}
    assert dict(found.response_ids()) == said


def test_long_samples_are_written_sooner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SHARD_BYTES", 2 * sample(0).features.nbytes)
    write(tmp_path, list(range(5)))
    assert len(list(tmp_path.glob("*"))) == 3


def test_no_folder_holds_no_samples(tmp_path: Path) -> None:
    assert len(SampleSet(tmp_path / "none")) == 0


def test_an_interruption_writes_what_is_waiting(tmp_path: Path) -> None:
    def interrupted() -> None:
        with SampleWriter(tmp_path) as writer:
            writer.add(sample(1))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert SampleSet(tmp_path).indices == [1]


def test_a_shard_that_a_kill_cut_short_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, [1])
    whole = (tmp_path / "samples-00000001.safetensors").read_bytes()
    (tmp_path / "samples-00000002.partial").write_bytes(whole[:50])
    assert SampleSet(tmp_path).indices == [1]
    write(tmp_path, [2])
    assert SampleSet(tmp_path).indices == [1, 2]


def test_a_response_that_was_answered_twice_pushes_no_shard_out(tmp_path: Path) -> None:
    for indices in ([5, 6], [5, 8], [5]):
        write(tmp_path, indices)
    assert SampleSet(tmp_path).indices == [5, 6, 8]


def test_a_broken_shard_is_named(tmp_path: Path) -> None:
    write(tmp_path, [1])
    path = tmp_path / "samples-00000001.safetensors"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(CheckpointError, match=r"samples-00000001.*expected a shard"):
        SampleSet(tmp_path)


@pytest.mark.parametrize("error", [OSError(28, "No space left"), SafetensorError("No space left")])
def test_a_full_disk_leaves_what_is_written(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, [1])

    def full(tensors: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(CacheWriteError, match=r"No space left.*Free some space"):
        write(tmp_path, [2])
    assert [path.name for path in tmp_path.glob("*")] == ["samples-00000001.safetensors"]
    monkeypatch.undo()
    write(tmp_path, [2])
    assert SampleSet(tmp_path).indices == [1, 2]


def test_a_folder_says_whose_samples_it_holds(tmp_path: Path) -> None:
    claim_folder(tmp_path / "s", DESCRIPTION)
    assert json.loads((tmp_path / "s" / "features.json").read_text()) == DESCRIPTION
    write(tmp_path / "s", [1])
    claim_folder(tmp_path / "s", DESCRIPTION)
    with pytest.raises(CheckpointError, match="other values of layer_ids"):
        claim_folder(tmp_path / "s", {**DESCRIPTION, "layer_ids": [0, 1]})


@pytest.mark.parametrize("content", ["", "[1]", '{"target": '])
def test_a_damaged_description_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "features.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"features\.json: expected a JSON object"):
        claim_folder(tmp_path, DESCRIPTION)


def test_samples_of_nobody_knows_whom_are_refused(tmp_path: Path) -> None:
    write(tmp_path, [1])
    with pytest.raises(CheckpointError, match="says whose they are"):
        claim_folder(tmp_path, DESCRIPTION)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CacheWriteError, match="expected a writable folder"):
        claim_folder(tmp_path / "file" / "samples", DESCRIPTION)
    with pytest.raises(CacheWriteError, match="expected a writable folder"):
        write(tmp_path / "file" / "samples", [1])


def test_what_half_precision_cannot_hold_is_clamped() -> None:
    assert to_half(torch.tensor([1e6, -1e6, 2.0])).tolist() == [65504.0, -65504.0, 2.0]


def test_favourites_are_the_most_probable_tokens_with_their_log_probabilities() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    ids, log_probs = favourites(logits)
    expected, order = logits.log_softmax(-1).sort(descending=True)
    assert torch.equal(ids, order[:, :16].int())
    assert torch.allclose(log_probs.float(), expected[:, :16], rtol=1e-3)
    assert favourites(logits[:, :5])[0].shape == (3, 5)
