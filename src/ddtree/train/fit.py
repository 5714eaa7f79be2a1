"""Stage "fit": train the drafter on samples.

Embedding and head are the target's and stay as they are. A step packs random anchors of some
responses (`packing`), runs the network once over all blocks and follows the gradient of the
`objective`. Knows no files but the samples; `run_fit` saves and resumes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional

from ddtree.models.drafter import shaped_logits
from ddtree.models.drafter_network import DFlashNetwork
from ddtree.models.target import Target
from ddtree.train.fit_config import FitConfig
from ddtree.train.objective import (
    NOT_IN_VOCABULARY,
    Objective,
    chain_tau,
    depth_weights,
    in_draft_vocabulary,
    objective,
    reach_weights,
    usual_gamma,
)
from ddtree.train.optimizers import Optimizers, optimizers_for
from ddtree.train.packing import PackedBlocks, choose_anchors, pack, packed_mask, slot_positions
from ddtree.train.peers import Peers
from ddtree.train.precision import pick_precision, products_in
from ddtree.train.samples import Sample
from ddtree.train.schedule import BatchPlan, learning_rate, short_reach
from ddtree.train.split import check_split

_VALIDATION_EPOCH = -1
_SCALE_SAMPLES = 64


@dataclass(frozen=True, kw_only=True)
class FrozenHead:
    """What the drafter borrows from the target.

    Args:
        embedding: [V, D], the input embedding.
        weight: [Vd, D], rows of the output head of the draft vocabulary.
        bias: [Vd] or None.
        draft_index: [V], row in the draft vocabulary of each token, -1 without one; None: all.
    """

    embedding: Float[Tensor, "V D"]
    weight: Float[Tensor, "Vd D"]
    bias: Float[Tensor, " Vd"] | None
    draft_index: Int64[Tensor, " V"] | None

    @classmethod
    def of(cls, target: Target, draft_token_ids: Sequence[int] | None) -> FrozenHead:
        """Copies, so that the rest of the target can be let go."""
        device = target.device
        every = torch.arange(target.vocab_size, device=device)
        ids = every if draft_token_ids is None else torch.tensor(draft_token_ids, device=device)
        head = target.head_of(ids)
        index = None
        if draft_token_ids is not None:
            index = torch.full_like(every, NOT_IN_VOCABULARY)
            index[ids] = torch.arange(len(ids), device=device)
        return cls(
            embedding=target.embed(every).detach(),
            weight=head.weight,
            bias=head.bias,
            draft_index=index,
        )


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step did: 0-based step, its loss, hits and labels per depth, blocks trained on."""

    step: int
    loss: float
    hits: Tensor
    counts: Tensor
    num_blocks: int
    learning_rate: float


@dataclass(frozen=True, kw_only=True)
class Validation:
    """On held-out responses, at random anchors.

    Args:
        loss: mean, weighted as in training.
        accuracy: per depth, share of labels that were the first choice.
        chain_tau: tokens per round of a chain that starts at these anchors.
    """

    loss: float
    accuracy: tuple[float, ...]
    chain_tau: float


@dataclass
class Fit:
    """A training in progress: the network, its optimiser and the next step.

    Args:
        network: trained in place.
        head: the target's part.
        samples: all samples; places below index into it.
        training: places that are trained on.
        validating: places that are held out.
        lengths: tokens of each training sample.
        config: see `FitConfig`.
        reads_features: the network's first weights are made for features as the target gives them.
        peers: the processes that share each step.

    The network in training reads features divided by their size, since a target's layers differ by
    tens in theirs and a few dimensions by hundreds, which the optimiser would take long to learn.
    `trained_network` gives the same function of the features as they are.
    """

    network: DFlashNetwork
    head: FrozenHead
    samples: Sequence[Sample]
    training: Sequence[int]
    validating: Sequence[int]
    lengths: Sequence[int]
    config: FitConfig
    reads_features: bool = False
    peers: Peers = field(default_factory=Peers)
    step: int = 0
    precision: torch.dtype = field(init=False)
    feature_scale: Tensor = field(init=False)
    optimizers: Optimizers = field(init=False)

    def __post_init__(self) -> None:
        check_split(self.training, self.validating)
        config = self.config
        self.precision = pick_precision(config.precision, self.device)
        self.feature_scale = feature_scale(self.samples, self.training).to(self.device)
        if self.reads_features:
            self.network.fc.weight.data /= self.feature_scale
        self.plan = BatchPlan(self.lengths, config.sequences_per_step, config.seed)
        self.optimizers = optimizers_for(self.network, config, self.precision, self.peers)
        self.num_depths = self.network.config.block_size - 1
        gamma = config.gamma or usual_gamma(self.network.config.block_size)
        self.weights = depth_weights(self.num_depths, gamma).to(self.device)

    @property
    def device(self) -> torch.device:
        """Where it trains."""
        return self.head.weight.device

    def trained_network(self) -> DFlashNetwork:
        """A copy of the network that reads features as the target gives them."""
        network = copy.deepcopy(self.network)
        network.fc.weight.data *= self.feature_scale
        return network.eval()

    def run_step(self) -> StepResult:
        """One gradient step; the network and the optimiser change in place."""
        config = self.config
        epoch, places = self.plan.batch(self.step)
        mine = self.peers.share_of(places)
        samples = [self.samples[self.training[place]] for place in mine]
        short = self.step < config.short_share * config.num_steps
        reach = short_reach(self.weights, self.step, config.seed) if short else self.num_depths
        batch = self._packed(samples, epoch, reach)
        rate = learning_rate(
            self.step,
            peak=config.learning_rate,
            warmup=config.warmup_steps,
            total=config.num_steps,
            decay_share=config.decay_share,
        )
        self.optimizers.set_learning_rate(rate)
        self.network.train()
        with products_in(self.precision, self.device):
            result, _ = self._objective(batch, self._depth_weights(short), config.reach_share)
        self.optimizers.zero_grad()
        result.loss.backward()  # type: ignore[no-untyped-call]
        self.peers.average_gradients(self.network)
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), config.clip)
        self.optimizers.step()
        done = self._summed(result, batch.num_blocks, rate)
        self.step += 1
        return done

    def _depth_weights(self, short: bool) -> Float[Tensor, " L"]:
        """Of each depth, whatever its labels weigh besides.

        Shortened blocks have a depth as often as it would weigh. Where labels weigh by what they
        reach, the fixed decay must not count a second time.
        """
        even = torch.ones_like(self.weights)
        if self.config.reach_share == 0:
            return even if short else self.weights
        return even / self.weights if short else even

    def _summed(self, result: Objective, num_blocks: int, rate: float) -> StepResult:
        """What all processes did in this step."""
        numbers = [result.loss.detach().double(), *result.hits, *result.counts]
        flat = torch.stack([number.cpu().double() for number in numbers])
        total = self.peers.sum_of(torch.cat([flat, torch.tensor([float(num_blocks)])]))
        hits, counts = total[1:-1].long().chunk(2)
        return StepResult(
            step=self.step,
            loss=float(total[0]) / self.peers.size,
            hits=hits,
            counts=counts,
            num_blocks=int(total[-1]),
            learning_rate=rate,
        )

    @torch.no_grad()
    def validate(self) -> Validation:
        """Loss and accuracy on the held-out responses, always at the same anchors."""
        self.network.eval()
        size = self.config.sequences_per_step
        losses, runs = [], []
        hits = torch.zeros(self.num_depths, device=self.device)
        counts = torch.zeros_like(hits)
        for begin in range(0, len(self.validating), size):
            samples = [self.samples[place] for place in self.validating[begin : begin + size]]
            batch = self._packed(samples, _VALIDATION_EPOCH, self.num_depths)
            with products_in(self.precision, self.device):
                result, hit = self._objective(batch, self.weights, 0.0)
            losses.append(float(result.loss))
            hits += result.hits
            counts += result.counts
            runs.append(hit[batch.valid[..., 0]])
        return Validation(
            loss=sum(losses) / len(losses),
            accuracy=tuple((hits / counts.clamp(min=1)).tolist()),
            chain_tau=chain_tau(torch.cat(runs)),
        )

    def _packed(self, samples: Sequence[Sample], epoch: int, num_depths: int) -> PackedBlocks:
        config = self.config
        anchors = [
            choose_anchors(sample, config.anchors_per_sequence, seed=config.seed, epoch=epoch)
            for sample in samples
        ]
        return pack(samples, anchors, num_depths).to(self.device)

    def _objective(
        self, batch: PackedBlocks, weights: Float[Tensor, " L"], reach_share: float
    ) -> tuple[Objective, Bool[Tensor, "S A L"]]:
        """Loss of a batch, and which of its labels were hit.

        A transition head is trained behind the token that the text has in front: a chain asks for
        the same, as long as it is right. What each depth says alone ranks the candidates, so it
        stays half of the loss.
        """
        batch = replace(batch, features=batch.features * self.feature_scale)
        hidden = hidden_of_blocks(self.network, self.head, batch)[batch.valid]
        logits = shaped_logits(
            functional.linear(hidden, self.head.weight, self.head.bias).float(), self.network.config
        )
        result = self._against_text(logits, batch, weights, reach_share)
        selector = self.network.candidate_selector
        if selector is not None:
            in_front = torch.cat([batch.anchor_ids[..., None], batch.labels[..., :-1]], dim=-1)
            rows = in_draft_vocabulary(in_front[batch.valid], self.head.draft_index)
            logits = logits + selector.changes(rows, hidden).float()
            behind = self._against_text(logits, batch, weights, reach_share)
            result = replace(behind, loss=(result.loss + behind.loss) / 2)
        labels = in_draft_vocabulary(batch.labels[batch.valid], self.head.draft_index)
        hit = torch.zeros_like(batch.valid)
        hit[batch.valid] = logits.detach().argmax(1) == labels
        return result, hit

    def _against_text(
        self,
        logits: Float[Tensor, "M Vd"],
        batch: PackedBlocks,
        weights: Float[Tensor, " L"],
        reach_share: float,
    ) -> Objective:
        num_depths = batch.labels.shape[-1]
        depths = torch.arange(num_depths, device=self.device).expand(batch.labels.shape)
        depths = depths[batch.valid]
        index = self.head.draft_index
        labels = in_draft_vocabulary(batch.labels[batch.valid], index)
        weight = weights[depths]
        if reach_share > 0:
            weight = weight * reach_weights(logits, labels, batch.valid, reach_share)
        return objective(
            logits,
            labels,
            in_draft_vocabulary(batch.top_ids[batch.valid], index),
            batch.top_log_probs[batch.valid],
            depths,
            self.num_depths,
            weight,
            self.config.soft_share,
        )


def feature_scale(samples: Sequence[Sample], training: Sequence[int]) -> Float[Tensor, " F"]:
    """One over the root mean square of every feature, over some of the training samples.

    The first position of a text is left out: targets park huge values there.
    """
    stride = max(1, len(training) // _SCALE_SAMPLES)
    total, count = torch.zeros(()), 0
    for place in training[::stride]:
        features = samples[place].features[1:].float()
        total = total + features.square().sum(0)
        count += features.shape[0]
    return (total / max(count, 1)).sqrt().clamp(min=1e-6).reciprocal()


def hidden_of_blocks(
    network: DFlashNetwork, head: FrozenHead, batch: PackedBlocks
) -> Float[Tensor, "S A L D"]:
    """The network's hidden states at the drafted slots of every block, of whatever length."""
    config = network.config
    size = batch.labels.shape[-1] + 1
    ids = batch.anchor_ids[..., None].expand(-1, -1, size).clone()
    ids[..., 1:] = config.mask_token_id
    blocks = head.embedding[ids.flatten(1)] * config.input_embedding_scale
    kinds = list(zip(config.windows, config.causal, strict=True))
    masks = {
        kind: packed_mask(
            batch.anchors, batch.features.shape[1], size, window=kind[0], causal=kind[1]
        )
        for kind in set(kinds)
    }
    hidden = network.forward_packed(
        batch.features,
        blocks,
        slot_positions(batch.anchors, size),
        [masks[kind] for kind in kinds],
        block_size=size,
    )
    return torch.unflatten(hidden, 1, (-1, size))[:, :, 1:]
