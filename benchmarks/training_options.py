"""What each option of training gives: the plain recipe, and the same with one thing changed.

    python benchmarks/training_options.py --samples work/samples [--only plain "soft labels" ...]
        [--num-steps 400] [--out benchmarks/results/training_options]

Every arm trains a drafter of the embedded default from random weights on the same samples in the
same order, on one thread, and is measured at the same anchors of the same held-out responses: the
tokens that a chain and a tree would commit per round, and how often depths 1 to 3 are right. Ratios
to the plain recipe, which runs first, have an interval over held-out responses, drawn anew in
pairs. Cost is processor time, so other work beside it does little harm. Arms that are in OUT.json
already are not run again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ddtree.journal import write_whole
from ddtree.models.target import Target
from ddtree.models.transitions import conditioned
from ddtree.provenance import origin
from ddtree.train.first_weights import first_weights
from ddtree.train.fit import Fit, FrozenHead, hidden_of_blocks
from ddtree.train.fit_config import FitConfig
from ddtree.train.network import NetworkConfig
from ddtree.train.objective import in_draft_vocabulary
from ddtree.train.packing import PackedBlocks
from ddtree.train.precision import products_in
from ddtree.train.samples import Sample, SampleSet
from ddtree.train.split import split_samples
from ddtree.train.target_source import TargetSource
from ddtree.tree.geometry import child_lookup
from ddtree.tree.native import build_tree
from ddtree.types import Marginals

TAPS = (1, 8, 14, 20, 27)
VOCABULARY = 8192
VALIDATION_SHARE = 0.1
BUDGET = 16
RESAMPLES = 2000
EVALUATION_EPOCH = -1  # anchors that no training step draws


@dataclass(frozen=True, kw_only=True)
class Arm:
    """The plain recipe with some options changed.

    Args:
        name: in tables and on the command line.
        network: options of `NetworkConfig`.
        fit: options of `FitConfig`.
        steps: times the usual number of steps.
        batch: times the usual number of responses in a step, and so many fewer steps.
    """

    name: str
    network: Mapping[str, Any] = field(default_factory=dict)
    fit: Mapping[str, Any] = field(default_factory=dict)
    steps: float = 1.0
    batch: int = 1


ARMS = [
    Arm(name="plain"),
    Arm(name="another seed", fit={"seed": 1}),
    Arm(name="target's last three layers first", network={"first_weights": "target"}),
    Arm(name="soft labels, half", fit={"soft_share": 0.5}),
    Arm(name="weights follow acceptance", fit={"reach_share": 1.0}),
    Arm(name="weights follow acceptance, half way", fit={"reach_share": 0.5}),
    Arm(name="gamma of 2", fit={"gamma": 2.0}),
    Arm(
        name="soft labels and weights that follow, half each",
        fit={"soft_share": 0.5, "reach_share": 0.5},
    ),
    Arm(
        name="the defaults: target's layers, half soft labels, weights that follow",
        network={"first_weights": "target"},
        fit={"soft_share": 0.5, "reach_share": 1.0},
    ),
    Arm(name="transition head of rank 64", network={"transition_rank": 64}),
    Arm(name="Muon", fit={"optimizer": "muon"}),
    Arm(name="Muon, batch of 512 blocks", batch=4, fit={"optimizer": "muon"}),
    Arm(name="AdamW, batch of 512 blocks", batch=4),
    Arm(name="twice the steps", steps=2.0),
    Arm(
        name="the defaults, twice the steps",
        network={"first_weights": "target"},
        fit={"soft_share": 0.5, "reach_share": 1.0},
        steps=2.0,
    ),
    Arm(
        name="the defaults and Muon",
        network={"first_weights": "target"},
        fit={"soft_share": 0.5, "reach_share": 1.0, "optimizer": "muon"},
    ),
    Arm(name="2 layers", network={"num_layers": 2}),
    Arm(name="5 layers", network={"num_layers": 5}),
    Arm(name="1 tap (27)", network={"target_layer_ids": (27,)}),
    Arm(name="3 taps (1, 14, 27)", network={"target_layer_ids": (1, 14, 27)}),
    Arm(name="block of 16", network={"block_size": 16}),
    Arm(name="block of 4", network={"block_size": 4}),
    Arm(name="shortened blocks, 1.8 times the steps", fit={"short_share": 0.85}, steps=1.8),
    Arm(name="whole vocabulary", network={"draft_vocab_size": None}),
    Arm(name="float32 products", fit={"precision": "float32"}),
    Arm(name="soft labels only", fit={"soft_share": 1.0}),
    Arm(name="1 layer", network={"num_layers": 1}),
]


class Taps(Sequence[Sample]):
    """The samples with some of their layers only."""

    def __init__(self, samples: SampleSet, kept: Sequence[int]) -> None:
        self._samples, self._kept = samples, kept

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, place: int) -> Sample:  # type: ignore[override]
        sample = self._samples[place]
        layers = torch.unflatten(sample.features, 1, (len(TAPS), -1))
        return replace(sample, features=layers[:, self._kept].flatten(1))


class ArmFit(Fit):
    """A training with what only this benchmark knows."""

    @torch.no_grad()
    def measure(self) -> dict[str, Any]:
        """Accuracy by depth; rounds, and tokens of chains and trees, for each held-out response."""
        self.network.eval()
        hits, counts = torch.zeros(self.num_depths), torch.zeros(self.num_depths)
        found: dict[str, list[int]] = {"rounds": [], "chain": [], "tree": []}
        for place in self.validating:
            batch = self._packed([self.samples[place]], EVALUATION_EPOCH, self.num_depths)
            with products_in(self.precision, self.device):
                result, hit = self._objective(batch, self.weights, 0.0)
                scaled = replace(batch, features=batch.features * self.feature_scale)
                hidden = hidden_of_blocks(self.network, self.head, scaled)[0]
            hits += result.hits
            counts += result.counts
            begun = batch.valid[0, :, 0]
            found["rounds"].append(int(begun.sum()))
            chains = hit[0, begun].long().cumprod(1).sum()
            found["chain"].append(int(begun.sum() + chains))
            found["tree"].append(
                sum(self._in_tree(batch, hidden, i) for i in begun.nonzero()[:, 0])
            )
        return {"accuracy": (hits / counts.clamp(min=1)).tolist(), **found}

    def _in_tree(self, batch: PackedBlocks, hidden: Tensor, block: int) -> int:
        """Tokens of a round of a tree of `BUDGET` nodes behind one anchor."""
        root = batch.anchor_ids[0, block]
        text = batch.labels[0, block][batch.valid[0, block]].tolist()
        tree = build_tree(self._drafted(root, hidden[block].float()), int(root), BUDGET)
        children, node, length = child_lookup(tree), 0, 1
        for token in text:
            if (node := children.get((node, token), -1)) < 0:
                break
            length += 1
        return length

    def _drafted(self, root: Tensor, hidden: Tensor) -> Marginals:
        """What the decoder's drafter would make of these hidden states [L, D]."""
        scores = functional.linear(hidden, self.head.weight, self.head.bias)
        best = torch.topk(scores, BUDGET, dim=-1)
        log_probs = best.values - torch.logsumexp(scores, dim=-1, keepdim=True)
        index = self.head.draft_index
        ids = best.indices if index is None else (index >= 0).nonzero()[:, 0][best.indices]
        alone, selector = Marginals(log_probs, ids), self.network.candidate_selector
        if selector is None:
            return alone
        first = in_draft_vocabulary(root, index).expand(1, BUDGET)
        previous = torch.cat([first, best.indices[:-1]])
        return conditioned(alone, best.values, selector.between(previous, best.indices, hidden))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=Path, required=True, help="of stage respond or features")
    parser.add_argument("--only", nargs="+", metavar="ARM", help="names of arms; default: all")
    parser.add_argument("--num-steps", type=int, default=400, help="of 128 blocks")
    parser.add_argument("--out", type=Path, default=Path("training_options"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = options.only or [arm.name for arm in ARMS]
    unknown = set(names) - {arm.name for arm in ARMS}
    if unknown:
        parser.error(f"no such arm: {', '.join(sorted(unknown))}")
    source = TargetSource(name="smollm2-135m", dtype="float32")
    samples = SampleSet(options.samples)
    path = options.out.with_suffix(".json")
    results = json.loads(path.read_text())["arms"] if path.exists() else {}
    for arm in (arm for arm in ARMS if arm.name in names and arm.name not in results):
        results[arm.name] = train(arm, source, samples, options.num_steps)
        kept = {"card": origin(), "num_steps": options.num_steps, "arms": results}
        write_whole(path, json.dumps(kept, indent=1) + "\n")
        write_whole(options.out.with_suffix(".md"), page(results, origin(), samples))
        print(row(arm.name, results), flush=True)


def train(arm: Arm, source: TargetSource, samples: SampleSet, num_steps: int) -> dict[str, Any]:
    """One arm from first to last step."""
    target = source.load(packed=False)
    fit = begun(arm, target, samples, num_steps)
    begin, blocks = time.process_time(), 0
    while fit.step < fit.config.num_steps:
        blocks += fit.run_step().num_blocks
    seconds = time.process_time() - begin
    size = sum(p.numel() for p in fit.network.parameters())
    return {**fit.measure(), "seconds": seconds, "blocks": blocks, "parameters": size}


def begun(arm: Arm, target: Target, samples: SampleSet, num_steps: int) -> ArmFit:
    """An arm's training at step 0."""
    options: dict[str, Any] = {
        "target_layer_ids": TAPS,
        "draft_vocab_size": VOCABULARY,
        "first_weights": "random",
        **arm.network,
    }
    shape = NetworkConfig(**options)
    config = FitConfig(
        **{
            "num_steps": round(num_steps * arm.steps / arm.batch),
            "sequences_per_step": 4 * arm.batch,
            "anchors_per_sequence": 32,
            "warmup_steps": 32 // arm.batch,
            "decay_share": 0.5,
            "validation_share": VALIDATION_SHARE,
            "reach_share": 0.0,
            "soft_share": 0.0,
            **arm.fit,
        }
    )
    split = split_samples(samples, VALIDATION_SHARE)
    first = first_weights(
        target,
        shape,
        start_from=None,
        said=split.said,
        some_text=samples[0].token_ids.tolist(),
        seed=config.seed,
    )
    kept = [TAPS.index(tap) for tap in first.network.config.target_layer_ids]
    return ArmFit(
        network=first.network,
        head=FrozenHead.of(target, first.draft_token_ids),
        samples=Taps(samples, kept),
        training=split.training,
        validating=split.validating,
        lengths=split.lengths,
        config=config,
        reads_features=first.layers is not None,
    )


def tau(result: Mapping[str, Any], kind: str) -> float:
    return float(sum(result[kind]) / sum(result["rounds"]))


def ratio(result: Mapping[str, Any], plain: Mapping[str, Any], kind: str) -> str:
    """tau over the plain recipe's, with its 95% interval over held-out responses."""
    ours, theirs = np.array(result[kind]), np.array(plain[kind])
    drawn = np.random.default_rng(0).integers(0, len(ours), (RESAMPLES, len(ours)))
    low, high = np.percentile(ours[drawn].sum(1) / theirs[drawn].sum(1), [2.5, 97.5])
    return f"{ours.sum() / theirs.sum():.3f} [{low:.3f}, {high:.3f}]"


def row(name: str, results: Mapping[str, Any]) -> str:
    found, plain = results[name], results["plain"]
    cells = [name]
    for kind in ("chain", "tree"):
        if kind in found and kind in plain:
            known = "" if name == "plain" else ratio(found, plain, kind)
            cells += [f"{tau(found, kind):.3f}", known]
        else:
            cells += ["", ""]
    cells.append(" ".join(f"{share:.3f}".lstrip("0") for share in found["accuracy"][:3]))
    cells += [f"{found['seconds'] / plain['seconds']:.2f}", f"{found['parameters'] / 1e6:.1f}"]
    return f"| {' | '.join(cells)} |"


def page(results: Mapping[str, Any], facts: Mapping[str, Any], samples: SampleSet) -> str:
    plain = results["plain"]
    return "\n".join(lines(results, facts, samples, plain)) + "\n"


def lines(
    results: Mapping[str, Any],
    facts: Mapping[str, Any],
    samples: SampleSet,
    plain: Mapping[str, Any],
) -> Iterator[str]:
    yield "# Options of training, each alone"
    yield ""
    num_anchors, num_held_out = sum(plain["rounds"]), len(plain["rounds"])
    chance = ", and `another seed` shows what chance does" if "another seed" in results else ""
    yield (
        f"From random weights where nothing else is said, {plain['blocks']} blocks of 8 from"
        f" {len(samples)} responses, a tenth of whose prompts are held out. tau is tokens per round"
        f" of a chain, and of a tree of {BUDGET} nodes, from {num_anchors} anchors of"
        f" {num_held_out} held-out responses; ratios to the plain recipe have a 95% interval over"
        f" those responses{chance}. Behind a transition head,"
        " depths 2 and 3 are asked behind the true token. Cost is processor time of the whole"
        f" training, {plain['seconds']:.0f} s for the plain recipe."
    )
    yield ""
    yield (
        "| arm | chain | / plain | tree | / plain | depths 1 to 3 | cost / plain"
        " | million parameters |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    yield from (row(arm.name, results) for arm in ARMS if arm.name in results)
    yield ""
    yield "What each arm changes:"
    yield ""
    for arm in ARMS:
        if arm.name in results:
            yield f"- {arm.name}: {changes(arm)}"
    yield ""
    yield "## Card"
    yield ""
    yield from (f"- {key}: {value}" for key, value in facts.items())


def changes(arm: Arm) -> str:
    """The options of an arm that are not the plain recipe's."""
    usual = asdict(Arm(name=arm.name))
    changed = {k: v for k, v in asdict(arm).items() if v != usual[k]}
    return ", ".join(f"`{key} = {value}`" for key, value in changed.items()) or "nothing"


if __name__ == "__main__":
    main()
