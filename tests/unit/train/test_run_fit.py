"""Stage fit as people run it: files in, drafter out, kills survived."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

import ddtree
from ddtree.errors import (
    CacheWriteError,
    CheckpointError,
    OptionError,
    UnsupportedModelError,
    UserError,
)
from ddtree.models.loading import load_drafter
from ddtree.train import run_fit as module
from ddtree.train.fit import StepResult
from ddtree.train.fit_config import FitConfig
from ddtree.train.network import NetworkConfig
from ddtree.train.run_fit import FitJob, read_metrics, run_fit
from ddtree.train.samples import SampleWriter, claim_folder
from ddtree.train.target_source import TargetSource
from tests.support.checkpoints import (
    DFLASH2,
    Tensors,
    write_drafter,
    write_speculators,
    write_target,
)
from tests.support.disk import fill_disk
from tests.support.samples import random_samples
from tests.support.sources import write_medusa, write_pard

pytestmark = pytest.mark.usefixtures("unchecked")

LAYERS = (0, 2)
QUIET = Console(file=io.StringIO(), width=160)


@pytest.fixture
def job(tmp_path: Path) -> FitJob:
    """A training of six steps on a tiny target."""
    target = TargetSource(name=str(write_target(tmp_path / "target")))
    samples = tmp_path / "run" / "samples"
    claim_folder(samples, target.samples_description(LAYERS))
    with SampleWriter(samples) as writer:
        for sample in random_samples(target.load(), list(LAYERS), 12):
            writer.add(sample)
    return FitJob(
        target=target,
        samples=samples,
        out=tmp_path / "run" / "fit",
        network=NetworkConfig(
            block_size=4,
            num_layers=2,
            target_layer_ids=LAYERS,
            mask_token_id=60,
            draft_vocab_size=40,
        ),
        config=FitConfig(
            num_steps=6,
            sequences_per_step=2,
            anchors_per_sequence=3,
            validation_share=0.3,
            validate_every=3,
        ),
    )


def test_the_drafter_that_is_saved_drafts_for_its_target(job: FitJob) -> None:
    folder = run_fit(job, QUIET)
    target = job.target.load()
    drafter = load_drafter(folder, target)
    assert drafter.draft_token_ids is not None
    assert len(drafter.draft_token_ids) == 40
    pair = ddtree.Pair(target, drafter)
    texts = {
        method: pair.generate([5, 6, 7], budget=16, max_new_tokens=12, method=method).token_ids
        for method in ("ar", "dflash", "ddtree")
    }
    assert texts["ar"] == texts["dflash"] == texts["ddtree"]


@pytest.mark.parametrize("draft_vocab_size", [None, 40])
def test_a_transition_head_is_trained_saved_and_drafts(
    draft_vocab_size: int | None, job: FitJob
) -> None:
    network = replace(job.network, draft_vocab_size=draft_vocab_size)
    plain = run_fit(replace(job, network=network), QUIET)
    shape = replace(network, transition_rank=5)
    further = replace(job, out=job.out / "further", network=shape, start_from=str(plain))
    target = job.target.load()
    drafter = load_drafter(run_fit(further, QUIET), target)
    assert drafter.config.selector_rank == 5
    assert drafter.config.draft_vocab_size == draft_vocab_size
    pair = ddtree.Pair(target, drafter)
    texts = [
        pair.generate([5, 6, 7], budget=16, max_new_tokens=12, method=method).token_ids
        for method in ("ar", "dflash", "ddtree")
    ]
    assert texts[0] == texts[1] == texts[2]
    assert drafter.network.candidate_selector is not None
    assert any(p.any() for p in drafter.network.candidate_selector.parameters())


def test_provenance_and_metrics_say_how_it_was_made(job: FitJob) -> None:
    folder = run_fit(job, QUIET)
    provenance = json.loads((folder / "provenance.json").read_text())
    assert provenance["training"]["num_steps"] == 6
    assert provenance["training"]["samples_sha256"]
    assert provenance["metrics"]["step"] == 6
    assert {"command", "commit", "versions", "machine"} <= provenance.keys()
    metrics = read_metrics(job.out)
    assert [line["step"] for line in metrics] == [3, 6]
    assert (job.out / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_training_that_is_killed_goes_on_and_ends_the_same(
    optimizer: str, job: FitJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = replace(job, config=replace(job.config, optimizer=optimizer))
    whole = load_file(run_fit(job, QUIET) / "model.safetensors")
    killed = replace(job, out=tmp_path / "killed")
    monkeypatch.setattr(module, "_CHECKPOINT_S", 0.0)

    def kill(report: module.FitReport) -> str:
        if report.step == 3:
            raise KeyboardInterrupt
        return ""

    with monkeypatch.context() as once:
        once.setattr(module, "_line", kill)
        with pytest.raises(KeyboardInterrupt):
            run_fit(killed, QUIET)
    assert not (killed.out / "drafter").exists()
    resumed = load_file(run_fit(killed, QUIET) / "model.safetensors")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)
    assert [line["step"] for line in read_metrics(killed.out)] == [3, 6]


@pytest.mark.parametrize("name", ["metrics.jsonl", "curve.png.partial"])
def test_a_full_disk_is_named_and_the_run_goes_on_when_there_is_room(
    name: str, job: FitJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:
        fill_disk(full, name)
        with pytest.raises(CacheWriteError, match=r"No space left .* Free some space"):
            run_fit(job, QUIET)
    run_fit(job, QUIET)
    assert [line["step"] for line in read_metrics(job.out)] == [3, 6]


def test_a_torn_last_line_of_the_metrics_is_dropped(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 3}\n{"step": 6')
    assert read_metrics(tmp_path) == [{"step": 3}]
    assert metrics.read_text() == '{"step": 3}\n'


def test_tokens_are_the_labels_of_all_blocks() -> None:
    window = module._Window()
    for step, counts in enumerate(([4, 3, 2], [4, 4])):
        result = StepResult(
            step=step,
            loss=1.0,
            hits=torch.zeros(len(counts)),
            counts=torch.tensor(counts),
            num_blocks=4,
            learning_rate=0.1,
        )
        window.add(result)
    report = window.report(0.0, None)
    assert report.tokens_per_s / report.blocks_per_s == pytest.approx(17 / 8)
    assert f"{report.tokens_per_s:.0f} tokens/s" in module._line(report)


def test_other_options_are_refused_on_resume(job: FitJob) -> None:
    run_fit(job, QUIET)
    changed = replace(job, config=replace(job.config, learning_rate=1e-4))
    with pytest.raises(CheckpointError, match="other values of learning_rate"):
        run_fit(changed, QUIET)


def test_a_resume_on_a_machine_of_another_precision_is_refused(
    job: FitJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddtree.train.precision.has_bfloat16_products", lambda device: True)
    run_fit(job, QUIET)
    monkeypatch.setattr("ddtree.train.precision.has_bfloat16_products", lambda device: False)
    more = replace(job.config, num_steps=9)
    with pytest.raises(CheckpointError, match="other values of precision"):
        run_fit(replace(job, config=more), QUIET)
    run_fit(replace(job, config=replace(more, precision="bfloat16")), QUIET)
    assert read_metrics(job.out)[-1]["step"] == 9


def test_more_steps_go_on_from_the_end(job: FitJob) -> None:
    run_fit(job, QUIET)
    run_fit(replace(job, config=replace(job.config, num_steps=9)), QUIET)
    assert [line["step"] for line in read_metrics(job.out)] == [3, 6, 9]


@pytest.mark.parametrize("first_weights", ["auto", "target", "random"])
def test_first_weights_are_those_asked_for_and_named_in_the_provenance(
    job: FitJob, first_weights: str
) -> None:
    run_fit(replace(job, network=replace(job.network, first_weights=first_weights)), QUIET)
    said = json.loads((job.out / "drafter" / "provenance.json").read_text())["training"]
    last = job.target.shape().num_layers - 1
    assert said["first_layers"] == (None if first_weights == "random" else [last - 1, last])


def test_first_weights_beside_a_drafter_to_start_from_are_refused(job: FitJob) -> None:
    shape = replace(job.network, first_weights="random")
    with pytest.raises(OptionError, match="first_weights"):
        replace(job, network=shape, start_from="somewhere")


def test_a_drafter_can_start_from_another_one(job: FitJob, tmp_path: Path) -> None:
    first = run_fit(job, QUIET)
    again = replace(job, out=tmp_path / "again", start_from=str(first))
    second = run_fit(again, QUIET)
    provenance = json.loads((second / "provenance.json").read_text())
    assert provenance["training"]["start_from"] == first.name
    assert load_drafter(second, job.target.load()).draft_token_ids is not None


@pytest.mark.parametrize(
    ("key", "declared", "named"),
    [
        ("embed_tokens.weight", False, "its own embedding"),
        ("lm_head.weight", False, "its own head"),
        (None, True, "sample_from_anchor"),
    ],
)
def test_a_drafter_that_could_not_be_written_again_is_not_trained_on(
    key: str | None, declared: bool, named: str, job: FitJob, tmp_path: Path
) -> None:
    def edit(tensors: Tensors) -> None:
        if key is not None:
            tensors[key] += 1

    first = write_speculators(tmp_path / "first", edit=edit, sample_from_anchor=declared)
    with pytest.raises(UnsupportedModelError, match=f"start_from: .*{first} with {named}"):
        run_fit(replace(job, out=tmp_path / "again", start_from=str(first)), QUIET)
    assert not (tmp_path / "again" / "drafter").exists()


def test_a_dflash2_drafter_can_be_trained_on(job: FitJob, tmp_path: Path) -> None:
    first = write_drafter(tmp_path / "dflash2", **{**DFLASH2, "block_size": 4})
    second = run_fit(replace(job, start_from=str(first)), QUIET)
    target = job.target.load()
    before, after = (load_drafter(folder, target, packed=False) for folder in (first, second))
    assert after.config == before.config
    assert after.config.is_dflash2
    # What the file would hold if nothing had been learnt.
    weights = {k: v.bfloat16().float() for k, v in before.network.state_dict().items()}
    same = {k for k, v in after.network.state_dict().items() if v.equal(weights[k])}
    assert not any("conv" in key or "selector" in key for key in same)
    pair = ddtree.Pair(target, after)
    texts = [
        pair.generate([5, 6, 7], budget=16, max_new_tokens=12, method=method).token_ids
        for method in ("ar", "dflash", "ddtree")
    ]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize(
    ("write", "named"), [(write_medusa, "Medusa heads"), (write_pard, "a PARD drafter")]
)
def test_only_dflash_drafters_are_trained_on(
    write: Callable[[Path], Path], named: str, job: FitJob, tmp_path: Path
) -> None:
    first = write(tmp_path / "first")
    with pytest.raises(UnsupportedModelError, match=f"expected a DFlash drafter, .*{named}"):
        run_fit(replace(job, out=tmp_path / "again", start_from=str(first)), QUIET)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_two_processes_train_the_same_network_as_each_other(optimizer: str, job: FitJob) -> None:
    job = replace(job, config=replace(job.config, optimizer=optimizer))
    folder = run_fit(replace(job, num_workers=2), QUIET)
    assert json.loads((folder / "provenance.json").read_text())["num_workers"] == 2
    assert [path.name for path in job.out.glob(".peers*")] == []


def test_samples_of_other_layers_are_refused(job: FitJob) -> None:
    shape = replace(job.network, target_layer_ids=(0, 1))
    with pytest.raises(CheckpointError, match="layer_ids"):
        run_fit(replace(job, network=shape), QUIET)


def test_a_folder_without_samples_is_named(job: FitJob, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Let the target answer more prompts"):
        run_fit(replace(job, samples=tmp_path / "nothing"), QUIET)


def test_more_workers_than_sequences_are_refused(job: FitJob) -> None:
    with pytest.raises(OptionError, match="num_workers"):
        replace(job, num_workers=3)
