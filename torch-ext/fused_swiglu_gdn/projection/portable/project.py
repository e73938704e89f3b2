"""Projections of a few tokens: y_i = x W_i^T for all i, in one launch.

A decoding step reads each weight once, so its time is that of the memory traffic; separate products
cost a launch each, and small ones little else. The weights are not copied. One token is computed by
portable/token.py, several by a product on tensor cores. A single weight of few rows has too few
tiles for a whole GPU: its K is then split among programs (split-K), and a second launch adds up the
parts.

Sizes: M tokens, K model width, N rows of all weights together.
"""

import math
from typing import Callable, Optional

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ...runtime import device, tuning
from ...runtime.copies import on_copies
from ...runtime.dtypes import HALF, served
from ...runtime.launch import Launch
from ...runtime.ops import contiguous, rows_of
from ...runtime.primitives import after_predecessor
from ...runtime.sizes import cdiv, next_power_of_2
from ..call import MAX_TOKENS, MAX_WEIGHTS, NormedProject, Project, TokenMlp, products
from .token import gated_token_kernel, normed_token_kernel, project_token_kernel, weight_of


def _takes(x, weights: list, activation: Optional[str]) -> bool:
    """True if the kernels compute products of x [M, K] and are faster than cuBLAS."""
    if x.dtype not in HALF:
        return False
    if activation is not None:  # of two weights alike
        alike = [w.shape for w in weights] == [weights[0].shape] * 2
        if activation == "gelu" or x.shape[0] != 1 or not alike:
            return False
    if len(weights) == 1 and x.shape[0] > 1 and parts_of_k(x, weights[0]) < 2:
        return False  # cuBLAS takes no longer
    M, K = x.shape
    fit = all(w.shape[1] == K and w.stride() == (K, 1) and w.data_ptr() % 16 == 0 for w in weights)
    return fit and 0 < M <= MAX_TOKENS and K % 64 == 0


def parts_of_k(x, weight) -> int:
    """Number of splits of K that fill the GPU, for several tokens and one weight.

    K is split on Hopper and later, where the launch that adds up the parts waits on the GPU.
    """
    if not device.overlaps_launches(x.device):
        return 1
    BLOCK_N = _split_config(x)["BLOCK_N"]
    tiles, most = cdiv(weight.shape[0], BLOCK_N), weight.shape[1] // 512
    return min(device.multiprocessor_count(x.device.index) // max(tiles, 1), most)


def _split_config(x) -> dict:
    return tuning.lookup("portable_project_split", x.device, M=_tile_of_parts(x.shape[0]))


def _tile_of_parts(M: int) -> int:
    """Rows of a tile for M tokens: 64 for wgmma, which is as fast for 32 tokens (H200)."""
    return 16 if M <= 16 else 64


@triton.jit(do_not_specialize=["M"])
def _project_few_kernel(
    x_ptr,  # [M, K] strides (stride_x, 1)
    w0_ptr,  # [rows0, K]
    w1_ptr,  # [rows1, K]
    w2_ptr,  # [rows2, K]
    w3_ptr,  # [rows3, K]
    w4_ptr,  # [rows4, K]
    w5_ptr,  # [rows5, K]
    y_ptr,  # [M, N], or [PARTS, M, N] fp32
    M, N, K, stride_x, rows0, rows1, rows2, rows3, rows4, rows5,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr,  # the next launch may begin before this one has ended
):  # fmt: skip
    """y = x [W_0; W_1; ...]^T; a program makes columns [BLOCK_M, BLOCK_N] of one weight and split
    of K."""
    after_predecessor(PDL)
    tile, w_ptr, rows, column = weight_of(
        tl.program_id(0), w0_ptr, w1_ptr, w2_ptr, w3_ptr, w4_ptr, w5_ptr, rows0, rows1, rows2,
        rows3, rows4, rows5, BLOCK_N,
    )  # fmt: skip
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    first, last = 0, K
    if PARTS > 1:
        step = tl.cdiv(K // BLOCK_K, PARTS) * BLOCK_K
        first = tl.program_id(1) * step
        last = tl.minimum(first + step, K)
        offs_k += first
        y_ptr += tl.program_id(1).to(tl.int64) * M * N
    # weight rows past the end read the last one, and nothing of them is stored; tokens past the end
    # are not read, for all programs would read the last one at once
    mask_m = (offs_m < M)[:, None]
    x_ptrs = x_ptr + offs_m[:, None] * stride_x + offs_k[None, :]
    w_row = tl.minimum(offs_n, rows - 1).to(tl.int64)
    w_ptrs = w_ptr + w_row[None, :] * K + offs_k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(first, last, BLOCK_K):
        x = tl.load(x_ptrs, mask=mask_m, other=0.0)  # [BLOCK_M, BLOCK_K]
        w = tl.load(w_ptrs, eviction_policy="evict_first")  # [BLOCK_K, BLOCK_N]
        acc = tl.dot(x, w, acc)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
    y = acc.to(y_ptr.dtype.element_ty)
    offs_y = offs_m[:, None] * N + column + offs_n[None, :]
    tl.store(y_ptr + offs_y, y, mask=mask_m & (offs_n < rows)[None, :])


@triton.jit
def add_parts_kernel(
    parts_ptr,  # [PARTS, size] fp32
    added_ptr,  # [size] or None
    y_ptr,  # [size]
    size,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,  # as above
):  # fmt: skip
    """y = sum of the parts in order, rounded; with `added`, that and y, rounded again."""
    after_predecessor(PDL)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        y += tl.load(parts_ptr + part * size + offs, mask=offs < size, other=0.0)
    y = y.to(y_ptr.dtype.element_ty)
    if added_ptr is not None:
        added = tl.load(added_ptr + offs, mask=offs < size, other=0.0)
        y = (added.to(tl.float32) + y.to(tl.float32)).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + offs, y, mask=offs < size)


def prepare_project_fwd(call: Project) -> Optional[Callable]:
    """(x, six weights or None) -> the products side by side; with an activation, act of the first
    times the second."""
    x, *weights, (activation, fp32) = call
    weights, rows = [w for w in weights if w is not None], rows_of(x)
    if rows is None:
        return on_copies(prepare_project_fwd, call, lambda x, *weights: (contiguous(x), *weights))
    if not _takes(rows, weights, activation):
        return None
    where, (M, K), sizes = x.device, rows.shape, [w.shape[0] for w in weights]
    width = sum(sizes) if activation is None else sizes[0]
    count, missing = len(weights), MAX_WEIGHTS - len(weights) if activation is None else 0
    parts = parts_of_k(rows, weights[0]) if M > 1 and count == 1 else 1
    pdl, sizes = device.overlaps_launches(where), (*sizes, *(0,) * missing)
    if parts > 1:
        options = dict(_split_config(rows))
    else:
        name = "portable_project_token" if M == 1 else "portable_project"
        options = dict(tuning.lookup(name, where, M=M, N=sum(sizes), K=K))
    BLOCK_N, BLOCK_K = options.pop("BLOCK_N"), options.pop("BLOCK_K")
    if activation is not None:
        pairs = max(1, BLOCK_N // 2)  # of rows that a program takes
        kernel, grid, numbers = gated_token_kernel, -(-sizes[0] // pairs), (K, sizes[0])
        constexprs = (activation, pairs, BLOCK_K, device.is_amd(where))
    else:
        grid = sum(-(-n // BLOCK_N) for n in sizes)
        kernel, numbers, constexprs = project_token_kernel, (K, *sizes), (BLOCK_N, BLOCK_K)
    if M > 1:
        # all tokens are in one tile; nothing past a row's end is read
        tokens = _tile_of_parts(M) if parts > 1 else max(16, next_power_of_2(M))
        kernel, numbers = _project_few_kernel, (M, width, K, rows.stride(0), *sizes)
        constexprs = (tokens, BLOCK_N, math.gcd(BLOCK_K, K), parts)
        grid = (grid, parts)
    launch = Launch(
        kernel, grid, where, numbers=numbers, constexprs=(*constexprs, pdl),
        options=tuple(options.items()), guarded=True, early=pdl,
    )  # fmt: skip
    shape, wide = (*x.shape[:-1], width), {"dtype": torch.float32} if fp32 else {}
    if parts > 1:
        return _added(launch, parts, shape, wide, pdl)

    def run(x, *weights):
        y = x.new_empty(shape, **wide)
        launch(x, *weights[:count], *weights[:1] * missing, y)
        return y

    return run


def _added(launch: Launch, parts: int, shape: tuple, wide: dict, pdl: bool) -> Callable:
    """The product with one weight, of which `launch` makes a sum's parts."""
    size = math.prod(shape)
    add = Launch(
        add_parts_kernel, cdiv(size, 1024), launch.device, numbers=(size,),
        constexprs=(parts, 1024, pdl), guarded=True, early=pdl,
    )  # fmt: skip

    def run(x, weight, *_):
        y = x.new_empty(shape, **wide)
        made = x.new_empty((parts, size), dtype=torch.float32)
        launch(x, *(weight,) * MAX_WEIGHTS, made)
        add(made, None, y)
        return y

    return run


def prepare_normed_project_fwd(call: NormedProject) -> Optional[Callable]:
    """(x, norm, w) -> y, of one token."""
    x, norm, w, (eps,) = call
    where, K = x.device, w.shape[1]
    alike = x.dtype is w.dtype and x.stride(-1) == norm.stride(0) == 1 and served(norm)
    if x.numel() != K or norm.shape != (K,) or not alike or not _takes(x.view(1, K), [w], None):
        return None
    options = dict(tuning.lookup("portable_project_token", where, M=1, N=w.shape[0], K=K))
    sizes, pdl = (options.pop("BLOCK_N"), options.pop("BLOCK_K")), device.overlaps_launches(where)
    launch = Launch(
        normed_token_kernel, -(-w.shape[0] // sizes[0]), where, numbers=(K, w.shape[0], eps),
        constexprs=(*sizes, pdl), options=tuple(options.items()), guarded=True, early=pdl,
    )  # fmt: skip
    shape = (*x.shape[:-1], w.shape[0])

    def run(x, norm, w):
        y = x.new_empty(shape)
        launch(x, norm, w, y)
        return y

    return run


def prepare_token_mlp_fwd(call: TokenMlp) -> Optional[Callable]:
    """(x, w_gate, w_up, w_down) -> y, two launches, or torch's product with w_down."""
    x, w_gate, w_up, w_down, (activation,) = call
    gated = prepare_project_fwd(products(x, (w_gate, w_up), activation))
    if gated is None:
        return None
    z = x.new_empty(*x.shape[:-1], w_gate.shape[0])
    down = prepare_project_fwd(products(z, (w_down,))) or F.linear
    return lambda x, w_gate, w_up, w_down: down(gated(x, w_gate, w_up), w_down)
