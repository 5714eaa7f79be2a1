"""Packed layers compute what plain ones do, and nothing else is replaced."""

import pytest
import torch
from torch import nn

from ddtree.models import packed
from ddtree.models.loading import load_target
from ddtree.models.packed import PackedLinear, can_pack, pack_linears
from tests.support.models import tiny_model


@pytest.fixture(autouse=True)
def _packing_works_here() -> None:
    assert can_pack(), "the CPU wheels of torch that we test with all have oneDNN"


@pytest.mark.parametrize("num_rows", [1, 2, 17, 64, 300])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_layer_computes_what_it_did(num_rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(48, 80, bias=bias)
    layer = pack_linears(linear)
    assert isinstance(layer, PackedLinear)
    x = torch.randn(2, num_rows, 48)
    torch.testing.assert_close(layer(x), linear(x), rtol=0, atol=1e-5)
    assert torch.equal(layer.weight, linear.weight)


def test_rows_that_lie_apart_in_memory_are_read_right() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(16, 8)
    x = torch.randn(16, 5).T
    torch.testing.assert_close(pack_linears(linear)(x), linear(x), rtol=0, atol=1e-5)


def test_every_plain_layer_inside_is_replaced_and_no_other() -> None:
    class Own(nn.Linear):
        """Does what a packed layer could not know of."""

    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), Own(4, 4)), nn.ReLU())
    half = nn.Linear(4, 4, dtype=torch.bfloat16)
    model.append(half)
    assert pack_linears(model) is model
    kinds = [type(m) for m in model.modules() if not isinstance(m, nn.Sequential)]
    assert kinds == [PackedLinear, PackedLinear, Own, nn.ReLU, nn.Linear]


def test_without_the_operators_all_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "can_pack", lambda: False)
    linear = nn.Linear(4, 4)
    assert pack_linears(linear) is linear


def test_a_machine_where_packing_computes_nonsense_does_not_pack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: x.new_zeros(2, 8))
    assert not can_pack.__wrapped__()


def test_a_model_that_the_user_loaded_is_not_touched() -> None:
    model = tiny_model("llama")
    target = load_target(model)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    assert target.backend == "sdpa"
