"""The gate of an expert and its gradient, for the kernels of experts/."""

import triton
import triton.language as tl

from ...runtime.primitives import activate, activate_with_slope
from ..call import ALPHA

_ALPHA, _BY_ALPHA = tl.constexpr(ALPHA), tl.constexpr(1 / ALPHA)


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr):
    """act(gate) * up, all fp32; with a LIMIT, act(min(gate, LIMIT)) * clamp(up, -LIMIT, LIMIT).

    swigluoai: silu(ALPHA gate) / ALPHA * (up + 1).
    """
    if LIMIT is not None:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    if ACTIVATION == "swigluoai":
        return activate(gate * _ALPHA, "silu") * (_BY_ALPHA * (up + 1.0))
    else:
        return activate(gate, ACTIVATION) * up


@triton.jit
def gated_with_gradient(
    gate, up, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, PTX: tl.constexpr = False
):
    """(z, dz/dgate, dz/dup) of z = gated(gate, up), all fp32. PTX: as for activate_with_slope."""
    if LIMIT is not None:
        gate_passes = gate <= LIMIT
        up_passes = (up <= LIMIT) & (up >= -LIMIT)
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    if ACTIVATION == "swigluoai":
        up = up + 1.0
        value, slope = activate_with_slope(gate * _ALPHA, "silu", PTX)
        value = _BY_ALPHA * value
    else:
        value, slope = activate_with_slope(gate, ACTIVATION, PTX)
    by_gate = up * slope
    by_up = value
    if LIMIT is not None:
        by_gate = tl.where(gate_passes, by_gate, 0.0)
        by_up = tl.where(up_passes, by_up, 0.0)
    return value * up, by_gate, by_up
