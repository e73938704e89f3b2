"""SwiGLU as a torch module."""

import math
from typing import Tuple

import torch
from torch import Tensor, nn

from ..runtime.checks import is_floating
from . import checks
from .api import fused_swiglu


class FusedSwiGLU(nn.Module):
    """Both projections and the gate of a SwiGLU layer, with one packed weight.

        z = silu(x @ Wf[:, :hidden_dim]) * (x @ Wf[:, hidden_dim:])

    A drop-in for two nn.Linear and LigerSiLUMulFunction: [..., in_features] -> [..., hidden_dim].
    The parameter is `weight` [2 * hidden_dim, in_features], whose halves are nn.Linear weights
    without a copy. `Wf` [in_features, 2 * hidden_dim] is its transpose, a view of the same memory:
    what is written into one is in the other, and Wf.grad is the transpose of weight.grad.
    State dicts hold `weight`; those with `Wf` in its place are loaded as well.

    Args:
        in_features: width of the input.
        hidden_dim: width of the output.
        block: accepted for compatibility; tile sizes come from the tuned tables.
        weight_grad: False freezes the weight; its gradient then costs nothing.
        gate_first: whether the first half is the gate.
        device, dtype: of the weight, as in nn.Linear: fp32, bf16 or fp16.

    Raises:
        TypeError, ValueError: a size is no positive int, an input or a weight does not fit.

    Example:
        >>> layer = FusedSwiGLU(1024, 3072)
        >>> layer(torch.randn(2, 7, 1024)).shape
        torch.Size([2, 7, 3072])
    """

    def __init__(
        self, in_features: int, hidden_dim: int, block: int = 64,
        *, weight_grad: bool = True, gate_first: bool = True, device=None, dtype=None,
    ):  # fmt: skip
        super().__init__()
        checks.module_sizes(in_features, hidden_dim, block)
        checks.module_options(weight_grad, gate_first, device, dtype)
        self.in_features = in_features
        self.hidden_dim = hidden_dim
        self.block = block
        self.gate_first = gate_first
        stored = torch.empty(2 * hidden_dim, in_features, device=device, dtype=dtype)
        self.weight = nn.Parameter(stored, requires_grad=bool(weight_grad))
        self.reset_parameters()

    @property
    def Wf(self) -> Tensor:
        """weight.T [in_features, 2 * hidden_dim], and its gradient."""
        view = self.weight.t()
        if self.weight.grad is not None:
            view.grad = self.weight.grad.t()
        return view

    def __setattr__(self, name: str, value) -> None:
        """Assigning a parameter to Wf makes its transpose the parameter `weight`."""
        if name == "Wf":
            checks.packed_weight("Wf", value, self.in_features, 2 * self.hidden_dim)
            is_floating("Wf", value)
            stored = value.detach().t().contiguous()
            name, value = "weight", nn.Parameter(stored, requires_grad=value.requires_grad)
        super().__setattr__(name, value)

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        if prefix + "Wf" in state_dict and prefix + "weight" not in state_dict:
            state_dict[prefix + "weight"] = state_dict.pop(prefix + "Wf").t().contiguous()
        super()._load_from_state_dict(state_dict, prefix, *args)

    def reset_parameters(self) -> None:
        """Draws the weight uniformly from +-1 / sqrt(in_features), as nn.Linear does."""
        bound = 1 / math.sqrt(self.in_features)
        nn.init.uniform_(self.weight, -bound, bound)

    def weights(self) -> Tuple[Tensor, Tensor]:
        """(gate, up), each [hidden_dim, in_features], as views of `weight`."""
        checks.packed_weight("weight", self.weight, 2 * self.hidden_dim, self.in_features)
        first, second = self.weight.split(self.hidden_dim)
        return (first, second) if self.gate_first else (second, first)

    def forward(self, x: Tensor) -> Tensor:
        checks.module_input(x, self.in_features)
        return fused_swiglu(x, *self.weights())

    @classmethod
    def from_linears(cls, gate: nn.Linear, up: nn.Linear, **kwargs) -> "FusedSwiGLU":
        """Returns a module that computes silu(gate(x)) * up(x), with copies of the weights."""
        checks.linears(gate, up)
        module = cls(
            gate.in_features, gate.out_features,
            device=gate.weight.device, dtype=gate.weight.dtype, **kwargs,
        )  # fmt: skip
        with torch.no_grad():
            for half, linear in zip(module.weights(), (gate, up)):
                half.copy_(linear.weight)
        return module

    def to_linears(self) -> Tuple[nn.Linear, nn.Linear]:
        """Returns (gate, up) as nn.Linear without bias, with copies of the weights."""
        linears = []
        for half in self.weights():
            linear = nn.Linear(
                self.in_features, self.hidden_dim, bias=False, device=half.device, dtype=half.dtype
            )
            with torch.no_grad():
                linear.weight.copy_(half)
            linears.append(linear)
        return linears[0], linears[1]

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, hidden_dim={self.hidden_dim}"
