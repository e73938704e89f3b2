"""SwiGLU with tensor descriptors (sm_90 and up): z = act(x Wg^T + bg) * (x Wu^T + bu).

Sizes: M tokens, K model width, N hidden width. Derivation and measurements: docs/swiglu.md.
"""

import functools
from typing import Optional

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .. import device, tuning
from ..common.primitives import activate, grouped_tile


def _aligned(x) -> bool:
    """Address and row stride as the copy engine wants them."""
    return x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0


def supports_swiglu_fwd(x, w_gate, w_up, b_gate, b_up, activation) -> bool:
    (M, K), N = x.shape, w_gate.shape[0]
    least = tuning.lookup("hopper_swiglu_fwd", x.device)["least_rows"]
    if M < least or K < 1 or N % 8 or x.dtype not in (torch.float16, torch.bfloat16):
        return False
    if w_gate.stride() != w_up.stride() or x.stride(0) < K or not _aligned(x):
        return False
    if w_gate.stride(1) != 1:  # Wf [K, 2 N]
        return w_gate.stride(0) == 1 and _aligned(w_gate.t()) and _aligned(w_up.t())
    apart = abs(w_gate.data_ptr() - w_up.data_ptr())
    return _aligned(w_gate) and _aligned(w_up) and 0 < apart < 2**40 and w_gate.stride(0) > 0


@triton.jit
def _gate_and_store(
    gate,  # [BLOCK_M, BLOCK_N] fp32
    up,  # [BLOCK_M, BLOCK_N] fp32
    b_gate_ptr,  # [N] or None
    b_up_ptr,  # [N] or None
    z_desc,  # [M, N] in blocks [BLOCK_M, BLOCK_N]
    row,
    column,
    N,
    ACTIVATION: tl.constexpr,
):
    """z = act(gate + bg) * (up + bu) into the tile at (row, column)."""
    BLOCK_N: tl.constexpr = gate.shape[1]
    offs_n = column + tl.arange(0, BLOCK_N)
    if b_gate_ptr is not None:
        gate += tl.load(b_gate_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    if b_up_ptr is not None:
        up += tl.load(b_up_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    z_desc.store([row, column], (activate(gate, ACTIVATION) * up).to(z_desc.dtype))


@triton.jit
def _joined_product(
    x_desc,  # [M, K] in blocks [BLOCK_M, BLOCK_K]
    w_desc,  # [2, N, K] in blocks [2, BLOCK_N, BLOCK_K]
    row,
    column,
    K,
    UP_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """x Wg^T and x Wu^T, [BLOCK_M, BLOCK_N] fp32 each, by one product of width 2 BLOCK_N."""
    acc = tl.zeros((BLOCK_M, 2 * BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        x = x_desc.load([row, k])  # [BLOCK_M, BLOCK_K]
        w = w_desc.load([0, column, k]).reshape(2 * BLOCK_N, BLOCK_K)
        acc = tl.dot(x, w.T, acc)
    acc = tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1))
    first, second = tl.split(acc)  # renames registers: a thread holds both of a pair
    if UP_FIRST:
        return second, first
    else:
        return first, second


@triton.jit(do_not_specialize=["M", "N", "K", "whole"])
def _swiglu_fwd_kernel(
    x_desc,  # [M, K] in blocks [BLOCK_M, BLOCK_K]
    w_desc,  # [2, N, K] in blocks [2, BLOCK_N, BLOCK_K]
    z_desc,  # [M, N] in blocks [BLOCK_M, BLOCK_N]
    w_half_desc,  # [2, N, K] in blocks [2, BLOCK_N / 2, BLOCK_K], or None
    z_half_desc,  # [M, N] in blocks [BLOCK_M, BLOCK_N / 2], or None
    b_gate_ptr,  # [N] or None
    b_up_ptr,  # [N] or None
    M,
    N,
    K,
    whole,  # tiles made whole; those after it are made in halves, one a program
    ACTIVATION: tl.constexpr,
    UP_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """z = act(x Wg^T + bg) * (x Wu^T + bu); programs stride over tiles [BLOCK_M, BLOCK_N]."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), whole, tl.num_programs(0), flatten=True):
        pid_m, pid_n = grouped_tile(tile, tiles_m, tiles_n, GROUP)
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
            pid_m, pid_n = grouped_tile(tile, tiles_m, tiles_n, GROUP)
            row = pid_m * BLOCK_M
            column = pid_n * BLOCK_N + (tl.program_id(0) % 2) * HALF
            gate, up = _joined_product(
                x_desc, w_half_desc, row, column, K, UP_FIRST, BLOCK_M, HALF, BLOCK_K
            )
            _gate_and_store(gate, up, b_gate_ptr, b_up_ptr, z_half_desc, row, column, N, ACTIVATION)


@triton.jit(do_not_specialize=["M", "N", "K"])
def _swiglu_wf_fwd_kernel(
    x_desc,  # [M, K] in blocks [BLOCK_M, BLOCK_K]
    w_gate_desc,  # [K, N] in blocks [BLOCK_K, BLOCK_N]
    w_up_desc,  # [K, N] in blocks [BLOCK_K, BLOCK_N]
    z_desc,  # [M, N] in blocks [BLOCK_M, BLOCK_N]
    b_gate_ptr,  # [N] or None
    b_up_ptr,  # [N] or None
    M,
    N,
    K,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The same for weights whose hidden dimension is the dense one: two products a step.

    Not flattened: with two accumulators that would serialize the products (docs/swiglu.md).
    """
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        pid_m, pid_n = grouped_tile(tile, tiles_m, tiles_n, GROUP)
        row = pid_m * BLOCK_M
        column = pid_n * BLOCK_N
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            x = x_desc.load([row, k])  # [BLOCK_M, BLOCK_K]
            gate = tl.dot(x, w_gate_desc.load([k, column]), gate)
            up = tl.dot(x, w_up_desc.load([k, column]), up)
        _gate_and_store(gate, up, b_gate_ptr, b_up_ptr, z_desc, row, column, N, ACTIVATION)


def _rows(x, *block) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block))


def _joined(w_gate, w_up, *block) -> TensorDescriptor:
    """Both weights as one [2, N, K]: the first dimension's stride is how far they lie apart.

    The stacked and the interleaved layout are special cases; for two allocations the stride is
    the difference of their addresses. The lower one comes first, whichever it is.
    """
    low, high = sorted((w_gate, w_up), key=torch.Tensor.data_ptr)
    apart = (high.data_ptr() - low.data_ptr()) // low.element_size()
    return TensorDescriptor(low, [2, *low.shape], [apart, *low.stride()], list(block))


@functools.lru_cache(maxsize=4096)
def _choose(where: torch.device, M: int, N: int, K: int):
    """(tile configuration, tiles made whole, whether the rest is made in halves), by least time.

    A tile configuration carries its measured cost: microseconds a K step and a tile.
    """
    best = None
    processors = device.multiprocessor_count(where.index)
    for tile in tuning.lookup("hopper_swiglu_fwd", where)["tiles"]:
        count = triton.cdiv(M, tile["BLOCK_M"]) * triton.cdiv(N, tile["BLOCK_N"])
        slots = processors * tile["per_processor"]
        full, rest = divmod(count, slots)
        one = triton.cdiv(K, tile["BLOCK_K"]) * tile["step_us"] + tile["tile_us"]
        halves = bool(tile["half_cost"]) and full > 0 and 0 < 2 * rest <= slots
        time = one * (full + (tile["half_cost"] if halves else rest > 0))
        if best is None or time < best[0]:
            best = time, tile, full * slots if halves else count, halves
    return best[1:]


def launch(x, w_gate, w_up, b_gate, b_up, activation, tile, whole, halves) -> torch.Tensor:
    """z [M, N] by the kernels above with this tile configuration."""
    (M, K), N = x.shape, w_gate.shape[0]
    z = torch.empty((M, N), dtype=x.dtype, device=x.device)  # [M, N]
    BM, BN, BK = tile["BLOCK_M"], tile["BLOCK_N"], tile["BLOCK_K"]
    count = triton.cdiv(M, BM) * triton.cdiv(N, BN)
    slots = device.multiprocessor_count(x.device.index) * tile["per_processor"]
    grid = (min(slots, count),)
    blocks = {"BLOCK_M": BM, "BLOCK_N": BN, "BLOCK_K": BK, "GROUP": tile["GROUP"]}
    options = {"num_warps": tile["num_warps"], "num_stages": tile["num_stages"]}
    x_desc, z_desc = _rows(x, BM, BK), _rows(z, BM, BN)
    biases = (b_gate, b_up)
    with device.on(x.device):
        if w_gate.stride(1) != 1:
            w_gate, w_up = (_rows(w.t(), BK, BN) for w in (w_gate, w_up))
            _swiglu_wf_fwd_kernel[grid](
                x_desc, w_gate, w_up, z_desc, *biases, M, N, K, activation, **blocks, **options
            )
            return z
        w_desc = _joined(w_gate, w_up, 2, BN, BK)
        w_half = _joined(w_gate, w_up, 2, BN // 2, BK) if halves else None
        z_half = _rows(z, BM, BN // 2) if halves else None
        up_first = w_gate.data_ptr() > w_up.data_ptr()
        descs = (x_desc, w_desc, z_desc, w_half, z_half)
        _swiglu_fwd_kernel[grid](
            *descs, *biases, M, N, K, whole, activation, up_first, **blocks, **options
        )
    return z


def swiglu_fwd(
    x: torch.Tensor,  # [M, K], last dimension dense
    w_gate: torch.Tensor,  # [N, K]: (any, 1) strides, or (1, any)
    w_up: torch.Tensor,  # [N, K], strides of w_gate
    b_gate: Optional[torch.Tensor],  # [N]
    b_up: Optional[torch.Tensor],  # [N]
    activation: str,
) -> torch.Tensor:  # [M, N]
    (M, K), N = x.shape, w_gate.shape[0]
    tile, whole, halves = _choose(x.device, M, N, K)
    return launch(x, w_gate, w_up, b_gate, b_up, activation, tile, whole, halves)
