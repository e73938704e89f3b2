"""The routed experts in FP8 as an operation: forward and eager mode only, no operator."""

from typing import Optional

import torch
from torch import Tensor

from ..runtime.eager_operation import EagerOperation
from . import reference
from .call import Fp8Experts

FP8 = ("experts.fp8", "fp8_experts_fwd")
FP8_EXPERTS = EagerOperation(*FP8, Fp8Experts, reference, together=True)


def fp8_experts(*tensors: Tensor) -> Optional[Tensor]:
    """sum_k weights[:, k] down(silu(gate(x)) * up(x)) of each token's experts, [T, H].

    tensors: those of Fp8Experts. None where no kernel serves. x and what down takes are quantised,
    a scale for 128 columns of a row.
    """
    x, w_gate_up, s_gate_up, w_down, s_down, *slots = tensors
    if (w_gate_up.data_ptr() | w_down.data_ptr()) & 15:  # at which kernels read them
        return None
    if s_gate_up.dtype is not torch.float32:  # e8m0
        tensors = (x, w_gate_up, s_gate_up.float(), w_down, s_down.float(), *slots)
    return FP8_EXPERTS(tensors)
