"""Linear layers whose weights are laid out once, for models in float32 on a CPU.

A plain `torch.nn.Linear` has its weight laid out anew by every call of a few rows. Two layouts do
without: our own kernel (native/linear.c), which reads each weight from memory once while it
computes all rows, and oneDNN's. The first is used where it was built and the processor has AVX2; it
uses AVX-512 where there is. It has a second virtue: a row's result is the same bit for bit whatever
rows are beside it, so verifying a tree rounds these layers as plain decoding does.

A third one, taken on request, has weights and products in bfloat16 and all else in float32.
"""

from __future__ import annotations

import functools

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from ddtree.models import kernels

# The row count that oneDNN's layout is made for; it serves all others too.
_ROWS_HINT = 17


class PackedLinear(nn.Module):
    """A linear layer with a weight in another layout; it can only run.

    Args:
        weight: [out, in] float32 on the CPU; not kept.
        bias: [out] or None.
    """

    layout = ""

    def __init__(self, weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @property
    def weight(self) -> Float[Tensor, "out in"]:
        """The plain weight, laid out anew by every access."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """Shapes, as torch prints them for its own layers."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


class PanelLinear(PackedLinear):
    """Our own layout [panels, in, 16]: 16 neighbouring outputs side by side."""

    layout = "panels"

    def __init__(self, weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None) -> None:
        super().__init__(weight, bias)
        missing = -self.out_features % kernels.PANEL
        padded = functional.pad(weight.detach(), (0, 0, 0, missing))
        # torch aligns what it allocates to 64 bytes, as the kernel wants it.
        self._panels = padded.view(-1, kernels.PANEL, self.in_features).transpose(1, 2).contiguous()
        self._bias = None if bias is None else functional.pad(bias.detach(), (0, missing))

    @property
    def weight(self) -> Float[Tensor, "out in"]:
        """See `PackedLinear.weight`."""
        return self._panels.transpose(1, 2).reshape(-1, self.in_features)[: self.out_features]

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """As `torch.nn.Linear`, for float32 on the CPU."""
        return kernels.linear(x, self._panels, self._bias, self.out_features)


class PairLinear(PackedLinear):
    """Our own layout [panels, in / 2, 16, 2] in bfloat16, whose products are bfloat16's.

    Half the memory and up to twice the arithmetic of float32, where the processor has AVX512-BF16
    (`kernels.PAIRS_AVAILABLE`). Weights and inputs are rounded to bfloat16, sums are float32; a row
    has the same bits whatever is beside it, as in `PanelLinear`.
    """

    layout = "bfloat16 pairs"

    def __init__(self, weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None) -> None:
        super().__init__(weight, bias)
        missing = -self.out_features % kernels.PANEL
        padded = functional.pad(weight.detach().bfloat16(), (0, self.in_features % 2, 0, missing))
        paired = padded.view(-1, kernels.PANEL, padded.shape[1] // 2, 2)
        self._panels = paired.transpose(1, 2).contiguous()
        self._bias = None if bias is None else functional.pad(bias.detach(), (0, missing))

    @property
    def weight(self) -> Float[Tensor, "out in"]:
        """See `PackedLinear.weight`; float32, rounded to bfloat16."""
        padded = self._panels.transpose(1, 2).flatten(2).flatten(0, 1)
        return padded[: self.out_features, : self.in_features].float()

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """As `torch.nn.Linear`, from and to float32 on the CPU."""
        return kernels.linear_pairs(
            x, self._panels, self._bias, self.out_features, self.in_features
        )


class OnednnLinear(PackedLinear):
    """oneDNN's layout, through the operators that torch's own compiler uses."""

    layout = "onednn"

    def __init__(self, weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None) -> None:
        super().__init__(weight, bias)
        with torch.no_grad():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(
                weight.detach().contiguous(), _ROWS_HINT
            )

    @property
    def weight(self) -> Float[Tensor, "out in"]:
        """See `PackedLinear.weight`."""
        weight: Tensor = self._packed.to_dense()
        return weight

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """As `torch.nn.Linear`, for float32 on the CPU."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out


@functools.cache
def best_layout() -> type[PackedLinear] | None:
    """The layout for this machine; None where none of them works."""
    if kernels.AVAILABLE and _works(PanelLinear):
        return PanelLinear
    return OnednnLinear if _works(OnednnLinear) else None


def _works(layout: type[PackedLinear]) -> bool:
    """Whether it computes what it should here."""
    weight = torch.linspace(-1, 1, 240).view(20, 12)
    x = torch.linspace(-1, 1, 24).view(2, 12)
    try:
        got = layout(weight, None)(x)
    except (AttributeError, RuntimeError):  # torch's operators are there but not public
        return False
    return torch.allclose(got, functional.linear(x, weight), atol=1e-5)


def pack_linears(model: nn.Module, products: torch.dtype = torch.float32) -> nn.Module:
    """Replace every float32 CPU `torch.nn.Linear` inside `model`, in place, where that is possible.

    The model can then only run: not train, save or move to another device.

    Args:
        model: any.
        products: in which the layers multiply; bfloat16 where `kernels.PAIRS_AVAILABLE` alone.

    Returns:
        `model`, or its replacement if it is such a layer itself.
    """
    layout = PairLinear if products is torch.bfloat16 else best_layout()
    if layout is None:
        return model
    # Exactly this class: a subclass may do something else.
    if type(model) is nn.Linear and model.weight.dtype == torch.float32:
        on_cpu = model.weight.device.type == "cpu"
        return layout(model.weight, model.bias) if on_cpu else model
    for name, child in list(model.named_children()):
        setattr(model, name, pack_linears(child, products))
    return model
