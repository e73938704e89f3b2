"""The kernels of the experts' gradients that no other pass has.

    dz[row] = w dout[token] Wd[e],  dgate = dz * up * act'(gate),  dup = dz * act(gate)
    dw[row] = <dout[token] Wd[e], z[row]>,  which is <dout[token], y[row]>: no y is kept
    dWg[e], dWu[e] = dgate^T x, dup^T x,  dWd[e] = dout^T (w z),  summed over the expert's rows

Sizes: T tokens, K slots, S = T K entries, E experts, H model width, I hidden width of an expert.
"""

from typing import Optional

import torch
import triton
import triton.language as tl

from ...runtime.primitives import grouped_tile
from .gate import gated_with_gradient
from .launching import box, launch
from .products import gathered, halves, programs
from .routing import entry_of_row, first_rows, most_tiles, tile_at


@triton.jit
def _piece(x, NUMBER: tl.constexpr, PIECES: tl.constexpr):
    """One of PIECES equal pieces of the columns of x, a power of two: nothing moves."""
    if PIECES == 1:
        return x
    else:
        left, right = halves(x)
        if NUMBER < PIECES // 2:
            return _piece(left, NUMBER, PIECES // 2)
        else:
            return _piece(right, NUMBER - PIECES // 2, PIECES // 2)


@triton.jit
def _gate_columns(
    dz,  # [BLOCK_M, BLOCK] fp32: dout Wd, not yet weighted
    gate_up_ptr, wz_ptr, weight, inside, row, column, I: tl.constexpr,
    ACTIVATION: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """dgate and dup over gate and up, and w z, of some columns; <dz, z> of each row."""
    BLOCK_M: tl.constexpr = dz.shape[0]
    BLOCK: tl.constexpr = dz.shape[1]
    offs_m, offs_n = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK)[None, :]
    mask = inside[:, None] & (column + offs_n < I)
    ptrs = gate_up_ptr + row.to(tl.int64) * 2 * I + column + (offs_m * 2 * I + offs_n)
    gate = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK]
    up = tl.load(ptrs + I, mask=mask, other=0.0).to(tl.float32)
    z, by_gate, by_up = gated_with_gradient(gate, up, ACTIVATION, LIMIT)
    part = tl.sum(dz * z, 1)
    if wz_ptr is not None:
        wz = (weight[:, None] * z).to(wz_ptr.dtype.element_ty)
        tl.store(wz_ptr + row.to(tl.int64) * I + column + (offs_m * I + offs_n), wz, mask=mask)
    dz *= weight[:, None]
    tl.store(ptrs, (dz * by_gate).to(gate_up_ptr.dtype.element_ty), mask=mask)
    tl.store(ptrs + I, (dz * by_up).to(gate_up_ptr.dtype.element_ty), mask=mask)
    return part


@triton.jit
def _gate_tile(
    w_desc, dout_ptr, gate_up_ptr, weights_ptr, wz_ptr, parts_ptr, entry_ptr, expert, row, end, n,
    H: tl.constexpr, I: tl.constexpr, TOP_K: tl.constexpr, ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = row + tl.arange(0, BLOCK_M)
    inside = rows < end
    entry = tl.load(entry_ptr + rows, mask=inside, other=0)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, H, BLOCK_K):
        dout = gathered(dout_ptr, entry // TOP_K, inside, k, H, BLOCK_K)
        w = w_desc.load([expert, k, n * BLOCK_N]).reshape(BLOCK_K, BLOCK_N)
        acc = tl.dot(dout, w, acc)
    weight = tl.load(weights_ptr + entry, mask=inside, other=0.0).to(tl.float32)
    part = tl.zeros((BLOCK_M,), tl.float32)
    for piece in tl.static_range(BLOCK_N // 32):  # 32 columns at a time: registers
        part += _gate_columns(
            _piece(acc, piece, BLOCK_N // 32), gate_up_ptr, wz_ptr, weight, inside, row,
            n * BLOCK_N + piece * 32, I, ACTIVATION, LIMIT,
        )  # fmt: skip
    if parts_ptr is not None:
        PARTS: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
        tl.store(parts_ptr + rows.to(tl.int64) * PARTS + n, part, mask=inside)


@triton.jit(do_not_specialize=["S", "E"])
def _gate_gradient_kernel(
    w_desc,  # [E, H, I] in blocks [1, BLOCK_K, BLOCK_N]
    dout_ptr,  # [T, H]
    gate_up_ptr,  # [S, 2 I] by rows: gate and up, overwritten by their gradients
    weights_ptr,  # [S] by entries
    wz_ptr,  # [S, I] by rows: w z; or None
    parts_ptr,  # [S, PARTS] fp32 by rows: <dout Wd, z> of each tile's columns; or None
    routing_ptr,
    S,
    E,
    H: tl.constexpr,
    I: tl.constexpr,
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    FLAT: tl.constexpr,
    TAILS: tl.constexpr,
):
    """dgate and dup over gate and up, w z, and the parts of dw; tiles [BLOCK_M, BLOCK_N]. With
    TAILS, tiles with few rows are computed in half the height."""
    tiles_m = tl.load(routing_ptr)
    PARTS: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    entry_ptr = entry_of_row(routing_ptr, E)
    for tile in tl.range(tl.program_id(0), tiles_m * PARTS, tl.num_programs(0), flatten=FLAT):
        m, n = grouped_tile(tile, tiles_m, PARTS, GROUP)
        expert, row, end = tile_at(routing_ptr, m, S, E)
        if TAILS and row + BLOCK_M // 2 >= end:
            _gate_tile(
                w_desc, dout_ptr, gate_up_ptr, weights_ptr, wz_ptr, parts_ptr, entry_ptr, expert,
                row, end, n, H, I, TOP_K, ACTIVATION, LIMIT, BLOCK_M // 2, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            _gate_tile(
                w_desc, dout_ptr, gate_up_ptr, weights_ptr, wz_ptr, parts_ptr, entry_ptr, expert,
                row, end, n, H, I, TOP_K, ACTIVATION, LIMIT, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip


def gate_gradient(
    dout: torch.Tensor,  # [T, H]
    w_down: torch.Tensor,  # [E, H, I]
    gate_up: torch.Tensor,  # [S, 2 I], overwritten
    weights: torch.Tensor,  # [T, K]
    routing: torch.Tensor,
    wz: Optional[torch.Tensor],  # [S, I], filled
    needs_weights: bool,
    activation: str,
    limit: Optional[float],
    height: int,
    config: dict,
) -> Optional[torch.Tensor]:  # [S, PARTS] fp32
    """Overwrites gate_up with its gradient; returns the parts of dw, if they are needed."""
    S, (E, H, I) = gate_up.shape[0], w_down.shape
    BN, BK = config["BLOCK_N"], config["BLOCK_K"]
    count = triton.cdiv(I, BN)
    parts = gate_up.new_empty((S, count), dtype=torch.float32) if needs_weights else None
    boxes, pointers = (box(w_down, 1, BK, BN),), (dout, gate_up, weights, wz, parts, routing)
    tiles = most_tiles(S, E, height) * count
    tile = (height, BN, BK, config["GROUP"], config["FLAT"], config["TAILS"])
    launch(
        _gate_gradient_kernel, programs(tiles, config, dout.device), boxes, pointers, (S, E),
        (H, I, weights.shape[1], activation, limit, *tile), config["num_warps"],
        config["num_stages"],
    )  # fmt: skip
    return parts


@triton.jit
def _expert_rows(ptr, token, rows, inside, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """Columns first to first + BLOCK of some rows: of [T, WIDTH] by token, or [S, WIDTH]."""
    if BY_TOKEN:
        return gathered(ptr, token, inside, first, WIDTH, BLOCK)
    else:
        return gathered(ptr, rows, inside, first, WIDTH, BLOCK)


@triton.jit(do_not_specialize=["S", "E"])
def _weight_gradient_kernel(
    rows_desc,  # a or b, whichever is by rows, in blocks [BLOCK_K, its BLOCK]; or None
    a_ptr,  # [S, M] by rows; A_BY_TOKEN: [T, M]
    b_ptr,  # [S, N] by rows; not A_BY_TOKEN: [T, N]
    out_ptr,  # [E, M, N]
    routing_ptr,
    S,
    E,
    M: tl.constexpr,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    A_BY_TOKEN: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    FLAT: tl.constexpr,
):
    """out[e] = a^T b over the rows of expert e, in their order; ADD: added to what is there.

    Programs stride over tiles [BLOCK_M, BLOCK_N] of experts; zeros where one has no rows. Rows
    behind an expert's last are another's: they count as zeros in both operands, since 0 * inf is
    NaN. With rows_desc only whole steps of BLOCK_K rows go that way, and the rest by pointers.
    """
    tiles_m: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    each: tl.constexpr = tiles_m * tiles_n
    entry_ptr = entry_of_row(routing_ptr, E)
    for tile in tl.range(tl.program_id(0), E * each, tl.num_programs(0), flatten=FLAT):
        expert = tile // each
        m, n = grouped_tile(tile % each, tiles_m, tiles_n, GROUP)
        start = tl.load(first_rows(routing_ptr) + expert)
        end = tl.load(first_rows(routing_ptr) + expert + 1)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if rows_desc is not None:
            whole = start + (end - start) // BLOCK_K * BLOCK_K
            for row in range(start, whole, BLOCK_K):
                token = tl.load(entry_ptr + row + tl.arange(0, BLOCK_K)) // TOP_K
                every = tl.full((BLOCK_K,), True, tl.int1)
                if A_BY_TOKEN:
                    a = gathered(a_ptr, token, every, m * BLOCK_M, M, BLOCK_M)
                    b = rows_desc.load([row, n * BLOCK_N])
                else:
                    a = rows_desc.load([row, m * BLOCK_M])
                    b = gathered(b_ptr, token, every, n * BLOCK_N, N, BLOCK_N)
                acc = tl.dot(a.T, b, acc)
            start = whole
        for row in range(start, end, BLOCK_K):
            rows = row + tl.arange(0, BLOCK_K)
            inside = rows < end
            token = tl.load(entry_ptr + rows, mask=inside, other=0) // TOP_K
            a = _expert_rows(a_ptr, token, rows, inside, m * BLOCK_M, M, BLOCK_M, A_BY_TOKEN)
            b = _expert_rows(b_ptr, token, rows, inside, n * BLOCK_N, N, BLOCK_N, not A_BY_TOKEN)
            acc = tl.dot(a.T, b, acc)
        offs_m = tl.arange(0, BLOCK_M)[:, None]
        offs_n = tl.arange(0, BLOCK_N)[None, :]
        first = out_ptr + (expert.to(tl.int64) * M + m * BLOCK_M) * N + n * BLOCK_N
        ptrs = first + (offs_m * N + offs_n)
        mask = (m * BLOCK_M + offs_m < M) & (n * BLOCK_N + offs_n < N)
        if ADD:
            acc += tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
        tl.store(ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


def weight_gradient(
    a: torch.Tensor,  # [S, M] by rows; a_by_token: [T, M]
    b: torch.Tensor,  # [S, N] by rows; not a_by_token: [T, N]
    routing: torch.Tensor,
    experts: int,
    top_k: int,
    a_by_token: bool,
    main_grad: Optional[torch.Tensor],  # [E, M, N] fp32: added to, in place of a new tensor
    config: dict,
) -> Optional[torch.Tensor]:  # [E, M, N]
    (M, N), S = (a.shape[1], b.shape[1]), (b if a_by_token else a).shape[0]
    out = a.new_empty((experts, M, N)) if main_grad is None else main_grad
    BM, BN = config["BLOCK_M"], config["BLOCK_N"]
    BK = config["BLOCK_K"]
    rows = None
    if config["COPY_ENGINE"]:
        rows = box(b, BK, BN) if a_by_token else box(a, BK, BM)
    tile = (BM, BN, BK, config["GROUP"], config["FLAT"])
    tiles = experts * triton.cdiv(M, BM) * triton.cdiv(N, BN)
    launch(
        _weight_gradient_kernel, programs(tiles, config, a.device),
        (rows,), (a, b, out, routing), (S, experts),
        (M, N, top_k, a_by_token, main_grad is not None, *tile), config["num_warps"],
        config["num_stages"],
    )  # fmt: skip
    return out if main_grad is None else None
