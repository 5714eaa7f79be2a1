"""The loss, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from ddtree.train.objective import (
    Objective,
    depth_weights,
    in_draft_vocabulary,
    objective,
    reach_weights,
)

EVEN = torch.zeros((1, 4))


def loss_of(
    logits: torch.Tensor,
    labels: list[int],
    top: list[list[tuple[int, float]]],
    *,
    soft_share: float,
    depths: list[int] | None = None,
    weights: list[float] | None = None,
) -> Objective:
    by_depth, at = torch.tensor(weights or [1.0]), torch.tensor(depths or [0] * len(labels))
    return objective(
        logits,
        torch.tensor(labels),
        torch.tensor([[i for i, _ in row] for row in top]),
        torch.tensor([[math.log(p) for _, p in row] for row in top]),
        at,
        len(by_depth),
        by_depth[at],
        soft_share,
    )


def test_even_logits_cost_the_logarithm_of_the_vocabulary() -> None:
    for soft_share in (0.0, 0.5, 1.0):
        found = loss_of(EVEN, [2], [[(2, 0.6), (1, 0.2)]], soft_share=soft_share)
        assert float(found.loss) == pytest.approx(math.log(4))


def test_soft_labels_share_the_loss_by_the_targets_probabilities() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.125, 0.125]]))
    found = loss_of(logits, [3], [[(0, 0.6), (1, 0.2)]], soft_share=1.0)
    # Renormalised over the two that are known: 3/4 and 1/4.
    assert float(found.loss) == pytest.approx(0.75 * math.log(2) + 0.25 * math.log(4))
    mixed = loss_of(logits, [3], [[(0, 0.6), (1, 0.2)]], soft_share=0.5)
    assert float(mixed.loss) == pytest.approx(0.5 * float(found.loss) + 0.5 * math.log(8))


def test_a_label_that_cannot_be_drafted_costs_nothing_and_is_a_miss() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.5], [0.5, 0.5]]))
    found = loss_of(logits, [-1, 0], [[(-1, 0.9)], [(-1, 0.9)]], soft_share=0.0)
    assert float(found.loss) == pytest.approx(math.log(2))
    assert found.hits.tolist() == [1]
    assert found.counts.tolist() == [2]


def test_depths_weigh_as_they_are_told() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.5], [0.25, 0.75]]))
    found = loss_of(
        logits,
        [0, 0],
        [[(0, 1.0)], [(0, 1.0)]],
        soft_share=0.0,
        depths=[0, 1],
        weights=[1.0, 0.5],
    )
    assert float(found.loss) == pytest.approx((math.log(2) + 0.5 * math.log(4)) / 1.5)


def test_weights_fall_by_e_every_gamma_depths() -> None:
    weights = depth_weights(5, 4.0)
    assert float(weights[0]) == 1.0
    assert float(weights[4]) == pytest.approx(math.exp(-1))


def test_a_label_weighs_the_probability_that_all_before_it_are_accepted() -> None:
    # Two blocks of three labels, the second one cut short behind its first.
    probs = torch.tensor([[0.5, 0.5], [0.25, 0.75], [0.1, 0.9], [0.3, 0.7]])
    labels, valid = torch.tensor([0, 0, 1, 1]), torch.tensor([[True] * 3, [True, False, False]])
    whole = reach_weights(torch.log(probs), labels, valid, 1.0)
    assert whole.tolist() == pytest.approx([1.0, 0.5, 0.5 * 0.25, 1.0])
    half = reach_weights(torch.log(probs), labels, valid, 0.5)
    assert half.tolist() == pytest.approx([1.0, 0.75, 0.75 * 0.625, 1.0])
    assert reach_weights(torch.log(probs), labels, valid, 0.0).tolist() == [1.0] * 4


def test_behind_a_token_that_cannot_be_drafted_nothing_is_reached() -> None:
    labels, valid = torch.tensor([-1, 0]), torch.ones((1, 2), dtype=torch.bool)
    assert reach_weights(torch.zeros(2, 4), labels, valid, 1.0).tolist() == [1.0, 0.0]


def test_the_way_to_a_label_is_not_trained_through_its_weight() -> None:
    logits = torch.zeros(2, 4, requires_grad=True)
    valid = torch.ones((1, 2), dtype=torch.bool)
    assert not reach_weights(logits, torch.tensor([0, 0]), valid, 1.0).requires_grad


def test_the_gradient_of_soft_labels_vanishes_where_drafter_and_target_agree() -> None:
    logits = torch.log(torch.tensor([[0.6, 0.4]])).requires_grad_()
    found = loss_of(logits, [0], [[(0, 0.6), (1, 0.4)]], soft_share=1.0)
    found.loss.backward()
    assert logits.grad is not None
    assert logits.grad.abs().max() < 1e-6


def test_tokens_map_to_rows_of_the_draft_vocabulary() -> None:
    index = torch.tensor([-1, 0, -1, 1])
    assert in_draft_vocabulary(torch.tensor([3, 0, 1]), index).tolist() == [1, -1, 0]
    assert in_draft_vocabulary(torch.tensor([3]), None).tolist() == [3]
