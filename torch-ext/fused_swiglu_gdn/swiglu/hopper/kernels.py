"""Kernels of swiglu/hopper/forward.py: tiles of z = act(x Wg^T + bg) * (x Wu^T + bu).

Sizes: M tokens, K model width, N hidden width. Descriptors carry shape and strides of an operand;
TMA fills with zeros what a load reads outside of it, and drops what a store writes there.
"""

import triton
import triton.language as tl

from ...runtime.primitives import activate, grouped_tile


@triton.jit
def _gate_and_store(
    gate,  # [BLOCK_M, BLOCK_N] fp32
    up,  # [BLOCK_M, BLOCK_N] fp32
    b_gate_ptr,  # [N] or None
    b_up_ptr,  # [N] or None
    z_desc,  # [M, N] in blocks [BLOCK_M, BLOCK_N]
    row, column, N,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Stores z = act(gate + bg) * (up + bu) to the tile at (row, column)."""
    BLOCK_N: tl.constexpr = gate.shape[1]
    offs_n = column + tl.arange(0, BLOCK_N)
    if b_gate_ptr is not None:
        gate += tl.load(b_gate_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    if b_up_ptr is not None:
        up += tl.load(b_up_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    z_desc.store([row, column], (activate(gate, ACTIVATION) * up).to(z_desc.dtype))


@triton.jit
def _gate_up(acc, UP_FIRST: tl.constexpr):
    """Splits [BLOCK_M, 2 n] into gate and up [BLOCK_M, n]; registers are only renamed."""
    n: tl.constexpr = acc.shape[1] // 2
    first, second = tl.split(tl.permute(tl.reshape(acc, (acc.shape[0], 2, n)), (0, 2, 1)))
    if UP_FIRST:
        return second, first
    else:
        return first, second


@triton.jit
def _joined_product(
    x_desc,  # [M, K] in blocks [BLOCK_M, BLOCK_K]
    w_desc,  # [2, N, K] in blocks [2, BLOCK_N, BLOCK_K]
    row, column, K,
    UP_FIRST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x Wg^T and x Wu^T, [BLOCK_M, BLOCK_N] fp32 each, by one product of width 2 BLOCK_N."""
    acc = tl.zeros((BLOCK_M, 2 * BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        x = x_desc.load([row, k])  # [BLOCK_M, BLOCK_K]
        w = w_desc.load([0, column, k]).reshape(2 * BLOCK_N, BLOCK_K)
        acc = tl.dot(x, w.T, acc)
    return _gate_up(acc, UP_FIRST)


@triton.jit(do_not_specialize=["M", "N", "K", "whole", "group"])
def swiglu_fwd_kernel(
    x_desc,  # [M, K] in blocks [BLOCK_M, BLOCK_K]
    w_desc,  # [2, N, K] in blocks [2, BLOCK_N, BLOCK_K]
    z_desc,  # [M, N] in blocks [BLOCK_M, BLOCK_N]
    w_half_desc,  # [2, N, K] in blocks [2, BLOCK_N / 2, BLOCK_K], or None
    z_half_desc,  # [M, N] in blocks [BLOCK_M, BLOCK_N / 2], or None
    b_gate_ptr,  # [N] or None
    b_up_ptr,  # [N] or None
    M, N, K,
    whole,  # tiles made whole; those after it are made in halves, one a program
    group,  # rows of tiles that are walked together
    ACTIVATION: tl.constexpr, UP_FIRST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """z = act(x Wg^T + bg) * (x Wu^T + bu); programs stride over tiles [BLOCK_M, BLOCK_N]."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), whole, tl.num_programs(0), flatten=True):
        pid_m, pid_n = grouped_tile(tile, tiles_m, tiles_n, group)
        row = pid_m * BLOCK_M
        column = pid_n * BLOCK_N
        gate, up = _joined_product(
            x_desc, w_desc, row, column, K, UP_FIRST, BLOCK_M, BLOCK_N, BLOCK_K
        )
        _gate_and_store(gate, up, b_gate_ptr, b_up_ptr, z_desc, row, column, N, ACTIVATION)
    if w_half_desc is not None:
        HALF: tl.constexpr = BLOCK_N // 2
        tile = whole + tl.program_id(0) // 2
        if tile < tiles_m * tiles_n:
            pid_m, pid_n = grouped_tile(tile, tiles_m, tiles_n, group)
            row = pid_m * BLOCK_M
            column = pid_n * BLOCK_N + (tl.program_id(0) % 2) * HALF
            gate, up = _joined_product(
                x_desc, w_half_desc, row, column, K, UP_FIRST, BLOCK_M, HALF, BLOCK_K
            )
            _gate_and_store(gate, up, b_gate_ptr, b_up_ptr, z_half_desc, row, column, N, ACTIVATION)


@triton.jit(do_not_specialize=["M", "N", "K", "group"])
def swiglu_three_quarter_fwd_kernel(
    x_desc,  # [M, K] in blocks [BLOCK_M, BLOCK_K]
    w_half_desc,  # [2, N, K] in blocks [2, BLOCK_N / 2, BLOCK_K]
    w_quarter_desc,  # [2, N, K] in blocks [2, BLOCK_N / 4, BLOCK_K]
    z_half_desc,  # [M, N] in blocks [BLOCK_M, BLOCK_N / 2]
    z_quarter_desc,  # [M, N] in blocks [BLOCK_M, BLOCK_N / 4]
    b_gate_ptr,  # [N] or None
    b_up_ptr,  # [N] or None
    M, N, K,
    group,  # rows of tiles that are walked together
    ACTIVATION: tl.constexpr, UP_FIRST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """swiglu_fwd_kernel in tiles of 3/4 BLOCK_N columns, one a program, for sizes that fill the GPU
    so.

    The width of a block must be a power of two, so a tile is made of a half and a quarter of
    BLOCK_N.
    """
    HALF: tl.constexpr = BLOCK_N // 2
    QUARTER: tl.constexpr = BLOCK_N // 4
    tiles_n = tl.cdiv(N, HALF + QUARTER)
    pid_m, pid_n = grouped_tile(tl.program_id(0), tl.cdiv(M, BLOCK_M), tiles_n, group)
    row = pid_m * BLOCK_M
    column = pid_n * (HALF + QUARTER)
    half = tl.zeros((BLOCK_M, 2 * HALF), tl.float32)
    quarter = tl.zeros((BLOCK_M, 2 * QUARTER), tl.float32)
    for k in range(0, K, BLOCK_K):
        x = x_desc.load([row, k])  # [BLOCK_M, BLOCK_K]
        w_half = w_half_desc.load([0, column, k]).reshape(2 * HALF, BLOCK_K)
        half = tl.dot(x, w_half.T, half)
        w_quarter = w_quarter_desc.load([0, column + HALF, k]).reshape(2 * QUARTER, BLOCK_K)
        quarter = tl.dot(x, w_quarter.T, quarter)
    gate, up = _gate_up(half, UP_FIRST)
    _gate_and_store(gate, up, b_gate_ptr, b_up_ptr, z_half_desc, row, column, N, ACTIVATION)
    column += HALF
    gate, up = _gate_up(quarter, UP_FIRST)
    _gate_and_store(gate, up, b_gate_ptr, b_up_ptr, z_quarter_desc, row, column, N, ACTIVATION)


@triton.jit(do_not_specialize=["M", "N", "K", "group"])
def swiglu_wf_fwd_kernel(
    x_desc,  # [M, K] in blocks [BLOCK_M, BLOCK_K]
    w_gate_desc,  # [K, N] in blocks [BLOCK_K, BLOCK_N]
    w_up_desc,  # [K, N] in blocks [BLOCK_K, BLOCK_N]
    z_desc,  # [M, N] in blocks [BLOCK_M, BLOCK_N]
    b_gate_ptr,  # [N] or None
    b_up_ptr,  # [N] or None
    M, N, K,
    group,  # rows of tiles that are walked together
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """swiglu_fwd_kernel for weights whose hidden dimension is contiguous: two products a step.

    The loop is not flattened: with two accumulators that would serialize the products
    (docs/swiglu.md).
    """
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        pid_m, pid_n = grouped_tile(tile, tiles_m, tiles_n, group)
        row = pid_m * BLOCK_M
        column = pid_n * BLOCK_N
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            x = x_desc.load([row, k])  # [BLOCK_M, BLOCK_K]
            gate = tl.dot(x, w_gate_desc.load([k, column]), gate)
            up = tl.dot(x, w_up_desc.load([k, column]), up)
        _gate_and_store(gate, up, b_gate_ptr, b_up_ptr, z_desc, row, column, N, ACTIVATION)
