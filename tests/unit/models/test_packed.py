"""Packed layers compute what plain ones do, and nothing else is replaced."""

import pytest
import torch
from torch import nn

from ddtree.models import kernels, packed
from ddtree.models.loading import load_target
from ddtree.models.packed import (
    OnednnLinear,
    PackedLinear,
    PairLinear,
    PanelLinear,
    best_layout,
    pack_linears,
)
from tests.support.models import tiny_model

LAYOUTS = [PanelLinear, OnednnLinear]
needs_pairs = pytest.mark.skipif(
    not kernels.PAIRS_AVAILABLE, reason="this processor does not multiply bfloat16"
)


def test_this_machine_has_both_layouts() -> None:
    """Where we test, gcc, AVX2 and a torch with oneDNN are there: nothing below is skipped."""
    assert kernels.AVAILABLE
    assert all(packed._works(layout) for layout in LAYOUTS)
    assert best_layout() in LAYOUTS


def reference(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    bias = None if linear.bias is None else linear.bias.double()
    return nn.functional.linear(x.double(), linear.weight.double(), bias).float()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_rows", [1, 2, 5, 6, 7, 13, 17, 64, 300])
@pytest.mark.parametrize(("num_in", "num_out"), [(48, 80), (7, 1), (1, 33), (300, 61)])
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_a_packed_layer_computes_what_it_did(
    layout: type[PackedLinear], num_rows: int, num_in: int, num_out: int, bias: bool
) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(num_in, num_out, bias=bias)
    layer = layout(linear.weight, linear.bias)
    x = torch.randn(2, num_rows, num_in)
    torch.testing.assert_close(layer(x), reference(linear, x), rtol=1e-5, atol=1e-5)
    assert torch.equal(layer.weight, linear.weight)


@pytest.mark.parametrize("threads", [1, 2, 3])
@torch.no_grad()
def test_threads_share_the_panels_without_a_gap(threads: int) -> None:
    torch.manual_seed(0)
    before = torch.get_num_threads()
    linear, x = nn.Linear(300, 16 * 7 + 5), torch.randn(9, 300)
    try:
        torch.set_num_threads(threads)
        got = PanelLinear(linear.weight, linear.bias)(x)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(got, reference(linear, x), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_row_is_the_same_bit_for_bit_whatever_is_beside_it() -> None:
    torch.manual_seed(0)
    layer = PanelLinear(torch.randn(100, 257), torch.randn(100))
    x = torch.randn(40, 257)
    alone = torch.cat([layer(row[None]) for row in x])
    for num_rows in (2, 3, 6, 7, 12, 17, 25, 40):
        assert torch.equal(layer(x[:num_rows]), alone[:num_rows])


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_rows_that_lie_apart_in_memory_are_read_right(layout: type[PackedLinear]) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(16, 8)
    x = torch.randn(16, 5).T
    got = layout(linear.weight, linear.bias)(x)
    torch.testing.assert_close(got, reference(linear, x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_rows_at_all_are_fine(layout: type[PackedLinear]) -> None:
    assert layout(torch.randn(8, 16), None)(torch.empty(0, 16)).shape == (0, 8)


def test_every_plain_layer_inside_is_replaced_and_no_other() -> None:
    class Own(nn.Linear):
        """Does what a packed layer could not know of."""

    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), Own(4, 4)), nn.ReLU())
    half = nn.Linear(4, 4, dtype=torch.bfloat16)
    model.append(half)
    assert pack_linears(model) is model
    kinds = [type(m) for m in model.modules() if not isinstance(m, nn.Sequential)]
    layout = best_layout()
    assert kinds == [layout, layout, Own, nn.ReLU, nn.Linear]


@pytest.mark.parametrize("num_out", [16, 61])
@torch.no_grad()
def test_no_bit_depends_on_the_width_of_vectors_or_the_number_of_rows(num_out: int) -> None:
    # Where there is no AVX-512 the narrow kernel is compared with itself: then only rows matter.
    torch.manual_seed(0)
    layer = PanelLinear(torch.randn(num_out, 300), torch.randn(num_out))
    x = torch.randn(40, 300)
    alone = torch.cat([layer(row[None]) for row in x])
    for rows in range(1, 41):
        for lanes in (8, 16):
            got = kernels.linear(x[:rows], layer._panels, layer._bias, num_out, lanes=lanes)
            assert torch.equal(got, alone[:rows])


@needs_pairs
@pytest.mark.parametrize("num_rows", [1, 2, 8, 9, 10, 17, 64, 300])
@pytest.mark.parametrize(("num_in", "num_out"), [(48, 80), (7, 1), (1, 33), (301, 61), (31, 16)])
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_pairs_multiply_what_was_rounded_and_sum_in_float32(
    num_rows: int, num_in: int, num_out: int, bias: bool
) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(num_in, num_out, bias=bias)
    layer = PairLinear(linear.weight, linear.bias)
    rounded = nn.Linear(num_in, num_out, bias=bias)
    rounded.weight.data = linear.weight.bfloat16().float()
    if bias:
        rounded.bias = linear.bias
    x = torch.randn(2, num_rows, num_in)
    expected = reference(rounded, x.bfloat16().float())
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(layer.weight, rounded.weight)


@needs_pairs
@pytest.mark.parametrize("num_in", [257, 300])
@torch.no_grad()
def test_a_row_of_pairs_is_the_same_bit_for_bit_whatever_is_beside_it(num_in: int) -> None:
    torch.manual_seed(0)
    before = torch.get_num_threads()
    layer = PairLinear(torch.randn(100, num_in), torch.randn(100))
    x = torch.randn(200, num_in)
    alone = torch.cat([layer(row[None]) for row in x])
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for num_rows in (2, 3, 9, 10, 17, 25, 40, 200):
                assert torch.equal(layer(x[:num_rows]), alone[:num_rows])
    finally:
        torch.set_num_threads(before)


@needs_pairs
@torch.no_grad()
def test_pairs_take_no_rows_and_rows_that_lie_apart() -> None:
    torch.manual_seed(0)
    layer, x = PairLinear(torch.randn(8, 16), None), torch.randn(16, 5).T
    assert layer(torch.empty(0, 16)).shape == (0, 8)
    assert torch.equal(layer(x), layer(x.contiguous()))


@needs_pairs
def test_products_in_bfloat16_are_taken_on_request_and_for_float32_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float16))
    pack_linears(model, torch.bfloat16)
    assert [type(m) for m in model] == [PairLinear, nn.Linear]


def test_where_no_layout_works_all_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "best_layout", lambda: None)
    linear = nn.Linear(4, 4)
    assert pack_linears(linear) is linear


@pytest.mark.parametrize(
    ("broken", "expected"),
    [({PanelLinear}, OnednnLinear), ({OnednnLinear}, PanelLinear), (set(LAYOUTS), None)],
)
def test_a_layout_that_computes_nonsense_here_is_not_taken(
    broken: set[type[PackedLinear]],
    expected: type[PackedLinear] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for layout in broken:
        monkeypatch.setattr(layout, "forward", lambda self, x: x.new_zeros(2, 20))
    assert best_layout.__wrapped__() is expected


def test_a_model_that_the_user_loaded_is_not_touched() -> None:
    model = tiny_model("llama")
    target = load_target(model)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    assert target.backend == "sdpa"
