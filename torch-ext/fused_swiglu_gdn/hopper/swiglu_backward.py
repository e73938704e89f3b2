"""Gradients of SwiGLU with tensor descriptors (sm_90 and up).

For Y = Z Wd^T, Z = act(G) * U, G = X Wg^T + bg, U = X Wu^T + bu:
    dZ = dY Wd,  dG = dZ * U * act'(G),  dU = dZ * act(G),  dX = dG Wg + dU Wu.
dZ exists only in registers; Z, which dWd = dY^T Z needs, is made again beside it.

Sizes: M tokens, K model width, N hidden width, O output width of Wd. docs/swiglu.md derives it.
"""

import triton
import triton.language as tl

from ..common.primitives import activate_with_slope, grouped_tile


@triton.jit
def _halves(x):
    """[BLOCK_M, 2 n] -> its left and right [BLOCK_M, n]: renames registers."""
    BLOCK_M: tl.constexpr = x.shape[0]
    n: tl.constexpr = x.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(x, (BLOCK_M, 2, n)), (0, 2, 1)))


@triton.jit
def _gate_slice(
    dz,  # [BLOCK_M, SLICE] fp32
    gate_desc,  # [M, N] in blocks [BLOCK_M, SLICE]: G, overwritten by dG
    up_desc,  # [M, N] in blocks [BLOCK_M, SLICE]: U, overwritten by dU
    z_desc,  # [M, N] in blocks [BLOCK_M, SLICE], or None
    row,
    column,
    ACTIVATION: tl.constexpr,
):
    """dG, dU and Z of one slice."""
    gate = gate_desc.load([row, column]).to(tl.float32)  # [BLOCK_M, SLICE]
    up = up_desc.load([row, column]).to(tl.float32)  # [BLOCK_M, SLICE]
    value, slope = activate_with_slope(gate, ACTIVATION)
    gate_desc.store([row, column], (dz * up * slope).to(gate_desc.dtype))
    up_desc.store([row, column], (dz * value).to(up_desc.dtype))
    if z_desc is not None:
        z_desc.store([row, column], (value * up).to(z_desc.dtype))


@triton.jit(do_not_specialize=["M", "N", "O", "group"])
def _swiglu_down_bwd_kernel(
    dy_desc,  # [M, O] in blocks [BLOCK_M, BLOCK_K]
    w_down_desc,  # [O, N] in blocks [BLOCK_K, BLOCK_N]
    gate_desc,  # [M, N] in blocks [BLOCK_M, BLOCK_N / 4]: G, overwritten by dG
    up_desc,  # [M, N] in blocks [BLOCK_M, BLOCK_N / 4]: U, overwritten by dU
    z_desc,  # [M, N] in blocks [BLOCK_M, BLOCK_N / 4], or None
    M,
    N,
    O,
    group,  # rows of tiles that are walked together
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """dZ = dY Wd, and from it dG, dU and Z; programs stride over tiles [BLOCK_M, BLOCK_N]."""
    SLICE: tl.constexpr = BLOCK_N // 4
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        pid_m, pid_n = grouped_tile(tile, tiles_m, tiles_n, group)
        row = pid_m * BLOCK_M
        column = pid_n * BLOCK_N
        dz = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, O, BLOCK_K):
            dy = dy_desc.load([row, k])  # [BLOCK_M, BLOCK_K]
            dz = tl.dot(dy, w_down_desc.load([k, column]), dz)
        left, right = _halves(dz)
        dz0, dz1 = _halves(left)
        _gate_slice(dz0, gate_desc, up_desc, z_desc, row, column, ACTIVATION)
        _gate_slice(dz1, gate_desc, up_desc, z_desc, row, column + SLICE, ACTIVATION)
        dz2, dz3 = _halves(right)
        _gate_slice(dz2, gate_desc, up_desc, z_desc, row, column + 2 * SLICE, ACTIVATION)
        _gate_slice(dz3, gate_desc, up_desc, z_desc, row, column + 3 * SLICE, ACTIVATION)


@triton.jit(do_not_specialize=["M", "N", "K", "group"])
def _swiglu_dx_kernel(
    d_desc,  # [2, M, N] in blocks [1, BLOCK_M, BLOCK_K]: dG and dU
    w_desc,  # [2, N, K] in blocks [1, BLOCK_K, BLOCK_N]
    dx_desc,  # [M, K] in blocks [BLOCK_M, BLOCK_N / 2]
    M,
    N,
    K,
    group,  # rows of tiles that are walked together
    UP_FIRST: tl.constexpr,  # in w_desc
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """dX = dG Wg + dU Wu in one accumulator; programs stride over tiles [BLOCK_M, BLOCK_N]."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(K, BLOCK_N)
    steps = tl.cdiv(N, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        pid_m, pid_n = grouped_tile(tile, tiles_m, tiles_n, group)
        row = pid_m * BLOCK_M
        column = pid_n * BLOCK_N
        dx = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(2 * steps):
            half = (step >= steps).to(tl.int32)
            n = (step - half * steps) * BLOCK_K
            d = d_desc.load([half, row, n]).reshape(BLOCK_M, BLOCK_K)
            w = w_desc.load([half ^ UP_FIRST, n, column]).reshape(BLOCK_K, BLOCK_N)
            dx = tl.dot(d, w, dx)
        left, right = _halves(dx)
        dx_desc.store([row, column], left.to(dx_desc.dtype))
        dx_desc.store([row, column + BLOCK_N // 2], right.to(dx_desc.dtype))
