"""Ordinary modules with parameters."""

import math
from typing import Tuple

import torch
from torch import Tensor, nn

from . import checks
from .api import fused_swiglu


class FusedSwiGLU(nn.Module):
    """Both projections and the gate of a SwiGLU layer, with one packed weight.

        z = silu(x @ Wf[:, :hidden_dim]) * (x @ Wf[:, hidden_dim:])

    A drop-in for two nn.Linear and LigerSiLUMulFunction: [..., in_features] -> [..., hidden_dim].
    `Wf` [in_features, 2 * hidden_dim] is shown in that shape and lies transposed in memory, so
    that both halves are nn.Linear weights without a copy.

    Args:
        in_features: width of the input.
        hidden_dim: width of the output.
        block: accepted for compatibility; tile sizes come from the tuned tables.
        weight_grad: False freezes Wf; its gradient then costs nothing.
        gate_first: whether the first half of Wf is the gate.
    """

    def __init__(
        self,
        in_features: int,
        hidden_dim: int,
        block: int = 64,
        *,
        weight_grad: bool = True,
        gate_first: bool = True,
        device=None,
        dtype=None,
    ):
        super().__init__()
        checks.module_sizes(in_features, hidden_dim, block)
        self.in_features = in_features
        self.hidden_dim = hidden_dim
        self.block = block
        self.gate_first = gate_first
        stored = torch.empty(2 * hidden_dim, in_features, device=device, dtype=dtype)
        self.Wf = nn.Parameter(stored.t(), requires_grad=weight_grad)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in +-1 / sqrt(in_features), as nn.Linear."""
        bound = 1 / math.sqrt(self.in_features)
        nn.init.uniform_(self.Wf, -bound, bound)

    def weights(self) -> Tuple[Tensor, Tensor]:
        """(gate, up), each [hidden_dim, in_features], as views of Wf."""
        checks.packed_weight(self.Wf, self.in_features, self.hidden_dim)
        first, second = self.Wf.t().split(self.hidden_dim)
        return (first, second) if self.gate_first else (second, first)

    def forward(self, x: Tensor) -> Tensor:
        checks.module_input(x, self.in_features)
        return fused_swiglu(x, *self.weights())

    @classmethod
    def from_linears(cls, gate: nn.Linear, up: nn.Linear, **kwargs) -> "FusedSwiGLU":
        """The module that computes silu(gate(x)) * up(x); the weights are copied."""
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
        """(gate, up) as nn.Linear without bias; the weights are copied."""
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
