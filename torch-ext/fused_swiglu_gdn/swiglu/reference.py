"""SwiGLU (Shazeer 2020, arXiv:2002.05202) in plain torch.

    z = act(x Wg^T + bg) * (x Wu^T + bu)

Sizes: M tokens, K model width, N hidden width.
"""

from typing import Optional, Tuple

import torch
import torch.nn.functional as F

from ..runtime.dtypes import at_least_fp32

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
_aten = torch.ops.aten
SLOPES = {  # by d, the gradient of act(x), and x: the gradient of x
    "silu": _aten.silu_backward,
    "gelu": _aten.gelu_backward,
    "gelu_tanh": lambda d, x: _aten.gelu_backward(d, x, approximate="tanh"),
    "relu": lambda d, x: _aten.threshold_backward(d, x, 0),
}


def swiglu_fwd(
    x: torch.Tensor,  # [..., K]
    w_gate: torch.Tensor,  # [N, K]
    w_up: torch.Tensor,  # [N, K]
    b_gate: Optional[torch.Tensor],  # [N]
    b_up: Optional[torch.Tensor],  # [N]
    activation: str,
) -> torch.Tensor:
    """z [..., N] in the dtype of x; the gate is applied in fp32 and rounded once."""
    return silu_mul_fwd(F.linear(x, w_gate, b_gate), F.linear(x, w_up, b_up), activation)


def silu_mul_fwd(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gate) * up of tensors [..., N], in fp32, rounded once to their dtype."""
    return (ACTIVATIONS[activation](at_least_fp32(gate)) * at_least_fp32(up)).to(gate.dtype)


def silu_mul_bwd(
    gate: torch.Tensor,  # [..., N]
    up: torch.Tensor,  # [..., N]
    dz: torch.Tensor,  # [..., N]
    activation: str,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """dgate and dup [..., N]."""
    g, u, d = map(at_least_fp32, (gate, up, dz))
    d_gate = SLOPES[activation](d * u, g)
    return d_gate.to(gate.dtype), (d * ACTIVATIONS[activation](g)).to(up.dtype)
