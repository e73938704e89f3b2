"""Triton helpers that kernels of more than one implementation share."""

import triton
import triton.language as tl


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The activation of a gate, x and result fp32.

    gelu_tanh: 0.5 x (1 + tanh(y)) = x sigmoid(2 y), y = sqrt(2/pi) (x + 0.044715 x^3).
    """
    tl.static_assert(ACTIVATION == "silu" or ACTIVATION == "gelu_tanh" or ACTIVATION == "relu")
    if ACTIVATION == "relu":
        return tl.where(x < 0.0, 0.0, x)
    if ACTIVATION == "gelu_tanh":
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    return x / (1.0 + tl.exp(-x))


@triton.jit
def grouped_tile(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """(row, column) of a tile, GROUP rows of tiles at a time so that L2 keeps their operands."""
    per_group = GROUP * tiles_n
    first = (tile // per_group) * GROUP
    rows = min(tiles_m - first, GROUP)
    return first + (tile % per_group) % rows, (tile % per_group) // rows
