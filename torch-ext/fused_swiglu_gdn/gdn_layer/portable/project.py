"""The input projections of a GDN layer for a few tokens: y_i = x W_i^T for all i, in one launch.

A decoding step reads each weight once, so its time is that of memory; separate products pay a
launch each, and the small ones (b and a) little else. The weights stay where they are.

Sizes: M tokens, K model width, N rows of all weights together.
"""

import math
from typing import List

import torch
import triton
import triton.language as tl

from ...runtime import device, tuning
from ...runtime.cache import CallCache
from ...runtime.dtypes import HALF
from ...runtime.launch import Launch

MAX_WEIGHTS, MAX_TOKENS = 6, 64


def supports_gdn_project_fwd(x, weights) -> bool:
    if x.dtype not in HALF or not 1 <= len(weights) <= MAX_WEIGHTS:
        return False
    dense = all(w.stride() == (w.shape[1], 1) and w.data_ptr() % 16 == 0 for w in weights)
    fits = 0 < x.shape[0] <= MAX_TOKENS and x.shape[1] % 64 == 0
    return dense and fits and x.stride(1) == 1


@triton.jit
def _next_weight(tile, w_ptr, rows, column, next_ptr, next_rows, BLOCK_N: tl.constexpr):
    """Moves on to the next weight if the tile lies past this one."""
    tiles = tl.cdiv(rows, BLOCK_N)
    past = tile >= tiles
    return (
        tl.where(past, tile - tiles, tile),
        tl.where(past, next_ptr, w_ptr),
        tl.where(past, next_rows, rows),
        tl.where(past, column + rows, column),
    )


@triton.jit(do_not_specialize=["M"])
def _gdn_project_fwd_kernel(
    x_ptr,  # [M, K] strides (stride_x, 1)
    w0_ptr,  # [rows0, K]
    w1_ptr,  # [rows1, K]
    w2_ptr,  # [rows2, K]
    w3_ptr,  # [rows3, K]
    w4_ptr,  # [rows4, K]
    w5_ptr,  # [rows5, K]
    y_ptr,  # [M, N]
    M,
    N,
    K,
    stride_x,
    rows0,
    rows1,
    rows2,
    rows3,
    rows4,
    rows5,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,  # the next launch may begin before this one has ended
):
    """y = x [W_0; W_1; ...]^T; a program makes the columns [BLOCK_M, BLOCK_N] of one weight."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    column = 0
    tile, w_ptr, rows = tl.program_id(0), w0_ptr, rows0
    tile, w_ptr, rows, column = _next_weight(tile, w_ptr, rows, column, w1_ptr, rows1, BLOCK_N)
    tile, w_ptr, rows, column = _next_weight(tile, w_ptr, rows, column, w2_ptr, rows2, BLOCK_N)
    tile, w_ptr, rows, column = _next_weight(tile, w_ptr, rows, column, w3_ptr, rows3, BLOCK_N)
    tile, w_ptr, rows, column = _next_weight(tile, w_ptr, rows, column, w4_ptr, rows4, BLOCK_N)
    tile, w_ptr, rows, column = _next_weight(tile, w_ptr, rows, column, w5_ptr, rows5, BLOCK_N)
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    # weight rows past the end read the last one, and nothing of them is stored; tokens past the end
    # are not read, for all programs would read the last one at once
    mask_m = (offs_m < M)[:, None]
    x_ptrs = x_ptr + offs_m[:, None] * stride_x + offs_k[None, :]
    w_row = tl.minimum(offs_n, rows - 1).to(tl.int64)
    w_ptrs = w_ptr + w_row[None, :] * K + offs_k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(0, K, BLOCK_K):
        x = tl.load(x_ptrs, mask=mask_m, other=0.0)  # [BLOCK_M, BLOCK_K]
        w = tl.load(w_ptrs, eviction_policy="evict_first")  # [BLOCK_K, BLOCK_N]
        acc = tl.dot(x, w, acc)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
    y = acc.to(y_ptr.dtype.element_ty)
    offs_y = offs_m[:, None] * N + column + offs_n[None, :]
    tl.store(y_ptr + offs_y, y, mask=mask_m & (offs_n < rows)[None, :])


class Projection:
    """The products of all calls of a kind: the facts of x [M, K] and of the weights [N_i, K]."""

    __slots__ = ("kernel", "device", "dtype", "width", "missing")

    def __init__(self, x, *weights):
        (M, K), rows = x.shape, [w.shape[0] for w in weights]
        self.device, self.dtype, self.width = x.device, x.dtype, sum(rows)
        self.missing = MAX_WEIGHTS - len(weights)
        options = dict(tuning.lookup("portable_gdn_project_fwd", x.device, M=M, N=self.width, K=K))
        BLOCK_M = max(16, triton.next_power_of_2(M))  # all tokens are in one tile
        BLOCK_N = options.pop("BLOCK_N")
        BLOCK_K = math.gcd(options.pop("BLOCK_K"), K)  # nothing past a row's end is read
        numbers = (M, self.width, K, x.stride(0), *rows, *(0,) * self.missing)
        tiles = sum(-(-n // BLOCK_N) for n in rows)
        blocks = (BLOCK_M, BLOCK_N, BLOCK_K, device.overlaps_launches(x.device))
        self.kernel = Launch(
            _gdn_project_fwd_kernel, tiles, x.device, numbers=numbers, constexprs=blocks,
            options=tuple(options.items()), guarded=True,
        )  # fmt: skip

    def __call__(self, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        """x [..., K] with M rows in all -> [..., N]."""
        y = torch.empty((*x.shape[:-1], self.width), dtype=self.dtype, device=self.device)
        self.kernel(x, *weights, *weights[:1] * self.missing, y)
        return y


_projections = CallCache()


def plan_gdn_project_fwd(x: torch.Tensor, weights: List[torch.Tensor]) -> Projection:
    """What serves all calls like this one, from the tensors alone."""
    return _projections.get(Projection, (x, *weights), ())


def gdn_project_fwd(
    x: torch.Tensor,  # [M, K], last dimension dense
    weights: List[torch.Tensor],  # [N_i, K] each
) -> torch.Tensor:  # [M, N]
    """The products side by side."""
    return plan_gdn_project_fwd(x, weights)(x, *weights)
