"""Projections of one token: weights go from memory to registers, without tensor cores.

Shared memory is not used, as in the kernels around this one in a decoding step; among kernels that
use it this gains nothing (docs/projection.md). Two tiles of a row are in flight while a third is
multiplied.
"""

import triton
import triton.language as tl

from ...runtime.primitives import activate, after_predecessor, either


@triton.jit
def _next_weight(tile, w_ptr, rows, column, next_ptr, next_rows, BLOCK_N: tl.constexpr):
    """Advances to the next weight, where there is one, if the tile is past the end of this one."""
    if next_ptr is not None:
        tiles = tl.cdiv(rows, BLOCK_N)
        past = tile >= tiles
        tile = tl.where(past, tile - tiles, tile)
        w_ptr = tl.where(past, next_ptr, w_ptr)
        column = tl.where(past, column + rows, column)
        rows = tl.where(past, next_rows, rows)
    return tile, w_ptr, rows, column


@triton.jit
def weight_of(
    tile, w0_ptr, w1_ptr, w2_ptr, w3_ptr, w4_ptr, w5_ptr, rows0, rows1, rows2, rows3, rows4, rows5,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Finds the weight of a tile: (tile index inside it, its pointer, its rows, its first column of
    y)."""
    column = 0
    w_ptr, rows = w0_ptr, rows0
    tile, w_ptr, rows, column = _next_weight(tile, w_ptr, rows, column, w1_ptr, rows1, BLOCK_N)
    tile, w_ptr, rows, column = _next_weight(tile, w_ptr, rows, column, w2_ptr, rows2, BLOCK_N)
    tile, w_ptr, rows, column = _next_weight(tile, w_ptr, rows, column, w3_ptr, rows3, BLOCK_N)
    tile, w_ptr, rows, column = _next_weight(tile, w_ptr, rows, column, w4_ptr, rows4, BLOCK_N)
    tile, w_ptr, rows, column = _next_weight(tile, w_ptr, rows, column, w5_ptr, rows5, BLOCK_N)
    return tile, w_ptr, rows, column


@triton.jit
def _dots(x_ptr, norm_ptr, row_ptrs, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """(sum_k x[k] norm[k] w[k] for the weight's rows at row_ptrs [BLOCK_N], fp32; the sum of the
    squares of x if there is a norm)."""
    offs_k = tl.arange(0, BLOCK_K)
    w_ptrs = row_ptrs[:, None] + offs_k[None, :]
    # a weight is read once: not to be kept. In masks of this form Triton sees 16 bytes as one
    w0 = tl.load(w_ptrs, (offs_k < K)[None, :], 0.0, eviction_policy="evict_first")
    near = (offs_k < K - BLOCK_K)[None, :]
    w1 = tl.load(w_ptrs + BLOCK_K, near, 0.0, eviction_policy="evict_first")
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for k in range(0, K, 2 * BLOCK_K):
        far = (offs_k < K - k - 2 * BLOCK_K)[None, :]
        w2 = tl.load(w_ptrs + k + 2 * BLOCK_K, far, 0.0, eviction_policy="evict_first")
        x0 = tl.load(x_ptr + k + offs_k, offs_k < K - k, 0.0).to(tl.float32)
        if norm_ptr is not None:
            squares += x0 * x0
            x0 *= tl.load(norm_ptr + k + offs_k, offs_k < K - k, 0.0).to(tl.float32)
        acc += w0.to(tl.float32) * x0[None, :]
        far = (offs_k < K - k - 3 * BLOCK_K)[None, :]
        w3 = tl.load(w_ptrs + k + 3 * BLOCK_K, far, 0.0, eviction_policy="evict_first")
        x1 = tl.load(x_ptr + k + BLOCK_K + offs_k, offs_k < K - k - BLOCK_K, 0.0).to(tl.float32)
        if norm_ptr is not None:
            squares += x1 * x1
            there = offs_k < K - k - BLOCK_K
            x1 *= tl.load(norm_ptr + k + BLOCK_K + offs_k, there, 0.0).to(tl.float32)
        acc += w1.to(tl.float32) * x1[None, :]
        w0, w1 = w2, w3
    return tl.sum(acc, 1), tl.sum(squares, 0)


@triton.jit
def project_token_kernel(
    x_ptr,  # [K]
    w0_ptr,  # [rows0, K]
    w1_ptr,  # [rows1, K]
    w2_ptr,  # [rows2, K]
    w3_ptr,  # [rows3, K]
    w4_ptr,  # [rows4, K]
    w5_ptr,  # [rows5, K]
    y_ptr,  # [N]
    K, rows0, rows1, rows2, rows3, rows4, rows5,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,  # this launch may begin before the last one has ended, the next one likewise
):  # fmt: skip
    """y = [W_0; W_1; ...] x; a program makes BLOCK_N numbers, from rows of one weight."""
    after_predecessor(PDL)
    tile, w_ptr, rows, column = weight_of(
        tl.program_id(0), w0_ptr, w1_ptr, w2_ptr, w3_ptr, w4_ptr, w5_ptr, rows0, rows1, rows2,
        rows3, rows4, rows5, BLOCK_N,
    )  # fmt: skip
    offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(offs_n, rows - 1).to(tl.int64)  # past the end the last one, and not stored
    y, _ = _dots(x_ptr, None, w_ptr + row * K, K, BLOCK_N, BLOCK_K)
    tl.store(y_ptr + column + offs_n, y.to(y_ptr.dtype.element_ty), mask=offs_n < rows)


@triton.jit
def gated_token_kernel(
    x_ptr,  # [K]
    w_gate_ptr,  # [N, K]
    w_up_ptr,  # [N, K]
    z_ptr,  # [N]
    K, N,
    ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, AMD: tl.constexpr,
    PDL: tl.constexpr,  # as above
):  # fmt: skip
    """z = act(W_gate x) * (W_up x); a program makes BLOCK_N numbers.

    Rows of both weights are interleaved, so that a thread holds the two of a pair side by side.
    """
    after_predecessor(PDL)
    pair = tl.arange(0, 2 * BLOCK_N)
    row = tl.minimum(tl.program_id(0) * BLOCK_N + pair // 2, N - 1).to(tl.int64)
    w_ptr = either(pair % 2 == 0, w_gate_ptr, w_up_ptr, AMD)
    products, _ = _dots(x_ptr, None, w_ptr + row * K, K, 2 * BLOCK_N, BLOCK_K)
    gate, up = tl.split(tl.reshape(products, (BLOCK_N, 2)))
    z = activate(gate, ACTIVATION) * up
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(z_ptr + offs_n, z.to(z_ptr.dtype.element_ty), mask=offs_n < N)


@triton.jit
def normed_token_kernel(
    x_ptr,  # [K]
    norm_ptr,  # [K]
    w_ptr,  # [N, K]
    y_ptr,  # [N]
    K, N, eps,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,  # as above
):  # fmt: skip
    """y = W (x / rms(x) * norm); a program makes BLOCK_N numbers."""
    after_predecessor(PDL)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(offs_n, N - 1).to(tl.int64)
    y, squares = _dots(x_ptr, norm_ptr, w_ptr + row * K, K, BLOCK_N, BLOCK_K)
    y *= tl.rsqrt(squares / K + eps)
    tl.store(y_ptr + offs_n, y.to(y_ptr.dtype.element_ty), mask=offs_n < N)
