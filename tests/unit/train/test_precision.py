"""What a training multiplies in."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ddtree.train import precision as module
from ddtree.train.precision import pick_precision, products_in
from tests.support.models import tiny_target
from tests.unit.train.test_fit import CONFIG, new_fit, samples_of_counting, weights

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "able", "picked"),
    [
        ("auto", True, torch.bfloat16),
        ("auto", False, torch.float32),
        ("float32", True, torch.float32),
        ("bfloat16", False, torch.bfloat16),
    ],
)
def test_auto_takes_bfloat16_where_the_device_multiplies_it(
    name: str, able: bool, picked: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "has_bfloat16_products", lambda device: able)
    assert pick_precision(name, CPU) is picked


def test_other_devices_are_not_taken_to_be_able() -> None:
    assert not module.has_bfloat16_products(torch.device("meta"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_rounded_and_nothing_else(dtype: torch.dtype) -> None:
    left, right = torch.randn(3, 4), torch.randn(4, 5)
    with products_in(dtype, CPU):
        product, total = left @ right, left + left
    assert (product.dtype, total.dtype) == (dtype, torch.float32)


def test_training_in_bfloat16_keeps_weights_in_float32_and_comes_close() -> None:
    samples = samples_of_counting(tiny_target("llama"), 20)
    after = {}
    for precision in ("float32", "bfloat16"):
        fit = new_fit(samples, replace(CONFIG, precision=precision))
        for _ in range(CONFIG.num_steps):
            fit.run_step()
        after[precision] = fit
    exact, rounded = (weights(fit.network) for fit in after.values())
    assert {p.dtype for p in after["bfloat16"].network.parameters()} == {torch.float32}
    assert not exact.equal(rounded)
    first = weights(new_fit(samples).network)
    assert (exact - rounded).norm() < 0.5 * (exact - first).norm()
    assert after["bfloat16"].validate().loss == pytest.approx(
        after["float32"].validate().loss, rel=0.05
    )
