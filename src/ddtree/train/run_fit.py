"""Stage "fit" for a person: samples in, progress on the terminal, a drafter out.

OUT holds checkpoint.pt (to go on from), metrics.jsonl, curve.png and, at the end, drafter/.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ddtree.errors import OptionError
from ddtree.journal import whole_lines, write_whole, writing
from ddtree.models.drafter_export import save_drafter
from ddtree.models.drafter_network import DFlashNetwork
from ddtree.models.target import Target
from ddtree.progress import stage_progress
from ddtree.provenance import origin
from ddtree.train import plots
from ddtree.train.checkpoint import load_checkpoint, save_checkpoint
from ddtree.train.first_weights import first_weights
from ddtree.train.fit import Fit, FrozenHead, StepResult, Validation
from ddtree.train.fit_config import FitConfig
from ddtree.train.network import NetworkConfig
from ddtree.train.peers import Peers
from ddtree.train.samples import SampleSet, claim_folder
from ddtree.train.split import check_split, split_samples
from ddtree.train.target_source import TargetSource
from ddtree.train.workers import items_of

_CHECKPOINT_S = 120.0
_REPORT_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class FitJob:
    """A run of stage "fit".

    Args:
        target: whose embedding and head the drafter uses.
        samples: folder of the samples, of stage respond or features.
        out: folder for the results; gone on with if it is there.
        network: the drafter's shape.
        config: see `FitConfig`.
        start_from: a drafter whose weights and shape to begin with, in place of random ones of the
            shape of `network`. If it has no transition head, `network` may still add one, and bound
            what it can say if that is every token.
        num_workers: processes that share each step.

    Raises:
        OptionError: more workers than sequences in a step, or two kinds of first weights.
    """

    target: TargetSource
    samples: Path
    out: Path
    network: NetworkConfig
    config: FitConfig
    start_from: str | None = None
    num_workers: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.num_workers <= self.config.sequences_per_step:
            raise OptionError(
                "num_workers",
                expected=f"1 to sequences_per_step ({self.config.sequences_per_step})",
                got=self.num_workers,
                remedy="Every worker takes some sequences of each step.",
            )
        if self.start_from is not None and self.network.first_weights != "auto":
            raise OptionError(
                "first_weights",
                expected="none beside start_from",
                got=repr(self.network.first_weights),
                remedy="A training that starts from a drafter begins with its weights.",
            )


@dataclass(frozen=True, kw_only=True)
class FitReport:
    """How a training stands after some steps.

    Args:
        step: steps done.
        loss: mean since the last report.
        accuracy: per depth, on what was trained on since the last report.
        learning_rate: of the last step.
        blocks_per_s: trained on per second since the last report, validation aside.
        tokens_per_s: the same in labels: drafted slots whose token lies in the response. A token
            counts once for each block that predicts it.
        seconds: of training since this process began.
        validation: if there was one after this step.
    """

    step: int
    loss: float
    accuracy: tuple[float, ...]
    learning_rate: float
    blocks_per_s: float
    tokens_per_s: float
    seconds: float
    validation: Validation | None


def run_fit(job: FitJob, console: Console) -> Path:
    """Train a drafter; goes on where an earlier run stopped.

    Returns:
        The folder of the drafter.

    Raises:
        UserError: see `SampleSet`, `drafter_config_for`, `Fit`, `load_checkpoint`, `save_drafter`,
            `writing`.
    """
    plots.check_installed()
    with writing(job.out):
        job.out.mkdir(parents=True, exist_ok=True)
    meeting_point = job.out / f".peers-{uuid.uuid4().hex}"
    reports = items_of(partial(_train, job, meeting_point), job.num_workers)
    with closing(reports), stage_progress(console, "steps") as progress:
        task = progress.add_task("", total=job.config.num_steps)
        try:
            for report in reports:
                progress.update(task, completed=report.step, description=_line(report))
                if report.validation is not None:
                    progress.console.print(_validated(report), highlight=False)
        finally:
            meeting_point.unlink(missing_ok=True)
    write_whole(job.out / "curve.png", plots.plot_curve(read_metrics(job.out), str(job.out)))
    console.print(f"The drafter: {job.out / 'drafter'}")
    return job.out / "drafter"


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, first to last; one that a kill cut short is dropped."""
    return [json.loads(line) for line in whole_lines(out / "metrics.jsonl")]


def _train(
    job: FitJob, meeting_point: Path, part: tuple[int, int]
) -> Generator[FitReport, None, None]:
    """One process's share of the training; the first one saves and reports."""
    peers = Peers.join(meeting_point, *part) if part[1] > 1 else Peers()
    # As transformers made it: it is not run, but its layers may be copied.
    target = job.target.load(packed=False)
    fit, facts, draft_token_ids = _begin(job, target, peers)
    del target  # of a large target only embedding and head stay in memory
    checkpoint = job.out / "checkpoint.pt"
    if checkpoint.exists():
        load_checkpoint(fit, checkpoint, facts)
    if peers.rank == 0:
        yield from _lead(job, fit, facts, checkpoint)
        _export(job, fit, facts, draft_token_ids)
    else:
        while fit.step < job.config.num_steps:
            fit.run_step()
    peers.leave()


def _begin(
    job: FitJob, target: Target, peers: Peers
) -> tuple[Fit, dict[str, object], tuple[int, ...] | None]:
    """A training at step 0, what decides its result, and the draft vocabulary."""
    samples = SampleSet(job.samples)
    split = split_samples(samples, job.config.validation_share)
    check_split(split.training, split.validating)
    first = first_weights(
        target,
        job.network,
        start_from=job.start_from,
        said=split.said,
        some_text=samples[0].token_ids.tolist(),
        seed=job.config.seed,
    )
    digest = _digest(first.network)
    wanted = first.network.config.target_layer_ids
    claim_folder(job.samples, job.target.samples_description(wanted))
    fit = Fit(
        network=first.network.to(target.device),
        head=FrozenHead.of(target, first.draft_token_ids),
        samples=samples,
        training=split.training,
        validating=split.validating,
        lengths=split.lengths,
        config=job.config,
        reads_features=job.start_from is not None or first.layers is not None,
        peers=peers,
    )
    facts: dict[str, object] = {
        **job.target.description(),
        "samples_sha256": split.sha256,
        "num_responses": len(split.training),
        "num_response_tokens": len(split.said),
        "start_from": job.start_from and Path(job.start_from).name,
        "first_layers": first.layers,
        "first_weights_sha256": digest,
        **asdict(job.network),
        **asdict(job.config),
        "precision": str(fit.precision),
    }
    return fit, facts, first.draft_token_ids


def _digest(network: DFlashNetwork) -> str:
    digest = hashlib.sha256()
    for parameter in network.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def _lead(
    job: FitJob, fit: Fit, facts: Mapping[str, object], checkpoint: Path
) -> Generator[FitReport, None, None]:
    """Step after step, with reports, metrics and checkpoints."""
    config = job.config
    path = job.out / "metrics.jsonl"
    kept = [line for line in read_metrics(job.out) if line["step"] <= fit.step]
    write_whole(path, "".join(json.dumps(line) + "\n" for line in kept))
    begin = saved = time.perf_counter()
    window = _Window()
    while fit.step < config.num_steps:
        window.add(fit.run_step())
        last = fit.step == config.num_steps
        validates = last or fit.step % config.validate_every == 0
        if not validates and fit.step % _REPORT_STEPS:
            continue
        report = window.report(begin, fit.validate() if validates else None)
        window = _Window()
        with writing(path), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(report)) + "\n")
        if last or time.perf_counter() - saved > _CHECKPOINT_S:
            save_checkpoint(fit, checkpoint, facts)
            saved = time.perf_counter()
        yield report


class _Window:
    """Steps since the last report."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._results: list[StepResult] = []
        self._seconds = 0.0

    def add(self, result: StepResult) -> None:
        self._results.append(result)
        self._seconds = time.perf_counter() - self._begin

    def report(self, begin: float, validation: Validation | None) -> FitReport:
        results = self._results
        length = max(len(result.hits) for result in results)
        hits, counts = torch.zeros(length), torch.zeros(length)
        for result in results:
            hits[: len(result.hits)] += result.hits
            counts[: len(result.counts)] += result.counts
        return FitReport(
            step=results[-1].step + 1,
            loss=sum(result.loss for result in results) / len(results),
            accuracy=tuple((hits / counts.clamp(min=1)).tolist()),
            learning_rate=results[-1].learning_rate,
            blocks_per_s=sum(result.num_blocks for result in results) / self._seconds,
            tokens_per_s=float(counts.sum()) / self._seconds,
            seconds=time.perf_counter() - begin,
            validation=validation,
        )


def _export(
    job: FitJob, fit: Fit, facts: Mapping[str, object], draft_token_ids: tuple[int, ...] | None
) -> None:
    """Write the drafter with where it comes from."""
    metrics = read_metrics(job.out)
    validations = [line for line in metrics if line["validation"] is not None]
    save_drafter(
        fit.trained_network(),
        fit.network.config,
        job.out / "drafter",
        draft_token_ids=draft_token_ids,
        provenance={
            **origin(),
            "training": facts,
            "num_workers": job.num_workers,
            "metrics": validations[-1] if validations else None,
        },
    )


def _line(report: FitReport) -> str:
    depths = " ".join(f"{share:.2f}".lstrip("0") for share in report.accuracy)
    speed = f"{report.blocks_per_s:.0f} blocks/s, {report.tokens_per_s:.0f} tokens/s"
    return f"loss {report.loss:.3f}  accuracy {depths}  {speed}"


def _validated(report: FitReport) -> str:
    assert report.validation is not None
    found = report.validation
    depths = " ".join(f"{share:.3f}".lstrip("0") for share in found.accuracy)
    return (
        f"step {report.step}: held out: loss {found.loss:.3f}, accuracy {depths}, "
        f"chain tau {found.chain_tau:.3f}"
    )
