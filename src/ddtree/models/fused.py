"""Norms and feed-forward layers that run in one call of the compiled kernels.

For the float32 CPU models that we load: what stands between the packed linear layers would
otherwise be a dozen small calls of torch per layer, a quarter of a forward of a single row.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralMLP, MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP, Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from ddtree.models import kernels

# All four are one formula; a class that is not named here may be another.
_NORMS = (LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm)
_MLPS = (LlamaMLP, MistralMLP, Qwen2MLP, Qwen3MLP)


class FusedRMSNorm(nn.Module):
    """RMSNorm as Llama's family has it; it can only run.

    Args:
        weight: [d] float32 on the CPU.
        eps: added to the mean square.
    """

    def __init__(self, weight: Float[Tensor, " d"], eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().contiguous(), requires_grad=False)
        self.eps = eps

    def forward(self, x: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:
        """Normalise each row."""
        return kernels.rms_norm(x, self.weight, self.eps)


class FusedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)); it can only run.

    Args:
        gate_proj, up_proj, down_proj: linear layers, kept as they are.
    """

    def __init__(self, gate_proj: nn.Module, up_proj: nn.Module, down_proj: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj

    def forward(self, x: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:
        """Feed each row forward."""
        out: Tensor = self.down_proj(kernels.swiglu(self.gate_proj(x), self.up_proj(x)))
        return out


def fuse_layers(model: nn.Module) -> nn.Module:
    """Replace the norms and feed-forward layers inside `model` that have a fused twin, in place.

    Layers that are not float32 on the CPU, or of a class or activation that is not known, stay. The
    model can then only run.

    Returns:
        `model`, or its replacement if it is such a layer itself.
    """
    twin = _twin(model) if kernels.AVAILABLE else None
    if twin is not None:
        return twin
    for name, child in list(model.named_children()):
        setattr(model, name, fuse_layers(child))
    return model


def is_llamas_norm(layer: object) -> bool:
    """Whether it is an RMSNorm as Llama's family has it."""
    return type(layer) in _NORMS


def is_llamas_mlp(layer: object) -> bool:
    """Whether it is a gated feed-forward layer as Llama's family has it."""
    return type(layer) in _MLPS and isinstance(layer.act_fn, nn.SiLU | SiLUActivation)  # type: ignore[attr-defined]


def _twin(layer: nn.Module) -> nn.Module | None:
    if is_llamas_norm(layer):
        weight, eps = layer.get_parameter("weight"), layer.variance_epsilon
        assert isinstance(eps, float)
        return FusedRMSNorm(weight, eps) if kernels.runs_here(weight) else None
    if is_llamas_mlp(layer):
        parts = [layer.get_submodule(name) for name in ("gate_proj", "up_proj", "down_proj")]
        return FusedMLP(*parts) if kernels.runs_here(*layer.parameters()) else None
    return None
