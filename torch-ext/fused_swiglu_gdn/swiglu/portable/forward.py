"""SwiGLU with pointers: z = act(x Wg^T + bg) * (x Wu^T + bu) for any layout, size and dtype.

Sizes: M tokens, K model width, N hidden width. Derivation and measurements: docs/swiglu.md.
"""

import functools
from typing import Optional

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ...runtime import device, tuning
from ...runtime.dtypes import SERVED
from ...runtime.launch import Launch
from ...runtime.primitives import activate, either, grouped_tile
from .gate import gate_fwd

FAR = 2**23  # 128 rows this far apart still fit 32-bit offsets


def supports_swiglu_fwd(x, w_gate, w_up, b_gate, b_up, activation) -> bool:
    return x.dtype in SERVED and activation != "gelu"


@triton.jit(do_not_specialize=["M"])
def _swiglu_fwd_kernel(
    x_ptr,  # [M, K] strides (stride_x, 1)
    w_gate_ptr,  # [N, K] strides (stride_n, stride_k)
    w_up_ptr,  # [N, K] strides (stride_n, stride_k)
    b_gate_ptr,  # [N] or None
    b_up_ptr,  # [N] or None
    z_ptr,  # [M, N]
    M,
    N,
    K,
    stride_x,
    stride_n,
    stride_k,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    AMD: tl.constexpr,
):
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


@functools.lru_cache(maxsize=4096)
def _plan(
    where: torch.device, M: int, N: int, K: int, stride_x: int, strides: tuple, activation: str
) -> Launch:
    """strides: of both weights."""
    config = tuning.lookup("portable_swiglu_fwd", where, M=M, N=N, K=K)
    tiles = triton.cdiv(M, config["BLOCK_M"]) * triton.cdiv(N, config["BLOCK_N"])
    blocks = tuple(config[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP"))
    even_k = K % config["BLOCK_K"] == 0
    constexprs = (activation, "ieee", even_k, *blocks, device.is_amd(where))
    options = tuple((name, config[name]) for name in ("num_warps", "num_stages"))
    return Launch(
        _swiglu_fwd_kernel, tiles, where, numbers=(M, N, K, stride_x, *strides),
        constexprs=constexprs, options=options,
    )  # fmt: skip


def _launch(x, w_gate, w_up, b_gate, b_up, activation) -> torch.Tensor:
    """z [M, N] by the kernel above.

    The kernel takes one pair of strides for both weights and 32-bit offsets inside a tile, so other
    operands are copied first.
    """
    (M, K), N = x.shape, w_gate.shape[0]
    stride_x, strides = x.stride(0), w_gate.stride()
    if strides != w_up.stride() or max(strides) > FAR:
        return _launch(x, w_gate.contiguous(), w_up.contiguous(), b_gate, b_up, activation)
    if stride_x > FAR:
        return _launch(x.contiguous(), w_gate, w_up, b_gate, b_up, activation)
    z = x.new_empty((M, N))  # [M, N]
    kernel = _plan(x.device, M, N, K, stride_x, strides, activation)
    kernel(x, w_gate, w_up, b_gate, b_up, z)
    return z


def plan_swiglu_fwd(x, w_gate, w_up, b_gate, b_up, activation):
    """Returns a function that makes, for a shape of z, swiglu_fwd for all matching calls; or
    None."""
    (M, K), N, strides = x.shape, w_gate.shape[0], w_gate.stride()
    if x.dtype == torch.float32 or strides != w_up.stride() or max(*strides, x.stride(0)) > FAR:
        return None
    kernel = _plan(x.device, M, N, K, x.stride(0), strides, activation)

    def bind(shape: tuple):
        def run(x, w_gate, w_up, b_gate, b_up):
            z = x.new_empty(shape)
            kernel(x, w_gate, w_up, b_gate, b_up, z)
            return z

        return run

    return bind


def swiglu_fwd(
    x: torch.Tensor,  # [M, K], last dimension dense
    w_gate: torch.Tensor,  # [N, K], any strides
    w_up: torch.Tensor,  # [N, K], any strides
    b_gate: Optional[torch.Tensor],  # [N]
    b_up: Optional[torch.Tensor],  # [N]
    activation: str,
) -> torch.Tensor:  # [M, N]
    """One launch for fp16 and bf16; fp32 uses torch's own products and their tf32 setting.

    In fp16 and bf16 the bits of a row do not depend on the other rows, their number or the
    implementation: every path sums K in the same order (tests/test_swiglu.py). In fp32 cuBLAS
    decides.
    """
    if x.dtype == torch.float32 and device.is_gpu(x.device):
        return gate_fwd(F.linear(x, w_gate, b_gate), F.linear(x, w_up, b_up), activation)
    return _launch(x, w_gate, w_up, b_gate, b_up, activation)
