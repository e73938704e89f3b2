"""SwiGLU with pointers: z = act(x Wg^T + bg) * (x Wu^T + bu) for any layout, size and dtype.

Sizes: M tokens, K model width, N hidden width. Derivation and measurements: docs/swiglu.md.
"""

from typing import Callable, Optional

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ...runtime import device, tuning
from ...runtime.copies import on_copies
from ...runtime.dtypes import SERVED
from ...runtime.launch import Launch
from ...runtime.ops import contiguous, dense, in_rows, rows_of
from ...runtime.primitives import activate, either, grouped_tile
from ...runtime.sizes import cdiv
from ..call import Swiglu
from .gate import gate_fwd

FAR = 2**23  # 128 rows this far apart still fit 32-bit offsets


@triton.jit(do_not_specialize=["M"])
def _swiglu_fwd_kernel(
    x_ptr,  # [M, K] strides (stride_x, 1)
    w_gate_ptr,  # [N, K] strides (stride_n, stride_k)
    w_up_ptr,  # [N, K] strides (stride_n, stride_k)
    b_gate_ptr,  # [N] or None
    b_up_ptr,  # [N] or None
    z_ptr,  # [M, N]
    M, N, K, stride_x, stride_n, stride_k,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, AMD: tl.constexpr,
):  # fmt: skip
    """z = act(x Wg^T + bg) * (x Wu^T + bu); a program makes one [BLOCK_M, BLOCK_N] tile.

    Rows of gate and up are interleaved in one operand, so one product makes both and a thread holds
    the two of a pair side by side: splitting them moves no data.
    """
    pid_m, pid_n = grouped_tile(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
    row = (pid_m * BLOCK_M).to(tl.int64)
    column = (pid_n * BLOCK_N).to(tl.int64)
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    pair = tl.arange(0, 2 * BLOCK_N)
    # 64-bit addresses of the tile, 32-bit offsets in it. Rows past the end of the weights read the
    # last row, those of x nothing: one token 16 times would be a hot line that all programs want
    x_ptr += row * stride_x
    w_ptr = either(pair % 2 == 0, w_gate_ptr, w_up_ptr, AMD) + column * stride_n  # [2 BLOCK_N]
    mask_m = row + offs_m < M
    rows_w = tl.minimum(pair // 2, N - 1 - column.to(tl.int32))
    offs_x = offs_m[:, None] * stride_x + offs_k[None, :]  # [BLOCK_M, BLOCK_K]
    offs_w = rows_w[None, :] * stride_n + offs_k[:, None] * stride_k  # [BLOCK_K, 2 BLOCK_N]
    acc = tl.zeros((BLOCK_M, 2 * BLOCK_N), tl.float32)
    for k in tl.range(0, K, BLOCK_K):
        w_ptrs = w_ptr[None, :] + tl.cast(k, tl.int64) * stride_k + offs_w
        if EVEN_K:
            x = tl.load(x_ptr + k + offs_x, mask=mask_m[:, None], other=0.0)  # [BLOCK_M, BLOCK_K]
            w = tl.load(w_ptrs)  # [BLOCK_K, 2 BLOCK_N]
        else:
            mask_k = offs_k < K - k
            x = tl.load(x_ptr + k + offs_x, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
            w = tl.load(w_ptrs, mask=mask_k[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
    gate, up = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N, 2)))  # [BLOCK_M, BLOCK_N] fp32
    mask_n = column + offs_n < N
    if b_gate_ptr is not None:
        b_gate = tl.load(b_gate_ptr + column + offs_n, mask=mask_n, other=0.0)  # [BLOCK_N]
        gate += b_gate.to(tl.float32)[None, :]
    if b_up_ptr is not None:
        b_up = tl.load(b_up_ptr + column + offs_n, mask=mask_n, other=0.0)  # [BLOCK_N]
        up += b_up.to(tl.float32)[None, :]
    z = (activate(gate, ACTIVATION) * up).to(z_ptr.dtype.element_ty)
    offs_z = offs_m[:, None] * N + offs_n[None, :]  # [BLOCK_M, BLOCK_N]
    tl.store(z_ptr + row * N + column + offs_z, z, mask=mask_m[:, None] & mask_n)


def prepare_swiglu_fwd(call: Swiglu) -> Optional[Callable]:
    """(x, w_gate, w_up, b_gate, b_up) -> z: one launch for fp16 and bf16.

    In fp16 and bf16 the bits of a row do not depend on the other rows, their number or the
    implementation: every path sums K in the same order (tests/swiglu/test_swiglu.py). In fp32
    cuBLAS decides: torch's own products and their tf32 setting.
    """
    x, w_gate, w_up, b_gate, b_up, (activation,) = call
    where, N = x.device, w_gate.shape[0]
    if x.dtype not in SERVED or activation == "gelu":
        return None
    shape = (*x.shape[:-1], N)
    if x.dtype == torch.float32 and device.is_gpu(where):
        return _by_products(shape, activation)
    if any([a is not b for a, b in zip(_readable(*call.tensors), call.tensors)]):
        return on_copies(prepare_swiglu_fwd, call, _readable)
    rows = rows_of(x)
    M, K = rows.shape
    config = tuning.lookup("portable_swiglu_fwd", where, M=M, N=N, K=K)
    tiles = cdiv(M, config["BLOCK_M"]) * cdiv(N, config["BLOCK_N"])
    blocks = tuple(config[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP"))
    even_k = K % config["BLOCK_K"] == 0
    kernel = Launch(
        _swiglu_fwd_kernel, tiles, where, numbers=(M, N, K, rows.stride(0), *w_gate.stride()),
        constexprs=(activation, "ieee", even_k, *blocks, device.is_amd(where)),
        options=tuple((name, config[name]) for name in ("num_warps", "num_stages")), guarded=True,
    )  # fmt: skip

    def run(x, w_gate, w_up, b_gate, b_up):
        z = x.new_empty(shape)
        kernel(x, w_gate, w_up, b_gate, b_up, z)
        return z

    return run


def in_dense_rows(x, w_gate, w_up, b_gate, b_up) -> tuple:
    """The tensors, x with rows at one stride and dense biases."""
    x = x if rows_of(x) is not None else contiguous(x)
    return x, w_gate, w_up, dense(b_gate), dense(b_up)


def _readable(*tensors: torch.Tensor) -> tuple:
    """The tensors, or copies: the kernel takes one pair of strides for both weights and 32-bit
    offsets inside a tile."""
    x, w_gate, w_up, *biases = in_dense_rows(*tensors)
    if rows_of(x).stride(0) > FAR:
        x = contiguous(x)
    if w_gate.stride() != w_up.stride() or max(w_gate.stride()) > FAR:
        w_gate, w_up = contiguous(w_gate), contiguous(w_up)
    return x, w_gate, w_up, *biases


def _by_products(shape: tuple, activation: str) -> Callable:
    def run(x, w_gate, w_up, b_gate, b_up):
        x = in_rows(x)
        return gate_fwd(F.linear(x, w_gate, b_gate), F.linear(x, w_up, b_up), activation).view(
            shape
        )

    return run
