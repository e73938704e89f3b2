"""The short depthwise causal convolution of a layer, over a prompt.

    y_t = act(bias + sum_w weight[w] x[t - W + 1 + w])        within each sequence

Sizes: B batch, D channels, T tokens, W taps, N sequences, S columns of a final state.
"""

from typing import Callable, Optional

import torch
import triton
import triton.language as tl

from ...gdn.chunks import count_sequences
from ...runtime import device, tuning
from ...runtime.copies import on_copies
from ...runtime.dtypes import served
from ...runtime.launch import Launch
from ...runtime.ops import dense
from ...runtime.primitives import activate, sequence_bounds
from ...runtime.sizes import cdiv
from ..call import Convolution
from .causal_conv1d_quads import conv_quads, takes_quads
from .causal_conv1d_rows import conv_rows


@triton.jit
def sequence_of(token, cu_ptr, N, STEPS):
    """Sequence n with cu[n] <= token < cu[n + 1], by bisection; token [BLOCK_T] int64."""
    low = tl.zeros_like(token)
    high = low + N
    for _ in range(STEPS):
        middle = (low + high) // 2
        below = tl.load(cu_ptr + middle).to(tl.int64) <= token
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
    return low


@triton.jit
def conv_tile(
    x_ptr,  # token 0 of the row, first channel of the tile
    y_ptr,  # as x_ptr
    weight_ptr,  # [D, W]
    bias_ptr,  # [D] or None
    seq_ptr,  # [T] of the row, or None
    cu_ptr,  # [N + 1] or None
    initial_ptr,  # [N, D, W - 1] or None
    x_strides,  # of T, D
    y_strides,  # of T, D
    initial_strides,  # of N, D, W - 1
    row,  # index in the batch
    t0,
    d0,  # the tile's first channel
    T, D, N, STEPS,
    W: tl.constexpr, SILU: tl.constexpr, PTX: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """y of BLOCK_T tokens and BLOCK_D channels."""
    offs_t = t0 + tl.arange(0, BLOCK_T)
    local_d = tl.arange(0, BLOCK_D)
    offs_d = d0 + local_d
    mask_t = offs_t < T
    mask_d = offs_d < D
    position = offs_t  # in the token's sequence
    n = row.to(tl.int64) + tl.zeros_like(offs_t)
    if cu_ptr is not None:
        n = sequence_of(offs_t.to(tl.int64), cu_ptr, N, STEPS)
        start, _ = sequence_bounds(cu_ptr, n, T)
        position = tl.maximum(offs_t - start, 0).to(tl.int32)
    if seq_ptr is not None:
        mine = tl.load(seq_ptr + offs_t, mask=mask_t, other=0)  # [BLOCK_T]
    x_ptrs = x_ptr + t0.to(tl.int64) * x_strides[0] + tl.arange(0, BLOCK_T)[:, None] * x_strides[0]
    x_ptrs += local_d[None, :] * x_strides[1]
    acc = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)[None, :]
    for back in tl.static_range(0, W):
        tap = tl.load(weight_ptr + offs_d * W + (W - 1 - back), mask=mask_d, other=0.0)
        inside = mask_t & (position >= back)
        if seq_ptr is not None:
            theirs = tl.load(seq_ptr + offs_t - back, mask=inside, other=0)
            inside = inside & (theirs == mine)
        x = tl.load(
            x_ptrs - back * x_strides[0], mask=inside[:, None] & mask_d[None, :], other=0.0
        )  # [BLOCK_T, BLOCK_D]
        acc += x.to(tl.float32) * tap.to(tl.float32)[None, :]
    if initial_ptr is not None:
        if tl.min(position, 0) < W - 1:  # a sequence begins here, or just before
            for back in tl.static_range(1, W):
                tap = tl.load(weight_ptr + offs_d * W + (W - 1 - back), mask=mask_d, other=0.0)
                at = n * initial_strides[0] + (W - 1 + position - back) * initial_strides[2]
                at = at[:, None] + offs_d[None, :] * initial_strides[1]
                wanted = (mask_t & (position < back))[:, None] & mask_d[None, :]
                x = tl.load(initial_ptr + at, mask=wanted, other=0.0)  # [BLOCK_T, BLOCK_D]
                acc += x.to(tl.float32) * tap.to(tl.float32)[None, :]
    if SILU:
        acc = activate(acc, "silu", PTX)
    y_ptrs = y_ptr + t0.to(tl.int64) * y_strides[0] + tl.arange(0, BLOCK_T)[:, None] * y_strides[0]
    y_ptrs += local_d[None, :] * y_strides[1]
    y = acc.to(y_ptr.dtype.element_ty)
    tl.store(y_ptrs, y, mask=mask_t[:, None] & mask_d[None, :])


@triton.jit
def final_tile(
    x_ptr,  # token 0 of the row, first channel of the tile
    cu_ptr,  # [N + 1] or None
    initial_ptr,  # [N, D, W - 1] or None
    final_ptr,  # [N, D, S]
    x_strides,  # of T, D
    initial_strides,  # of N, D, W - 1
    n, d0, T, D,
    W: tl.constexpr, S: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The last S inputs of a sequence; before its first token its initial state, or zeros."""
    first = n.to(tl.int64) * 0
    length = first + T
    if cu_ptr is not None:
        first, stop = sequence_bounds(cu_ptr, n, T)
        length = stop - first
    local_d = tl.arange(0, BLOCK_D)
    offs_s = tl.arange(0, BLOCK_S)
    mask = (offs_s < S)[None, :] & (d0 + local_d < D)[:, None]  # [BLOCK_D, BLOCK_S]
    position = length - S + offs_s  # [BLOCK_S]
    x_ptrs = x_ptr + ((first + position) * x_strides[0])[None, :] + local_d[:, None] * x_strides[1]
    last = tl.load(x_ptrs, mask=mask & (position >= 0)[None, :], other=0.0)
    if initial_ptr is not None:
        at = n * initial_strides[0] + (W - 1 + position) * initial_strides[2]
        at = at[None, :] + (d0 + local_d)[:, None] * initial_strides[1]
        wanted = (position < 0) & (position >= 1 - W)
        before = tl.load(initial_ptr + at, mask=mask & wanted[None, :], other=0.0)
        last = tl.where((position >= 0)[None, :], last, before.to(last.dtype))
    final_ptrs = final_ptr + (n.to(tl.int64) * D + d0 + local_d)[:, None] * S + offs_s[None, :]
    tl.store(final_ptrs, last.to(final_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _place(
    pid, tiles_t, tiles_d, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, ALONG: tl.constexpr
):
    """(row of the batch, first token, first channel) of a tile.

    Divisions are few: each takes the instructions of two elements. ALONG: the next program has the
    next tokens of the same channels; otherwise the next channels of the same tokens.
    """
    inner = tiles_t if ALONG else tiles_d
    outer = tiles_d if ALONG else tiles_t
    at = pid // inner
    row = at // outer
    i, j = pid - at * inner, at - row * outer
    if ALONG:
        return row, i * BLOCK_T, j * BLOCK_D
    else:
        return row, j * BLOCK_T, i * BLOCK_D


@triton.jit
def _causal_conv1d_fwd_kernel(
    x_ptr,  # [B, D, T]
    weight_ptr,  # [D, W]
    bias_ptr,  # [D] or None
    seq_ptr,  # [B, T] or None
    cu_ptr,  # [N + 1] or None
    initial_ptr,  # [N, D, W - 1] or None
    y_ptr,  # [B, D, T]
    final_ptr,  # [N, D, W - 1] or None
    x_strides,  # of B, T, D
    y_strides,  # of B, T, D
    initial_strides,  # of N, D, W - 1
    T, D, N, TILES_T, STEPS,
    W: tl.constexpr, SILU: tl.constexpr, PTX: tl.constexpr, BLOCK_T: tl.constexpr,
    RUN: tl.constexpr, QUADS: tl.constexpr, ALONG: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A program makes a tile of y; programs past the last tile make one final state each.

    RUN: by rows; QUADS: by quads of tokens; PTX: silu and rounding by instructions of NVIDIA GPUs;
    ALONG: as for _place.
    """
    tiles_d = tl.cdiv(D, BLOCK_D)
    rows = N if cu_ptr is None else 1
    pid = tl.program_id(0)
    behind = pid - rows * TILES_T * tiles_d
    if behind < 0:
        row, t0, d0 = _place(pid, TILES_T, tiles_d, BLOCK_T, BLOCK_D, ALONG)
        x_row = x_ptr + row.to(tl.int64) * x_strides[0] + d0.to(tl.int64) * x_strides[2]
        y_row = y_ptr + row.to(tl.int64) * y_strides[0] + d0.to(tl.int64) * y_strides[2]
        seq_row = None if seq_ptr is None else seq_ptr + row.to(tl.int64) * T
        if RUN:
            conv_rows(
                x_row, y_row, weight_ptr, bias_ptr, seq_row, cu_ptr, initial_ptr, x_strides[1:],
                y_strides[1:], initial_strides, row, t0, d0, T, D, N, W, SILU, PTX, BLOCK_T, RUN,
                BLOCK_D,
            )  # fmt: skip
        elif QUADS:
            conv_quads(
                x_row, y_row, weight_ptr, bias_ptr, x_strides[2], y_strides[2], t0, d0, T, D, W,
                SILU, PTX, BLOCK_T, BLOCK_D,
            )  # fmt: skip
        else:
            conv_tile(
                x_row, y_row, weight_ptr, bias_ptr, seq_row, cu_ptr, initial_ptr, x_strides[1:],
                y_strides[1:], initial_strides, row, t0, d0, T, D, N, STEPS, W, SILU, PTX,
                BLOCK_T, BLOCK_D,
            )  # fmt: skip
    elif final_ptr is not None:
        n = behind // tiles_d
        d0 = (behind - n * tiles_d) * BLOCK_D
        row = n if cu_ptr is None else n * 0
        x_row = x_ptr + row.to(tl.int64) * x_strides[0] + d0.to(tl.int64) * x_strides[2]
        final_tile(
            x_row, cu_ptr, initial_ptr, final_ptr, x_strides[1:], initial_strides, n, d0, T, D,
            W, W - 1, 8, BLOCK_D,
        )  # fmt: skip


def _launch(call: Convolution, order: str, y: torch.Tensor) -> Launch:
    """order: the name in the configuration's file."""
    x, weight, _, _, cu_seqlens, initial_states, (activation, return_final_states) = call
    (B, D, T), W, where = x.shape, weight.shape[1], x.device
    N = count_sequences(B, cu_seqlens)
    config = tuning.lookup(f"portable_causal_conv1d_{order}_fwd", where, D=D)
    tiles, ends = cdiv(T, config["BLOCK_T"]), N if return_final_states else 0
    strides = (by_token(x), by_token(y), steps_of_states(initial_states))
    return Launch(
        _causal_conv1d_fwd_kernel, (B * tiles + ends) * cdiv(D, config["BLOCK_D"]), where,
        numbers=(*strides, T, D, N, tiles, N.bit_length()), guarded=True, W=W,
        SILU=activation is not None, PTX=device.takes_ptx(where), QUADS=order == "quads", **config,
    )  # fmt: skip


def prepare_causal_conv1d_fwd(call: Convolution) -> Optional[Callable]:
    """(x, weight, bias, seq_idx, cu_seqlens, initial_states) -> y [B, D, T] in the memory order of
    x, and the last W - 1 inputs or None: one launch."""
    x, weight, bias, seq_idx, cu_seqlens, initial_states, (_, return_final_states) = call
    if not served(x, weight, bias, initial_states):
        return None
    if not are_dense(*call[1:5]):
        return on_copies(prepare_causal_conv1d_fwd, call, copied)
    y = torch.empty_like(x, device="meta")
    order = slow_first(x)
    kernel = by_quads = _launch(call, order, y)
    if order == "dt" and takes_quads(x, y, seq_idx, cu_seqlens, initial_states):
        by_quads = _launch(call, "quads", y)
    final_shape = (count_sequences(x.shape[0], cu_seqlens), x.shape[1], weight.shape[1] - 1)

    def run(x, *tensors):
        y = torch.empty_like(x)  # [B, D, T]
        final = x.new_empty(final_shape) if return_final_states else None  # [N, D, W - 1]
        launch = kernel if x.data_ptr() & 7 else by_quads
        launch(x, *tensors, y, final)
        return y, final

    return run


def slow_first(x: torch.Tensor) -> str:
    """The order of tokens and channels of x [B, D, T] in memory, the slow dimension first."""
    return "td" if x.stride(2) > x.stride(1) else "dt"


def by_token(x: torch.Tensor) -> tuple:
    """Strides of B, T, D of x [B, D, T]."""
    return x.stride(0), x.stride(2), x.stride(1)


def steps_of_states(initial_states: Optional[torch.Tensor]) -> tuple:
    return (0, 0, 0) if initial_states is None else initial_states.stride()


def are_dense(weight, bias, seq_idx, cu_seqlens, *more) -> bool:
    """True if kernels read these tensors as they lie; None counts as no tensor."""
    whole = all([t is None or t.is_contiguous() for t in (weight, seq_idx, *more)])
    return whole and bias is dense(bias) and cu_seqlens is dense(cu_seqlens)


def copied(x, weight, bias, seq_idx, cu_seqlens, initial_states, *gradients) -> tuple:
    """The tensors of a call, those that kernels cannot read as contiguous copies."""
    seq_idx = None if seq_idx is None else seq_idx.contiguous()
    *dy, d_final = gradients or (None,)
    d_final = [d_final if d_final is None else d_final.contiguous()] if dy else []
    lengths = dense(cu_seqlens)
    return x, weight.contiguous(), dense(bias), seq_idx, lengths, initial_states, *dy, *d_final
