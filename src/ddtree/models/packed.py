"""Linear layers whose weights are laid out once for oneDNN: the float32 CPU path.

A plain `torch.nn.Linear` has its weight laid out anew by every call of a few rows. Packed, a
forward of 1 to 64 rows takes about two thirds of the time, and no row count is slower (lab log).
"""

from __future__ import annotations

import functools

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

# The row count that the layout is made for; it serves all others too.
_ROWS_HINT = 17


class PackedLinear(nn.Module):
    """A linear layer with a packed weight, for inference alone.

    Args:
        weight: [out, in] float32 on the CPU; not kept.
        bias: [out] or None.
    """

    def __init__(self, weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        with torch.no_grad():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(
                weight.detach().contiguous(), _ROWS_HINT
            )
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @property
    def weight(self) -> Float[Tensor, "out in"]:
        """The plain weight, unpacked anew by every access."""
        weight: Tensor = self._packed.to_dense()
        return weight

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """As `torch.nn.Linear`."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out

    def extra_repr(self) -> str:
        """Shapes, as torch prints them for its own layers."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


@functools.cache
def can_pack() -> bool:
    """Whether this torch has the packed path, and it computes what it should."""
    try:
        if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return False
        weight = torch.linspace(-1, 1, 96).view(8, 12)
        x = torch.linspace(-1, 1, 24).view(2, 12)
        got = PackedLinear(weight, None)(x)
        return torch.allclose(got, functional.linear(x, weight), atol=1e-5)
    except (AttributeError, RuntimeError):  # the operators are torch's own, not public
        return False


def pack_linears(model: nn.Module) -> nn.Module:
    """Replace every float32 CPU `torch.nn.Linear` inside `model`, in place, where that is possible.

    The model can then only run: not train, save or move to another device.

    Returns:
        `model`, or its replacement if it is such a layer itself.
    """
    if not can_pack():
        return model
    # Exactly this class: a subclass may do something else.
    if type(model) is nn.Linear and model.weight.dtype == torch.float32:
        on_cpu = model.weight.device.type == "cpu"
        return PackedLinear(model.weight, model.bias) if on_cpu else model
    for name, child in list(model.named_children()):
        setattr(model, name, pack_linears(child))
    return model
