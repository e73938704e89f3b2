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
from ..common.launch import prepare
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


@triton.jit(do_not_specialize=["M", "N", "K", "whole", "group"])
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
    group,  # rows of tiles that are walked together
    ACTIVATION: tl.constexpr,
    UP_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """z = act(x Wg^T + bg) * (x Wu^T + bu); programs stride over tiles [BLOCK_M, BLOCK_N]."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), whole, tl.num_programs(0), flatten=True):
        pid_m, pid_n = grouped_tile(tile, tiles_m, tiles_n, group)
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
            pid_m, pid_n = grouped_tile(tile, tiles_m, tiles_n, group)
            row = pid_m * BLOCK_M
            column = pid_n * BLOCK_N + (tl.program_id(0) % 2) * HALF
            gate, up = _joined_product(
                x_desc, w_half_desc, row, column, K, UP_FIRST, BLOCK_M, HALF, BLOCK_K
            )
            _gate_and_store(gate, up, b_gate_ptr, b_up_ptr, z_half_desc, row, column, N, ACTIVATION)


@triton.jit(do_not_specialize=["M", "N", "K", "group"])
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
    group,  # rows of tiles that are walked together
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The same for weights whose hidden dimension is the dense one: two products a step.

    Not flattened: with two accumulators that would serialize the products (docs/swiglu.md).
    """
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        pid_m, pid_n = grouped_tile(tile, tiles_m, tiles_n, group)
        row = pid_m * BLOCK_M
        column = pid_n * BLOCK_N
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            x = x_desc.load([row, k])  # [BLOCK_M, BLOCK_K]
            gate = tl.dot(x, w_gate_desc.load([k, column]), gate)
            up = tl.dot(x, w_up_desc.load([k, column]), up)
        _gate_and_store(gate, up, b_gate_ptr, b_up_ptr, z_desc, row, column, N, ACTIVATION)


def _describe(base, shape, strides, block) -> TensorDescriptor:
    """A descriptor without the checks of its constructor, 2 us each: supports_... has made them."""
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    descriptor.base, descriptor.shape, descriptor.strides = base, shape, strides
    descriptor.block_shape, descriptor.padding = block, "zero"
    return descriptor


def rows(x, *block) -> TensorDescriptor:
    return _describe(x, list(x.shape), list(x.stride()), list(block))


def joined(first, second, *block) -> TensorDescriptor:
    """Two [N, K] as one [2, N, K]: the first dimension's stride is how far they lie apart.

    Halves of a packed and of an interleaved weight are special cases; for two allocations the
    stride is the difference of their addresses. The lower one comes first, whichever it is.
    """
    apart = (second.data_ptr() - first.data_ptr()) // first.element_size()
    low = first if apart > 0 else second
    return _describe(low, [2, *low.shape], [abs(apart), *low.stride()], list(block))


@functools.lru_cache(maxsize=4096)
def choose(where: torch.device, M: int, N: int, K: int):
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
            best = time, tuple(tile.items()), full * slots if halves else count, halves
    return best[1:]


@functools.lru_cache(maxsize=4096)
def _plan(kernel, where: torch.device, tile: tuple, constexprs: tuple, M: int, N: int, *kind):
    """(blocks, grid, rows of tiles to a group, prepared kernel); kind: what else its code is for."""
    tile = dict(tile)
    blocks = (tile["BLOCK_M"], tile["BLOCK_N"], tile["BLOCK_K"])
    tiles_m = triton.cdiv(M, blocks[0])
    count = tiles_m * triton.cdiv(N, blocks[1])
    slots = device.multiprocessor_count(where.index) * tile["per_processor"]
    group = triton.cdiv(tiles_m, triton.cdiv(tiles_m, tile["GROUP"]))  # equal groups
    options = tuple((name, tile[name]) for name in ("num_warps", "num_stages"))
    prepared = prepare(kernel, (*constexprs, *blocks), options, where, *kind)
    return blocks, (min(slots, count), 1, 1), group, prepared


def launch(x, w_gate, w_up, b_gate, b_up, activation, tile, whole, halves) -> torch.Tensor:
    """z [M, N] by the kernels above with this tile configuration, as (name, value) pairs."""
    (M, K), N = x.shape, w_gate.shape[0]
    z = torch.empty((M, N), dtype=x.dtype, device=x.device)  # [M, N]
    wf = w_gate.stride(1) != 1
    kernel = _swiglu_wf_fwd_kernel if wf else _swiglu_fwd_kernel
    up_first = w_gate.data_ptr() > w_up.data_ptr()
    aligned = tuple(b is None or b.data_ptr() % 16 == 0 for b in (b_gate, b_up))
    kind = (x.dtype, halves, b_gate is None, b_up is None, aligned)
    constexprs = (activation,) if wf else (activation, up_first)
    plan = _plan(kernel, x.device, tile, constexprs, M, N, *kind)
    (BM, BN, BK), grid, group, prepared = plan
    with device.on(x.device):
        x_desc, z_desc = rows(x, BM, BK), rows(z, BM, BN)
        if wf:
            descs = (x_desc, rows(w_gate.t(), BK, BN), rows(w_up.t(), BK, BN), z_desc)
            prepared.launch(grid, *descs, b_gate, b_up, M, N, K, group)
            return z
        w_desc = joined(w_gate, w_up, 2, BN, BK)
        w_half = joined(w_gate, w_up, 2, BN // 2, BK) if halves else None
        z_half = rows(z, BM, BN // 2) if halves else None
        descs = (x_desc, w_desc, z_desc, w_half, z_half)
        prepared.launch(grid, *descs, b_gate, b_up, M, N, K, whole, group)
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
    return launch(x, w_gate, w_up, b_gate, b_up, activation, *choose(x.device, M, N, K))
