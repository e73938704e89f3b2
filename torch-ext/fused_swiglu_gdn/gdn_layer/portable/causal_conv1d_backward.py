"""The gradient of the short depthwise causal convolution (causal_conv1d.py).

Within a sequence, with z_t = bias + sum_w weight[w] x[t - W + 1 + w] and dz = dy act'(z):

    dx_s = sum_f weight[W - 1 - f] dz[s + f]      dweight[W - 1 - f] = sum_t dz_t x[t - f]

z is recomputed from x, W times an element: x stays in cache, and nothing is saved.

Sizes: B batch, D channels, T tokens, W taps, N sequences; P groups of tokens.
"""

import operator
from typing import Callable, Optional, Tuple

import torch
import triton
import triton.language as tl

from ...gdn.chunks import count_sequences
from ...runtime import device, tuning
from ...runtime.copies import on_copies
from ...runtime.dtypes import served
from ...runtime.launch import Launch
from ...runtime.primitives import sequence_bounds
from ...runtime.sizes import cdiv, next_power_of_2
from ..call import ConvolutionGradient
from .causal_conv1d import are_dense, by_token, copied, sequence_of, slow_first, steps_of_states
from .causal_conv1d_rows_backward import conv_rows_bwd_kernel


@triton.jit
def _input(
    x_ptr, seq_ptr, initial_ptr, x_strides, initial_strides, tok, position, n, ok, offs_d, mask_d,
    back, W: tl.constexpr,
):  # fmt: skip
    """x of the token `back` before each token, or the initial state before the first; fp32.

    Pointers are those of the tile's first token and channel; tok and offs_d count from there.
    """
    inside = ok & (position >= back)
    if seq_ptr is not None:
        mine = tl.load(seq_ptr + tok, mask=ok, other=0)
        inside = inside & (tl.load(seq_ptr + tok - back, mask=inside, other=0) == mine)
    at = (tok - back)[:, None] * x_strides[0] + offs_d[None, :] * x_strides[1]
    x = tl.load(x_ptr + at, mask=inside[:, None] & mask_d[None, :], other=0.0).to(tl.float32)
    if initial_ptr is not None:
        at = n * initial_strides[0] + (W - 1 + position - back) * initial_strides[2]
        at = at[:, None] + offs_d[None, :] * initial_strides[1]
        wanted = (ok & (position < back))[:, None] & mask_d[None, :]
        x += tl.load(initial_ptr + at, mask=wanted, other=0.0).to(tl.float32)
    return x  # [BLOCK_T, BLOCK_D]


@triton.jit
def _dz(
    x_ptr, dy_ptr, weight_ptr, bias_ptr, seq_ptr, initial_ptr, x_strides, dy_strides,
    initial_strides, tok, position, n, ok, offs_d, mask_d, W: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """The gradient of z [BLOCK_T, BLOCK_D] fp32; zeros for tokens that are not ok."""
    at = tok[:, None] * dy_strides[0] + offs_d[None, :] * dy_strides[1]
    dy = tl.load(dy_ptr + at, mask=ok[:, None] & mask_d[None, :], other=0.0).to(tl.float32)
    if SILU:
        z = tl.zeros_like(dy)
        if bias_ptr is not None:
            z += tl.load(bias_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)[None, :]
        for back in tl.static_range(0, W):
            tap = tl.load(weight_ptr + offs_d * W + (W - 1 - back), mask=mask_d, other=0.0)
            x = _input(
                x_ptr, seq_ptr, initial_ptr, x_strides, initial_strides, tok, position, n, ok,
                offs_d, mask_d, back, W,
            )  # fmt: skip
            z += x * tap.to(tl.float32)[None, :]
        s = 1.0 / (1.0 + tl.exp(-z))
        dy = dy * s * (1.0 + z * (1.0 - s))
    return dy


@triton.jit
def _place(tok, cu_ptr, row, T, N, STEPS):
    """(sequence, position in it, tokens from there to its end) of each token."""
    n = row.to(tl.int64) + tl.zeros_like(tok)
    position = tok
    left = T - tok
    if cu_ptr is not None:
        n = sequence_of(tok.to(tl.int64), cu_ptr, N, STEPS)
        start, stop = sequence_bounds(cu_ptr, n, T)
        position = tl.maximum(tok - start, 0).to(tl.int32)
        left = (stop - tok).to(tl.int32)
    return n, position, left


@triton.jit
def _causal_conv1d_bwd_kernel(
    x_ptr,  # [B, D, T]
    weight_ptr,  # [D, W]
    bias_ptr,  # [D] or None
    seq_ptr,  # [B, T] or None
    cu_ptr,  # [N + 1] or None
    initial_ptr,  # [N, D, W - 1] or None
    dy_ptr,  # [B, D, T]
    dfinal_ptr,  # [N, D, W - 1] or None, contiguous
    dx_ptr,  # [B, D, T]
    sums_ptr,  # [B, P, W + 1, D] fp32: the group's share of dweight by tap and of dbias
    x_strides,  # of B, T, D
    dy_strides, dx_strides,
    initial_strides,  # of N, D, W - 1
    T, D, N, P, STEPS,
    W: tl.constexpr,
    TAPS: tl.constexpr,  # W + 1 or the next power of two
    SILU: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """dx of TILES tiles of BLOCK_T tokens and BLOCK_D channels, and their contribution to
    dweight."""
    tiles_d = tl.cdiv(D, BLOCK_D)
    d0 = ((tl.program_id(0) % tiles_d) * BLOCK_D).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = d0 + offs_d < D
    group = tl.program_id(0) // tiles_d  # of B * P
    row = (group // P).to(tl.int64)
    x_ptr += row * x_strides[0] + d0 * x_strides[2]
    dy_ptr += row * dy_strides[0] + d0 * dy_strides[2]
    dx_ptr += row * dx_strides[0] + d0 * dx_strides[2]
    weight_ptr += d0 * W
    if bias_ptr is not None:
        bias_ptr += d0
    if initial_ptr is not None:
        initial_ptr += d0 * initial_strides[1]
    taps = tl.arange(0, TAPS)[:, None]  # W + 1 of them count
    sums = tl.zeros((TAPS, BLOCK_D), tl.float32)
    tok = tl.arange(0, BLOCK_T)  # from the tile's first
    for tile in range(0, TILES):
        t0 = ((group % P) * TILES + tile) * BLOCK_T
        ok = t0 + tok < T
        n, position, left = _place(t0 + tok, cu_ptr, row, T, N, STEPS)
        x_tile = x_ptr + t0.to(tl.int64) * x_strides[1]
        dy_tile = dy_ptr + t0.to(tl.int64) * dy_strides[1]
        seq_tile = None if seq_ptr is None else seq_ptr + row * T + t0
        dx = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
        for ahead in tl.static_range(0, W):
            good = ok & (left > ahead)
            if seq_ptr is not None:
                mine = tl.load(seq_tile + tok, mask=ok, other=0)
                good = good & (tl.load(seq_tile + tok + ahead, mask=good, other=0) == mine)
            dz = _dz(
                x_tile, dy_tile, weight_ptr, bias_ptr, seq_tile, initial_ptr, x_strides[1:],
                dy_strides[1:], initial_strides, tok + ahead, position + ahead, n, good, offs_d,
                mask_d, W, SILU,
            )  # fmt: skip
            tap = tl.load(weight_ptr + offs_d * W + (W - 1 - ahead), mask=mask_d, other=0.0)
            dx += dz * tap.to(tl.float32)[None, :]
            if ahead == 0:
                sums += tl.where(taps == W, tl.sum(dz, 0)[None, :], 0.0)
                for back in tl.static_range(0, W):
                    x = _input(
                        x_tile, seq_tile, initial_ptr, x_strides[1:], initial_strides, tok,
                        position, n, ok, offs_d, mask_d, back, W,
                    )  # fmt: skip
                    sums += tl.where(taps == W - 1 - back, tl.sum(dz * x, 0)[None, :], 0.0)
        here = ok[:, None] & mask_d[None, :]
        if dfinal_ptr is not None:
            at = (n[:, None] * D + d0 + offs_d[None, :]) * (W - 1) + (W - 1 - left)[:, None]
            last = here & ((left > 0) & (left < W))[:, None]
            dx += tl.load(dfinal_ptr + at, mask=last, other=0.0).to(tl.float32)
        at = tok[:, None] * dx_strides[1] + offs_d[None, :] * dx_strides[2]
        dx_tile = dx_ptr + t0.to(tl.int64) * dx_strides[1]
        tl.store(dx_tile + at, dx.to(dx_ptr.dtype.element_ty), mask=here)
    at = (group * (W + 1)).to(tl.int64) * D + d0 + taps * D + offs_d[None, :]
    tl.store(sums_ptr + at, sums, mask=(taps <= W) & mask_d[None, :])


@triton.jit
def _initial_bwd_kernel(
    x_ptr,  # [B, D, T]
    weight_ptr,  # [D, W]
    bias_ptr,  # [D] or None
    seq_ptr,  # [B, T] or None
    cu_ptr,  # [N + 1] or None
    initial_ptr,  # [N, D, W - 1]
    dy_ptr,  # [B, D, T]
    dfinal_ptr,  # [N, D, W - 1] or None, contiguous
    dinitial_ptr,  # [N, D, W - 1]
    x_strides,  # of B, T, D
    dy_strides,
    initial_strides,  # of N, D, W - 1
    T, D,
    W: tl.constexpr, SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,  # at least W - 1
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dinitial[c] = sum_p weight[c - p] dz[p] over the first tokens p of one sequence."""
    tiles_d = tl.cdiv(D, BLOCK_D)
    n = (tl.program_id(0) // tiles_d).to(tl.int64)
    d0 = ((tl.program_id(0) % tiles_d) * BLOCK_D).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = d0 + offs_d < D
    p = tl.arange(0, BLOCK_T)
    row = n
    first = n * 0
    length = first + T
    if cu_ptr is not None:
        row = n * 0
        first, stop = sequence_bounds(cu_ptr, n, T)
        length = stop - first
    x_ptr += row * x_strides[0] + first * x_strides[1] + d0 * x_strides[2]
    dy_ptr += row * dy_strides[0] + first * dy_strides[1] + d0 * dy_strides[2]
    weight_ptr += d0 * W
    dz = _dz(
        x_ptr, dy_ptr, weight_ptr, None if bias_ptr is None else bias_ptr + d0,
        None if seq_ptr is None else seq_ptr + row * T, initial_ptr + d0 * initial_strides[1],
        x_strides[1:], dy_strides[1:], initial_strides, p, p, n + p * 0, p < length, offs_d,
        mask_d, W, SILU,
    )  # fmt: skip
    for c in tl.static_range(0, W - 1):
        reads = (p <= c)[:, None] & mask_d[None, :]
        tap = tl.load(weight_ptr + offs_d[None, :] * W + (c - p)[:, None], mask=reads, other=0.0)
        d = tl.sum(dz * tap.to(tl.float32), 0)  # [BLOCK_D]
        at = (n * D + d0 + offs_d) * (W - 1) + c
        if dfinal_ptr is not None:  # a column that no token pushed out
            d += tl.load(dfinal_ptr + at - length, mask=mask_d & (length <= c), other=0.0)
        tl.store(dinitial_ptr + at, d.to(dinitial_ptr.dtype.element_ty), mask=mask_d)


# of the tensors of a call, those of calls without seq_idx and final states
_WITHOUT = operator.itemgetter(0, 1, 2, 4, 5, 6)
_ALL = operator.itemgetter(slice(None))


def _of_tokens(
    call: ConvolutionGradient, dx: torch.Tensor, N: int, by_rows: bool
) -> Tuple[Launch, int]:
    """The launch that fills dx and the groups' parts of dweight and dbias [B, P, W + 1, D] fp32,
    and P."""
    x, weight, initial_states, dy = call.x, call.weight, call.initial_states, call.dy
    (B, D, T), W = x.shape, weight.shape[1]
    kernel, order = _causal_conv1d_bwd_kernel, slow_first(x)
    if by_rows:
        kernel, order = conv_rows_bwd_kernel, "rows"
    config = tuning.lookup(f"portable_causal_conv1d_{order}_bwd", x.device, D=D)
    values = {"W": W, "SILU": call.options.activation is not None, **config}
    strides = [by_token(t) for t in (x, dy, dx)]
    if by_rows:
        groups, steps = cdiv(T, config["RUN"] * config["RUNS"]), ()
        strides = [each[:2] for each in strides]
    else:
        groups, steps = cdiv(T, config["BLOCK_T"] * config["TILES"]), (N.bit_length(),)
        values["TAPS"] = next_power_of_2(W + 1)
    return Launch(
        kernel, B * groups * cdiv(D, config["BLOCK_D"]), x.device,
        numbers=(*strides, steps_of_states(initial_states), T, D, N, groups, *steps), guarded=True,
        **values,
    ), groups  # fmt: skip


def _of_states(call: ConvolutionGradient, N: int) -> Launch:
    """The launch for the gradient of the initial states."""
    x, W, (_, D, T) = call.x, call.weight.shape[1], call.x.shape
    strides = (by_token(x), by_token(call.dy), call.initial_states.stride())
    silu = call.options.activation is not None
    return Launch(
        _initial_bwd_kernel, N * cdiv(D, 128), x.device, numbers=(*strides, T, D),
        constexprs=(W, silu, next_power_of_2(W - 1), 128), guarded=True,
    )  # fmt: skip


def prepare_causal_conv1d_bwd(call: ConvolutionGradient) -> Optional[Callable]:
    """The tensors of a call -> dx in the memory order of x, dweight, dbias or None, and
    d_initial_states or None."""
    x, weight, bias, seq_idx, cu_seqlens, initial_states, dy, d_final, _ = call
    if not served(x, weight, bias):
        return None
    if not are_dense(weight, bias, seq_idx, cu_seqlens, d_final):
        return on_copies(prepare_causal_conv1d_bwd, call, copied)
    (B, D, _), W, where = x.shape, weight.shape[1], x.device
    N, dx = count_sequences(B, cu_seqlens), torch.empty_like(x, device="meta")
    alone = seq_idx is None and d_final is None
    by_rows = alone and x.stride(1) == dy.stride(1) == dx.stride(1) == 1
    kernel, groups = _of_tokens(call, dx, N, by_rows)
    pick = _WITHOUT if by_rows else _ALL
    of_states = None if initial_states is None else _of_states(call, N)
    some, dtype = x.numel() > 0, weight.dtype

    def run(*tensors):
        x, _, bias, _, _, initial_states, _, _ = tensors
        dx, dbias, d_initial = torch.empty_like(x), None, None  # [B, D, T]
        sums = torch.empty(B, groups, W + 1, D, dtype=torch.float32, device=where)
        with device.on(where):
            if some:
                kernel(*pick(tensors), dx, sums)
            if of_states is not None:
                d_initial = x.new_empty(N, D, W - 1)
                of_states(*tensors, d_initial)
                d_initial = d_initial.to(initial_states.dtype)
        sums = sums.sum((0, 1))  # [W + 1, D]
        if bias is not None:
            dbias = sums[W].to(bias.dtype, copy=True)  # shares no memory
        return dx, sums[:W].t().contiguous().to(dtype), dbias, d_initial

    return run
