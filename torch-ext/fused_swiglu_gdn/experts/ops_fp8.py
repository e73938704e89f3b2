"""The routed experts in FP8 as an operation: forward and eager mode only, no operator."""

from typing import Optional

from torch import Tensor

from ..fp8.ops import EagerOperation
from . import reference
from .call import Fp8Experts

FP8 = ("experts.fp8", "fp8_experts_fwd")
FP8_EXPERTS = EagerOperation(*FP8, Fp8Experts, reference, together=True)


def fp8_experts(*tensors: Tensor) -> Optional[Tensor]:
    """sum_k weights[:, k] down(silu(gate(x)) * up(x)) of each token's experts, [T, H].

    tensors: those of Fp8Experts. None where no kernel serves. x and what down takes are quantised,
    a scale for 128 columns of a row.
    """
    _, w_gate_up, _, w_down, *_ = tensors
    if (w_gate_up.data_ptr() | w_down.data_ptr()) & 15:  # at which kernels read them
        return None
    return FP8_EXPERTS(tensors)
