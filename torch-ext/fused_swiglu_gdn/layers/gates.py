"""Gates on what attention gives, from a projection of their own: for each channel or each head."""

from typing import Callable, Dict

import torch
import torch.nn.functional as F

from ..runtime.dtypes import HALF


def softplus(gate: torch.Tensor) -> torch.Tensor:
    """softplus in at least fp32, in the dtype of the gate (Laguna)."""
    return F.softplus(gate.float() if gate.dtype in HALF else gate).to(gate.dtype)


GATE_FUNCTIONS: Dict[str, Callable] = {"softplus": softplus}
