"""SwiGLU (Shazeer 2020, arXiv:2002.05202) in plain torch.

    z = act(x Wg^T + bg) * (x Wu^T + bu)

Sizes: M tokens, K model width, N hidden width.
"""

from typing import Optional

import torch
import torch.nn.functional as F

from ..runtime.dtypes import at_least_fp32

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def swiglu_fwd(
    x: torch.Tensor,  # [M, K]
    w_gate: torch.Tensor,  # [N, K]
    w_up: torch.Tensor,  # [N, K]
    b_gate: Optional[torch.Tensor],  # [N]
    b_up: Optional[torch.Tensor],  # [N]
    activation: str,
) -> torch.Tensor:
    """z [M, N] in the dtype of x; the gate is applied in fp32 and rounded once."""
    gate = at_least_fp32(F.linear(x, w_gate, b_gate))  # [M, N]
    up = at_least_fp32(F.linear(x, w_up, b_up))  # [M, N]
    return (ACTIVATIONS[activation](gate) * up).to(x.dtype)


def silu_mul(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gate) * up of tensors [..., N], in fp32, rounded once to their dtype."""
    return (ACTIVATIONS[activation](at_least_fp32(gate)) * at_least_fp32(up)).to(gate.dtype)
