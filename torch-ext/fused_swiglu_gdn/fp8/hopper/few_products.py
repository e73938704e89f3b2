"""Products of few tokens in e4m3 with block scales: w x^T by wgmma, weights as its rows.

A step is 128 columns, over which all scales are constant: its product is made in fp32 by wgmmas and
added once it is scaled: acc = fma(part, s_x s_w, acc). Scales are read a step ahead. The last step
may have fewer columns. Tokens are
columns of the product and never meet, so what stands in those past the last may be anything.

Sizes: M tokens, P of them with padding, K columns, N rows of all weights together.
"""

import triton
import triton.language as tl

from ...projection.portable.token import weight_of
from ...runtime.primitives import activate
from ..call import BLOCK, PLAIN_ROWS
from ..portable.dequantise import weight_scale
from ..portable.quantise import codes_of, scale_of

_BLOCK, _PLAIN_ROWS = tl.constexpr(BLOCK), tl.constexpr(PLAIN_ROWS)


@triton.jit
def _columns(ptrs, k, K: tl.constexpr, mask, POLICY: tl.constexpr):
    """Columns of step k [.., 128], of which the last step may have fewer. mask [.., 1] or None."""
    if K // _BLOCK * _BLOCK < K:
        here = k * _BLOCK + tl.arange(0, _BLOCK)[None, :] < K
        mask = here if mask is None else mask & here
    if mask is None:
        x = tl.load(ptrs + k * _BLOCK, eviction_policy=POLICY)
    else:
        x = tl.load(ptrs + k * _BLOCK, mask=mask, other=0.0, eviction_policy=POLICY)
    return x


@triton.jit
def _part(w_ptrs, x_ptrs, k, mask_m, K: tl.constexpr):
    """The product of step k, [ROWS, BLOCK_M]."""
    x = _columns(x_ptrs, k, K, mask_m[:, None], "")  # [BLOCK_M, 128]
    w = _columns(w_ptrs, k, K, None, "evict_first")  # [ROWS, 128]
    return tl.dot(w, x.T)


@triton.jit
def _scales(x_scales, w_scales, k, P, mask_m):
    """Returns the scales of step k: of tokens [BLOCK_M], and of the weight."""
    return tl.load(x_scales + k * P, mask=mask_m, other=0.0), weight_scale(w_scales + k)


@triton.jit
def _begin(
    tile, x_ptr, w_ptr, count, M, K: tl.constexpr, SHARE: tl.constexpr, BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """(tokens, rows of the weight, mask of the tokens, first step, pointers to the first columns of
    both operands) of a tile; a program takes SHARE steps of K."""
    offs_m, offs_k = tl.arange(0, BLOCK_M), tl.arange(0, _BLOCK)
    offs_n = tile * ROWS + tl.arange(0, ROWS)
    mask_m = offs_m < M
    # rows past the end read the last one, and nothing of them is stored
    w_row = tl.minimum(offs_n, count - 1).to(tl.int64)
    first = tl.program_id(1) * SHARE
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    w_ptrs = w_ptr + w_row[:, None] * K + offs_k[None, :]
    x_ptrs = x_ptr + offs_m[:, None] * K + offs_k[None, :]
    return offs_m, offs_n, mask_m, first, w_ptrs, x_ptrs


@triton.jit
def _end(acc, y_ptr, offs_m, offs_n, mask_m, count, column, N):
    """Stores a tile of y from `column` on."""
    offs_y = offs_m[None, :] * N + column + offs_n[:, None]
    mask = mask_m[None, :] & (offs_n < count)[:, None]
    tl.store(y_ptr + offs_y, acc.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _few_tile(
    tile, x_ptr, x_scale_ptr, w_ptr, s_ptr, y_ptr, count, column, M, N, P, K: tl.constexpr,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Columns of y from `column` on: x times ROWS rows of a weight in FP8 with `count` of them."""
    blocks: tl.constexpr = (K + _BLOCK - 1) // _BLOCK
    share: tl.constexpr = (blocks + PARTS - 1) // PARTS
    offs_m, offs_n, mask_m, first, w_ptrs, x_ptrs = _begin(
        tile, x_ptr, w_ptr, count, M, K, share, BLOCK_M, ROWS, PDL
    )
    w_scales = s_ptr + tile * ROWS // _BLOCK * blocks
    x_scales = x_scale_ptr + offs_m
    y_ptr += tl.program_id(1).to(tl.int64) * M * N
    acc = tl.zeros((ROWS, BLOCK_M), tl.float32)
    after = tl.minimum(first, blocks - STEPS)  # a last part of K may be empty
    x_scale0, w_scale0 = _scales(x_scales, w_scales, after, P, mask_m)
    if STEPS > 1:
        x_scale1, w_scale1 = _scales(x_scales, w_scales, after + 1, P, mask_m)
    for k in range(first, tl.minimum(first + share, blocks), STEPS):
        after = tl.minimum(k + STEPS, blocks - STEPS)
        x_after0, w_after0 = _scales(x_scales, w_scales, after, P, mask_m)
        part0 = _part(w_ptrs, x_ptrs, k, mask_m, K)
        if STEPS > 1:
            x_after1, w_after1 = _scales(x_scales, w_scales, after + 1, P, mask_m)
            part1 = _part(w_ptrs, x_ptrs, k + 1, mask_m, K)
        acc += part0 * (x_scale0 * w_scale0)[None, :]
        x_scale0, w_scale0 = x_after0, w_after0
        if STEPS > 1:
            acc += part1 * (x_scale1 * w_scale1)[None, :]
            x_scale1, w_scale1 = x_after1, w_after1
    _end(acc, y_ptr, offs_m, offs_n, mask_m, count, column, N)


@triton.jit
def _plain_tile(
    tile, x_ptr, w_ptr, y_ptr, count, column, M, N, K: tl.constexpr, BLOCK_M: tl.constexpr,
    PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same of a weight in bf16, by x in bf16."""
    blocks: tl.constexpr = (K + _BLOCK - 1) // _BLOCK
    share: tl.constexpr = (blocks + PARTS - 1) // PARTS
    offs_m, offs_n, mask_m, first, w_ptrs, x_ptrs = _begin(
        tile, x_ptr, w_ptr, count, M, K, share, BLOCK_M, _PLAIN_ROWS, PDL
    )
    y_ptr += tl.program_id(1).to(tl.int64) * M * N
    acc = tl.zeros((_PLAIN_ROWS, BLOCK_M), tl.float32)
    for k in tl.range(first, tl.minimum(first + share, blocks), num_stages=3):
        x = _columns(x_ptrs, k, K, mask_m[:, None], "")
        acc = tl.dot(_columns(w_ptrs, k, K, None, ""), x.T, acc)
    _end(acc, y_ptr, offs_m, offs_n, mask_m, count, column, N)


@triton.jit(do_not_specialize=["M", "P"])
def few_kernel(
    x_ptr,  # [P, K] e4m3
    x_scale_ptr,  # [ceil(K / 128), P]
    w0_ptr,  # [rows0, K] e4m3; None for weights behind the last one, and their scales
    w1_ptr, w2_ptr, w3_ptr, w4_ptr, w5_ptr,
    s0_ptr,  # [ceil(rows0 / 128), ceil(K / 128)] fp32, or uint8 for e8m0
    s1_ptr, s2_ptr, s3_ptr, s4_ptr, s5_ptr,
    tokens_ptr,  # [M, K] bf16, where there are weights in bf16
    p0_ptr,  # [plain0, K] bf16
    p1_ptr,
    y_ptr,  # [M, N], or [PARTS, M, N] fp32
    M, N, P, rows0, rows1, rows2, rows3, rows4, rows5, plain0, plain1,
    K: tl.constexpr, BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,  # of a weight that a program takes: they share a block of scales
    STEPS: tl.constexpr,  # 1 or 2 products are on their way at once
    PARTS: tl.constexpr,
    PDL: tl.constexpr,  # it may begin before what it follows has ended
):  # fmt: skip
    """y = x [W_0; W_1; ...]^T of one part of K, and behind it the products with weights in bf16,
    which the first programs make."""
    rows = (rows0, rows1, rows2, rows3, rows4, rows5)
    others = 0
    if p0_ptr is not None:
        tiles0 = tl.cdiv(plain0, _PLAIN_ROWS)
        others = tiles0 + tl.cdiv(plain1, _PLAIN_ROWS)
    tile, w_ptr, count, column = weight_of(
        tl.program_id(0) - others, w0_ptr, w1_ptr, w2_ptr, w3_ptr, w4_ptr, w5_ptr, *rows, ROWS
    )
    _, s_ptr, _, _ = weight_of(
        tl.program_id(0) - others, s0_ptr, s1_ptr, s2_ptr, s3_ptr, s4_ptr, s5_ptr, *rows, ROWS
    )
    if p0_ptr is None:
        _few_tile(
            tile, x_ptr, x_scale_ptr, w_ptr, s_ptr, y_ptr, count, column, M, N, P, K, BLOCK_M, ROWS,
            STEPS, PARTS, PDL,
        )  # fmt: skip
    elif tl.program_id(0) >= others:
        _few_tile(
            tile, x_ptr, x_scale_ptr, w_ptr, s_ptr, y_ptr, count, column, M, N, P, K, BLOCK_M, ROWS,
            STEPS, PARTS, PDL,
        )  # fmt: skip
    else:
        second = tl.program_id(0) >= tiles0
        tile = tl.where(second, tl.program_id(0) - tiles0, tl.program_id(0))
        column = N - plain1 - tl.where(second, 0, plain0)
        _plain_tile(
            tile, tokens_ptr, tl.where(second, p1_ptr, p0_ptr), y_ptr,
            tl.where(second, plain1, plain0), column, M, N, K, BLOCK_M, PARTS, PDL,
        )  # fmt: skip


@triton.jit
def _rounded(x):
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit(do_not_specialize=["M", "P"])
def few_gate_kernel(
    gate_desc,  # [N, K] e4m3 in blocks [128, 128]
    up_desc,
    x_desc,  # [P, K] e4m3 in blocks [BLOCK_M, 128]
    x_scale_ptr,  # [ceil(K / 128), P]
    gate_scale_ptr,  # [ceil(N / 128), ceil(K / 128)]
    up_scale_ptr,
    z_ptr,  # [P, N] e4m3
    z_scale_ptr,  # [ceil(N / 128), P]
    M, P,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """z = silu(x Wg^T) * (x Wu^T) of 128 columns, rounded to bf16 as often as torch's operations
    are, quantised. Rows of z past M are not written."""
    steps: tl.constexpr = (K + _BLOCK - 1) // _BLOCK
    tile = tl.program_id(0)
    offs_n = tile * _BLOCK + tl.arange(0, _BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    offs_m = tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    gate_scales, up_scales = gate_scale_ptr + tile * steps, up_scale_ptr + tile * steps
    gate = tl.zeros((_BLOCK, BLOCK_M), tl.float32)
    up = tl.zeros((_BLOCK, BLOCK_M), tl.float32)
    for k in range(0, steps):
        x_scale = tl.load(x_scale_ptr + k * P + offs_m, mask=mask_m, other=0.0)
        gate_scale, up_scale = weight_scale(gate_scales + k), weight_scale(up_scales + k)
        x = x_desc.load([0, k * _BLOCK])
        first = tl.dot(gate_desc.load([tile * _BLOCK, k * _BLOCK]), x.T)
        second = tl.dot(up_desc.load([tile * _BLOCK, k * _BLOCK]), x.T)
        gate += first * (x_scale * gate_scale)[None, :]
        up += second * (x_scale * up_scale)[None, :]
    z = _rounded(_rounded(activate(_rounded(gate), "silu")) * _rounded(up))
    scale = scale_of(z, 0)
    offs_z = offs_m[None, :] * N + offs_n[:, None]
    mask = mask_m[None, :] & (offs_n < N)[:, None]
    tl.store(z_ptr + offs_z, codes_of(z, scale, 0), mask=mask)
    tl.store(z_scale_ptr + tile * P + offs_m, scale, mask=mask_m)
