"""Training: it learns, it resumes exactly, and what it saves is what the decoder loads."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ddtree.errors import CacheWriteError, CheckpointError, OptionError, PromptError
from ddtree.models.drafter_network import DFlashNetwork
from ddtree.models.target import Target
from ddtree.train import checkpoint as checkpoints
from ddtree.train.checkpoint import load_checkpoint, save_checkpoint
from ddtree.train.fit import Fit, FrozenHead
from ddtree.train.fit_config import FitConfig
from ddtree.train.network import (
    NetworkConfig,
    drafter_config_for,
    extended,
    most_frequent,
    new_network,
)
from ddtree.train.objective import depth_weights, usual_gamma
from ddtree.train.samples import Sample
from ddtree.train.schedule import short_reach
from tests.support.models import tiny_target
from tests.support.samples import random_samples, sample_of

pytestmark = pytest.mark.usefixtures("unchecked")

SHAPE = NetworkConfig(
    block_size=4, num_layers=2, target_layer_ids=(0, 2), mask_token_id=60, intermediate_size=48
)
CONFIG = FitConfig(
    num_steps=12,
    sequences_per_step=2,
    anchors_per_sequence=3,
    learning_rate=3e-3,
    warmup_steps=2,
    validate_every=4,
    reach_share=0.0,
    soft_share=0.0,
    seed=1,
)


def samples_of_counting(target: Target, count: int) -> list[Sample]:
    """Texts in which every token is the one before it plus one: any drafter can learn them."""
    texts = [[(begin * 7 + step) % 50 for step in range(18)] for begin in range(count)]
    return [sample_of(target, text, 4, index, [0, 2]) for index, text in enumerate(texts)]


def new_fit(
    samples: Sequence[Sample],
    config: FitConfig = CONFIG,
    shape: NetworkConfig = SHAPE,
    draft_token_ids: Sequence[int] | None = None,
    num_validating: int = 2,
) -> Fit:
    target = tiny_target("llama")
    training = list(range(num_validating, len(samples)))
    return Fit(
        network=new_network(drafter_config_for(target, shape), seed=config.seed),
        head=FrozenHead.of(target, draft_token_ids),
        samples=samples,
        training=training,
        validating=list(range(num_validating)),
        lengths=[samples[place].token_ids.shape[0] for place in training],
        config=config,
    )


def weights(network: DFlashNetwork) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"soft_share": 0.5},
        {"short_share": 0.6},
        {"reach_share": 0.5},
        {"reach_share": 1.0, "short_share": 0.6},
        {"optimizer": "muon"},
    ],
    ids=str,
)
def test_a_drafter_learns_to_count(options: dict[str, Any]) -> None:
    # Its context is the target's features of these texts; 200 steps take seconds.
    target = tiny_target("llama")
    config = replace(CONFIG, num_steps=200, sequences_per_step=8, **options)
    fit = new_fit(samples_of_counting(target, 50), config)
    before = fit.validate()
    for _ in range(config.num_steps):
        fit.run_step()
    after = fit.validate()
    assert before.accuracy[0] < 0.3
    if not options.get("soft_share"):  # the random target itself does not count
        assert after.accuracy[0] > 0.6
        assert after.chain_tau > 2
    assert after.loss < before.loss


def test_transitions_learn_what_no_position_knows_alone() -> None:
    # A token that nobody can guess, then one that follows from it; all texts are different.
    target, generator = tiny_target("llama"), torch.Generator().manual_seed(0)
    samples = []
    for index in range(60):
        free = torch.randint(25, (9,), generator=generator).tolist()
        text = [token for x in free for token in (x, 25 + (3 * x) % 25)]
        samples.append(sample_of(target, text, 4, index, [0, 2]))
    config = replace(CONFIG, num_steps=100, sequences_per_step=8, learning_rate=2e-2)
    at_depth_two = {}
    for rank in (None, 12):
        fit = new_fit(samples, config, replace(SHAPE, transition_rank=rank), num_validating=20)
        for _ in range(config.num_steps):
            fit.run_step()
        at_depth_two[rank] = fit.validate().accuracy[1]
    # Half of the anchors stand where depth 2 follows from depth 1, the others before a free token.
    assert at_depth_two[None] < 0.25
    assert at_depth_two[12] > 0.4


def test_a_transition_head_can_be_added_to_a_trained_drafter() -> None:
    target = tiny_target("llama")
    before = new_network(drafter_config_for(target, SHAPE), seed=1)
    config = drafter_config_for(target, replace(SHAPE, transition_rank=6))
    after = extended(before, config, seed=2)
    kept = after.state_dict()
    assert all(kept[name].equal(value) for name, value in before.state_dict().items())
    assert after.candidate_selector is not None
    hidden = torch.randn(3, target.hidden_size)
    added = after.candidate_selector.changes(torch.tensor([1, 2, 3]), hidden)
    assert not added.any()  # at first it changes nothing


def test_a_resumed_training_is_the_same_training(tmp_path: Path) -> None:
    samples = random_samples(tiny_target("llama"), [0, 2], 9)
    whole = new_fit(samples)
    for _ in range(10):
        whole.run_step()
    first = new_fit(samples)
    for _ in range(5):
        first.run_step()
    save_checkpoint(first, tmp_path / "checkpoint.pt", {"seed": 1})
    second = new_fit(samples)
    second.network.norm.weight.data.fill_(7.0)  # whatever it held is replaced
    load_checkpoint(second, tmp_path / "checkpoint.pt", {"seed": 1})
    assert second.step == 5
    for _ in range(5):
        second.run_step()
    assert torch.equal(weights(whole.network), weights(second.network))


def test_validation_changes_nothing() -> None:
    samples = random_samples(tiny_target("llama"), [0, 2], 6)
    with_it, without = new_fit(samples), new_fit(samples)
    for _ in range(3):
        assert with_it.validate() == with_it.validate()
        with_it.run_step()
        without.run_step()
    assert torch.equal(weights(with_it.network), weights(without.network))


def test_another_number_of_steps_may_be_resumed_and_other_options_may_not(tmp_path: Path) -> None:
    fit = new_fit(random_samples(tiny_target("llama"), [0, 2], 5))
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(fit, path, {"num_steps": 10, "learning_rate": 1.0})
    load_checkpoint(fit, path, {"num_steps": 20, "learning_rate": 1.0})
    with pytest.raises(CheckpointError, match="other values of learning_rate"):
        load_checkpoint(fit, path, {"num_steps": 10, "learning_rate": 2.0})


def test_a_broken_checkpoint_is_named(tmp_path: Path) -> None:
    fit = new_fit(random_samples(tiny_target("llama"), [0, 2], 5))
    path = tmp_path / "checkpoint.pt"
    for content in (b"", b"not a checkpoint"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="Delete it to start again"):
            load_checkpoint(fit, path, {})


def test_a_full_disk_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit = new_fit(random_samples(tiny_target("llama"), [0, 2], 5))
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(fit, path, {})
    before = path.read_bytes()

    def full(state: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("PytorchStreamWriter failed writing file")

    monkeypatch.setattr(checkpoints.torch, "save", full)
    with pytest.raises(CacheWriteError, match="it resumes"):
        save_checkpoint(fit, path, {})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_the_draft_vocabulary_bounds_what_can_be_hit() -> None:
    target = tiny_target("llama")
    samples = samples_of_counting(target, 8)
    ids = most_frequent([3, 4, 4, 5], 2)
    assert ids == (3, 4)
    fit = new_fit(samples, draft_token_ids=ids)
    assert fit.head.weight.shape[0] == 2
    result = fit.run_step()
    labels = int(result.counts.sum())
    assert labels > int(result.hits.sum())
    assert torch.isfinite(torch.tensor(result.loss))


def test_shortened_blocks_reach_each_depth_as_often_as_it_weighs() -> None:
    depths = depth_weights(7, 4.0)
    reached = torch.tensor([short_reach(depths, step, 0) for step in range(4000)])
    assert int(reached.min()) >= 1
    for depth, weight in enumerate(depths, start=1):
        assert float((reached >= depth).float().mean()) == pytest.approx(float(weight), abs=0.03)


def test_what_is_cut_off_and_what_is_not_reached_count_once() -> None:
    samples = samples_of_counting(tiny_target("llama"), 8)
    decay = depth_weights(3, usual_gamma(4))
    plain = new_fit(samples)
    follows = new_fit(samples, replace(CONFIG, reach_share=0.5))
    assert plain._depth_weights(short=False).equal(decay)
    assert plain._depth_weights(short=True).tolist() == [1.0] * 3
    assert follows._depth_weights(short=False).tolist() == [1.0] * 3
    assert (follows._depth_weights(short=True) * decay).tolist() == pytest.approx([1.0] * 3)


def test_gamma_follows_the_block() -> None:
    assert [usual_gamma(size) for size in (8, 10, 16, 4)] == [4.0, 5.0, 7.0, 2.0]


def test_nothing_to_train_on_or_to_hold_out_is_an_error() -> None:
    samples = random_samples(tiny_target("llama"), [0, 2], 2)
    with pytest.raises(PromptError, match="0 and 2"):
        new_fit(samples)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_steps": 0},
        {"num_steps": 1.5},
        {"learning_rate": 0.0},
        {"soft_share": 1.1},
        {"reach_share": -0.1},
        {"validation_share": 0.0},
        {"gamma": -1.0},
        {"seed": True},
        {"clip": "1"},
        {"precision": "float16"},
        {"precision": 16},
    ],
    ids=str,
)
def test_options_outside_their_range_are_named(changes: dict[str, object]) -> None:
    with pytest.raises(OptionError, match=next(iter(changes))):
        replace(CONFIG, **changes)


def test_the_shape_follows_the_target() -> None:
    target = tiny_target("qwen3")
    config = drafter_config_for(target, NetworkConfig(mask_token_id=60))
    assert config.hidden_size == target.hidden_size
    assert config.num_target_layers == target.num_layers
    assert config.head_dim == 12
    assert max(config.target_layer_ids) < target.num_layers


@pytest.mark.parametrize(
    "changes",
    [{"mask_token_id": 61}, {"target_layer_ids": (0, 4)}],
    ids=str,
)
def test_a_shape_that_the_target_cannot_have_is_named(changes: dict[str, object]) -> None:
    options = replace(NetworkConfig(mask_token_id=60), **changes)
    with pytest.raises(OptionError, match=next(iter(changes))):
        drafter_config_for(tiny_target("llama"), options)


def test_without_a_tokenizer_the_mask_token_must_be_given() -> None:
    with pytest.raises(OptionError, match="mask_token_id"):
        drafter_config_for(tiny_target("llama"), NetworkConfig())


def test_the_same_seed_gives_the_same_first_weights() -> None:
    config = drafter_config_for(tiny_target("llama"), SHAPE)
    same = [weights(new_network(config, seed=seed)) for seed in (3, 3, 4)]
    assert torch.equal(same[0], same[1])
    assert not torch.equal(same[0], same[2])


def test_ties_of_the_draft_vocabulary_go_to_lower_ids() -> None:
    assert most_frequent(itertools.chain([9, 2], [5]), 2) == (2, 5)
    assert most_frequent([1], None) is None
    assert json.dumps(most_frequent([1, 1], 4)) == "[1]"
