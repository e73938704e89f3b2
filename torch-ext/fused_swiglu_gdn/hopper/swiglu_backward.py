"""Training SwiGLU with tensor descriptors (sm_90 and up): where they beat torch's own products.

    G = X Wg^T + bg,  U = X Wu^T + bu,  Z = act(G) * U,  Y = Z Wd^T
    dZ = dY Wd,  dG = dZ * U * act'(G),  dU = dZ * act(G),  dX = dG Wg + dU Wu

The forward writes G and U beside Z; dX is one product over both branches in one accumulator. The
other products are cuBLAS's, and dG, dU and Z are made in one pass (docs/swiglu.md has the times).

Sizes: M tokens, K model width, N hidden width, D output width of Wd.
"""

import functools

import torch
import triton
import triton.language as tl

from .. import device, tuning
from ..common.launch import prepare
from ..common.primitives import grouped_tile
from ..common.swiglu_gate import gate_bwd
from ..common.swiglu_gradients import projection_gradients
from .swiglu import choose, joined, launch, rows, supports_swiglu_fwd


def supports_swiglu_saving_fwd(x, w_gate, w_up, b_gate, b_up, activation) -> bool:
    dense = w_gate.stride(1) == 1
    return dense and supports_swiglu_fwd(x, w_gate, w_up, b_gate, b_up, activation)


def swiglu_saving_fwd(x, w_gate, w_up, b_gate, b_up, activation):
    """(z [M, N], gate_up [M, 2 N]): what swiglu_bwd and swiglu_mlp_bwd want of the forward."""
    (M, K), N = x.shape, w_gate.shape[0]
    gate_up = x.new_empty((M, 2 * N))  # [M, 2 N]
    how = choose(x.device, M, N, K, plain=True)
    z = launch(x, w_gate, w_up, b_gate, b_up, activation, *how, saved=gate_up.split(N, dim=1))
    return z, gate_up


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
        halves = tl.permute(tl.reshape(dx, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
        left, right = tl.split(halves)  # renames registers; the store needs half the memory
        dx_desc.store([row, column], left.to(dx_desc.dtype))
        dx_desc.store([row, column + BLOCK_N // 2], right.to(dx_desc.dtype))


@functools.lru_cache(maxsize=4096)
def _dx_plan(where: torch.device, dtype, M: int, K: int, up_first: bool):
    """(blocks, grid, rows of tiles to a group, prepared kernel)."""
    tile = tuning.lookup("hopper_swiglu_dx", where)
    blocks = (tile["BLOCK_M"], tile["BLOCK_N"], tile["BLOCK_K"])
    tiles_m = triton.cdiv(M, blocks[0])
    count = tiles_m * triton.cdiv(K, blocks[1])
    group = triton.cdiv(tiles_m, triton.cdiv(tiles_m, tile["GROUP"]))  # equal groups
    options = tuple((name, tile[name]) for name in ("num_warps", "num_stages"))
    prepared = prepare(_swiglu_dx_kernel, (up_first, *blocks), options, where, dtype)
    grid = (min(device.multiprocessor_count(where.index), count), 1, 1)
    return blocks, grid, group, prepared


def input_gradient(d_gate_up, w_gate, w_up) -> torch.Tensor:
    """dx [M, K] of d_gate_up [M, 2 N] and the weights [N, K]."""
    M, (N, K) = d_gate_up.shape[0], w_gate.shape
    dx = d_gate_up.new_empty((M, K))  # [M, K]
    up_first = w_gate.data_ptr() > w_up.data_ptr()
    (BM, BN, BK), grid, group, prepared = _dx_plan(dx.device, dx.dtype, M, K, up_first)
    with device.on(dx.device):
        d_desc = joined(*d_gate_up.split(N, dim=1), 1, BM, BK)
        w_desc = joined(w_gate, w_up, 1, BK, BN)
        prepared.launch(grid, d_desc, w_desc, rows(dx, BM, BN // 2), M, N, K, group)
    return dx


def _supports(x, w_gate, w_up, activation) -> bool:
    aligned = w_gate.shape[1] % 8 == 0
    return aligned and supports_swiglu_saving_fwd(x, w_gate, w_up, None, None, activation)


def supports_swiglu_bwd(dz, x, w_gate, w_up, gate_up, activation, needs) -> bool:
    return _supports(x, w_gate, w_up, activation)


def swiglu_bwd(dz, x, w_gate, w_up, gate_up, activation, needs):
    """(dx, dw, db_gate, db_up), None where not needed; overwrites gate_up.

    needs: x, w_gate, w_up, b_gate, b_up; dw: dw_gate above dw_up [2 N, K], or one of them [N, K].
    """
    gate_bwd(dz, gate_up, activation, with_z=False)
    return projection_gradients(gate_up, x, w_gate, w_up, needs, input_gradient)


def supports_swiglu_mlp_bwd(dy, x, w_gate, w_up, w_down, gate_up, activation, needs) -> bool:
    return _supports(x, w_gate, w_up, activation)


def swiglu_mlp_bwd(dy, x, w_gate, w_up, w_down, gate_up, activation, needs):
    """(dx, dw, db_gate, db_up, dw_down), None where not needed; overwrites gate_up.

    dy: [M, D]; w_down: [D, N]; needs, dw: as swiglu_bwd, and w_down. z, which dw_down needs, is
    made again from gate_up.
    """
    dz = torch.mm(dy, w_down)  # [M, N]
    z = gate_bwd(dz, gate_up, activation, with_z=needs[5])  # [M, N]
    del dz
    dw_down = torch.mm(dy.t(), z) if needs[5] else None  # [D, N]
    del z
    return (*projection_gradients(gate_up, x, w_gate, w_up, needs, input_gradient), dw_down)
