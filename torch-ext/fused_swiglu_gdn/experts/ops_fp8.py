"""Chooses the implementation of routed experts in FP8: forward and eager mode only, no operator."""

from typing import Callable, Optional

from torch import Tensor

from ..runtime import dispatch
from ..runtime.cache import CallCache, fast_path_ok
from . import reference

FP8 = ("experts.fp8", "fp8_experts_fwd")
_calls = CallCache()


def fp8_experts(
    x: Tensor,  # [T, H] bf16
    w_gate_up: Tensor,  # [E, 2 I, H] e4m3: gate above up
    s_gate_up: Tensor,  # [E, 2 I / 128, H / 128] fp32, of 128 x 128 values
    w_down: Tensor,  # [E, H, I] e4m3
    s_down: Tensor,  # [E, H / 128, I / 128]
    ids: Tensor,  # [T, K] int32 or int64; outside [0, E): the expert is held elsewhere
    weights: Tensor,  # [T, K]
) -> Optional[Tensor]:  # [T, H]
    """sum_k weights[:, k] down(silu(gate(x)) * up(x)) of each token's experts; None where no kernel
    serves. x and what down takes are quantised, a scale for 128 columns of a row."""
    tensors = (x, w_gate_up, s_gate_up, w_down, s_down, ids, weights)
    free = fast_path_ok()
    launch = _calls.find(tensors, ()) if free else None
    if launch is None:
        launch = _chosen(free, *tensors)
    return None if launch is None else launch(*tensors)


def _chosen(free: bool, *tensors: Tensor) -> Optional[Callable]:
    plan = dispatch.plan(*FP8, False, tensors) if free else None
    if plan is not None:
        return _calls.keep(tensors, (), plan)
    launch = dispatch.choose(*FP8, False, tensors)
    if launch is None and dispatch.forced == "reference":
        return reference.fp8_experts_fwd
    return launch
