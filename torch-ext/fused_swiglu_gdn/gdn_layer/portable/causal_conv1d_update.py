"""The short depthwise causal convolution of a layer, for the next tokens.

    y_t = act(bias + sum_w weight[w] x[t - W + 1 + w])        with earlier inputs in a state

Sizes: B batch, N sequences, D channels, T tokens, W taps, S columns of a state, P rows of a pool.
"""

from typing import Callable, Optional

import torch
import triton
import triton.language as tl

from ...gdn.chunks import count_sequences
from ...runtime import tuning
from ...runtime.copies import on_copies
from ...runtime.dtypes import served
from ...runtime.launch import Launch
from ...runtime.ops import dense
from ...runtime.primitives import activate, sequence_bounds
from ...runtime.sizes import cdiv, next_power_of_2
from ..call import ConvolutionUpdate


@triton.jit
def _convolve_tokens(
    x_row, y_row, held, weight_ptr, bias, x_step, y_step, state_step, offs_d, mask_d, T,
    COLUMNS: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """y of T tokens that follow the inputs in COLUMNS columns from `held` on."""
    for t in range(0, T):
        acc = bias
        for w in tl.static_range(0, W):
            tap = tl.load(weight_ptr + offs_d * W + w, mask=mask_d, other=0.0).to(tl.float32)
            at = t - (W - 1) + w  # the token, or a column counted from the state's end
            seen = tl.load(x_row + at * x_step, mask=mask_d & (at >= 0), other=0.0)
            before = tl.load(held + (COLUMNS + at) * state_step, mask=mask_d & (at < 0), other=0.0)
            acc += tap * (seen.to(tl.float32) + before.to(tl.float32))
        if SILU:
            acc = activate(acc, "silu")
        tl.store(y_row + t * y_step, acc.to(y_row.dtype.element_ty), mask=mask_d)


@triton.jit
def update_tile(
    x_row,  # [BLOCK_D] pointers to token 0
    y_row,  # [BLOCK_D] pointers to token 0
    state,  # [BLOCK_D] pointers to column 0
    weight_ptr,  # [D, W]
    bias_ptr,  # [D] or None
    x_step, y_step, state_step,
    offs_d, mask_d, T,
    S: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr, ONE: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """y of T tokens that follow the state, which is then shifted by T columns; ONE says T = 1."""
    offs_s = tl.arange(0, BLOCK_S)
    mask = mask_d[:, None] & (offs_s < S)[None, :]
    state_ptrs = state[:, None] + offs_s[None, :] * state_step  # [BLOCK_D, BLOCK_S]
    # column s gets what was in column s + T, or a new token
    kept = (offs_s + T < S)[None, :]
    old = tl.load(state_ptrs + T * state_step, mask=mask & kept, other=0.0)
    new_ptrs = x_row[:, None] + (offs_s + T - S)[None, :] * x_step
    new = tl.load(new_ptrs, mask=mask & (kept == 0), other=0.0)
    moved = tl.where(kept, old, new.to(old.dtype))  # [BLOCK_D, BLOCK_S]
    bias = tl.zeros(offs_d.shape, tl.float32)
    if bias_ptr is not None:
        bias += tl.load(bias_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    if ONE:  # what the token sees is what the state will hold, and one more where S = W - 1
        seen = tl.where(kept, old.to(tl.float32), new.to(tl.float32))
        taps_ptrs = weight_ptr + offs_d[:, None] * W + (offs_s - (S - W))[None, :]
        taps = tl.load(taps_ptrs, mask=mask & (offs_s >= S - W)[None, :], other=0.0)
        acc = bias + tl.sum(seen * taps.to(tl.float32), 1)
        if S < W:
            tap = tl.load(weight_ptr + offs_d * W, mask=mask_d, other=0.0).to(tl.float32)
            acc += tap * tl.load(state, mask=mask_d, other=0.0).to(tl.float32)
        if SILU:
            acc = activate(acc, "silu")
        tl.store(y_row, acc.to(y_row.dtype.element_ty), mask=mask_d)
    else:
        _convolve_tokens(
            x_row, y_row, state, weight_ptr, bias, x_step, y_step, state_step, offs_d, mask_d, T,
            S, W, SILU,
        )  # fmt: skip
    tl.debug_barrier()  # every thread has read before any writes
    tl.store(state_ptrs, moved, mask=mask)


@triton.jit
def _draft_tile(
    x_row,  # [BLOCK_D] pointers to token 0
    y_row,  # [BLOCK_D] pointers to token 0
    state,  # [BLOCK_D] pointers to column 0
    weight_ptr,  # [D, W]
    bias_ptr,  # [D] or None
    x_step, y_step, state_step,
    offs_d, mask_d, T,
    accepted,  # tokens of the call before that count, from 1
    S: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """update_tile for a state whose W - 1 inputs before the tokens begin at column `accepted - 1`.

    The latest W - 2 of them move to the first columns, followed by the tokens.
    """
    accepted = tl.minimum(tl.maximum(accepted, 1), S - W + 2)
    held = state + (accepted - 1).to(tl.int64) * state_step
    offs_s = tl.arange(0, BLOCK_S)
    kept = (offs_s < W - 2)[None, :]
    # where there is no token nothing moves
    mask = (mask_d & (T > 0))[:, None] & (offs_s < tl.minimum(W - 2 + T, S))[None, :]
    old_ptrs = held[:, None] + (offs_s + 1)[None, :] * state_step  # [BLOCK_D, BLOCK_S]
    old = tl.load(old_ptrs, mask=mask & kept, other=0.0)
    new_ptrs = x_row[:, None] + (offs_s - (W - 2))[None, :] * x_step
    new = tl.load(new_ptrs, mask=mask & (kept == 0), other=0.0)
    bias = tl.zeros(offs_d.shape, tl.float32)
    if bias_ptr is not None:
        bias += tl.load(bias_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    _convolve_tokens(
        x_row, y_row, held, weight_ptr, bias, x_step, y_step, state_step, offs_d, mask_d, T, W - 1,
        W, SILU,
    )  # fmt: skip
    tl.debug_barrier()  # every thread has read before any writes
    moved = tl.where(kept, old, new.to(old.dtype))
    tl.store(state[:, None] + offs_s[None, :] * state_step, moved, mask=mask)


@triton.jit
def _packed_step(
    x_row,  # [BLOCK_D] pointers to the token
    y_row,  # [BLOCK_D] pointers to the token
    state,  # [BLOCK_D] pointers to column 0
    weight_ptr,  # [D, W]
    bias_ptr,  # [D] or None
    offs_d, mask_d,
    W: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """update_tile of one token for states whose four 16-bit columns of a channel are one
    integer."""
    state = state.to(tl.pointer_type(tl.int64))
    held = tl.load(state, mask=mask_d, other=0)  # [BLOCK_D]
    dtype: tl.constexpr = x_row.dtype.element_ty
    x = tl.load(x_row, mask=mask_d, other=0.0).to(tl.int16, bitcast=True).to(tl.int64)
    moved = ((held >> 16) & 0xFFFFFFFFFFFF) | (x << 48)
    acc = tl.zeros(offs_d.shape, tl.float32)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    for w in tl.static_range(W):
        tap = tl.load(weight_ptr + offs_d * W + w, mask=mask_d, other=0.0).to(tl.float32)
        seen = (moved >> (16 * (4 - W + w))).to(tl.int16).to(dtype, bitcast=True)
        acc += tap * seen.to(tl.float32)
    if SILU:
        acc = activate(acc, "silu")
    tl.store(y_row, acc.to(y_row.dtype.element_ty), mask=mask_d)
    tl.store(state, moved, mask=mask_d)


def _is_packed(x, conv_state, W: int) -> bool:
    """True if _packed_step supports a token of x [B, D, 1] where conv_state begins at a multiple of
    8 bytes."""
    return (
        x.dtype == conv_state.dtype
        and x.element_size() == 2
        and conv_state.shape[2] == 4
        and W <= 4
        and conv_state.stride()[1:] == (4, 1)
        and conv_state.stride(0) % 4 == 0
    )


@triton.jit
def _causal_conv1d_update_kernel(
    x_ptr,  # [B, D, T]
    state_ptr,  # [N or P, D, S]
    weight_ptr,  # [D, W]
    bias_ptr,  # [D] or None
    y_ptr,  # [B, D, T]
    row_ptr,  # [N] rows of state_ptr, or None
    accepted_ptr,  # [N] or None
    cu_ptr,  # [N + 1] or None
    x_strides,  # of B, D, T
    y_strides,  # of B, D, T
    state_strides,  # of N, D, S
    T, D,
    S: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr, ONE: tl.constexpr, PACKED: tl.constexpr,
    FIRST: tl.constexpr,  # the first row of a pool that is no null slot
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A program computes BLOCK_D channels of all tokens of a sequence and updates its state."""
    tiles_d = tl.cdiv(D, BLOCK_D)
    pid = tl.program_id(0)
    b = (pid // tiles_d).to(tl.int64)
    offs_d = (pid % tiles_d) * BLOCK_D + tl.arange(0, BLOCK_D)
    at_d = offs_d.to(tl.int64)
    x_row = x_ptr + b * x_strides[0] + at_d * x_strides[1]
    y_row = y_ptr + b * y_strides[0] + at_d * y_strides[1]
    length = T
    if cu_ptr is not None:  # a batch of one
        first, stop = sequence_bounds(cu_ptr, b, T)
        x_row = x_ptr + first * x_strides[2] + at_d * x_strides[1]
        y_row = y_ptr + first * y_strides[2] + at_d * y_strides[1]
        length = (stop - first).to(tl.int32)
    row = b
    if row_ptr is not None:
        row = tl.load(row_ptr + b).to(tl.int64)
        if row < FIRST:
            for t in range(0, length):
                zero = tl.zeros(offs_d.shape, y_ptr.dtype.element_ty)
                tl.store(y_row + t * y_strides[2], zero, mask=offs_d < D)
            return
    state = state_ptr + row * state_strides[0] + at_d * state_strides[1]
    if accepted_ptr is not None:
        _draft_tile(
            x_row, y_row, state, weight_ptr, bias_ptr, x_strides[2], y_strides[2],
            state_strides[2], offs_d, offs_d < D, length, tl.load(accepted_ptr + b), S, W, SILU,
            BLOCK_S,
        )  # fmt: skip
    elif PACKED:
        _packed_step(x_row, y_row, state, weight_ptr, bias_ptr, offs_d, offs_d < D, W, SILU)
    else:
        update_tile(
            x_row, y_row, state, weight_ptr, bias_ptr, x_strides[2], y_strides[2],
            state_strides[2], offs_d, offs_d < D, length, S, W, SILU, ONE, BLOCK_S,
        )  # fmt: skip


def _launch(call: ConvolutionUpdate, y: torch.Tensor, one: bool, packed: bool) -> Launch:
    x, conv_state, weight, *_, cu_seqlens, _, (activation, null_index) = call
    (B, D, T), W, S, where = x.shape, weight.shape[1], conv_state.shape[2], x.device
    config = tuning.lookup("portable_causal_conv1d_update", where, D=D)
    return Launch(
        _causal_conv1d_update_kernel,
        count_sequences(B, cu_seqlens) * cdiv(D, config["BLOCK_D"]), where,
        numbers=(x.stride(), y.stride(), conv_state.stride(), T, D), guarded=True, S=S, W=W,
        SILU=activation is not None, ONE=one, PACKED=packed, FIRST=null_index + 1,
        BLOCK_S=next_power_of_2(S), **config,
    )  # fmt: skip


def prepare_causal_conv1d_update(call: ConvolutionUpdate) -> Optional[Callable]:
    """The tensors of a call -> y [B, D, T] in the memory order of x, or an empty tensor where y is
    written to `out`: one launch."""
    x, conv_state, weight, bias, *lists, out, _ = call
    if not served(x, conv_state, weight, bias):
        return None
    if not weight.is_contiguous() or any([t is not dense(t) for t in (bias, *lists)]):
        return on_copies(prepare_causal_conv1d_update, call, _copied)
    like = torch.empty_like(x, device="meta") if out is None else out
    one, some = x.shape[2] == 1 and call.cu_seqlens is None, x.numel() > 0
    kernel = by_integers = _launch(call, like, one, False)
    if one and call.accepted is None and _is_packed(x, conv_state, weight.shape[1]):
        by_integers = _launch(call, like, one, True)

    def run(x, conv_state, weight, bias, indices, accepted, cu_seqlens, out):
        y = torch.empty_like(x) if out is None else out
        if some:
            launch = kernel if conv_state.data_ptr() & 7 else by_integers
            launch(x, conv_state, weight, bias, y, indices, accepted, cu_seqlens)
        return y if out is None else x.new_empty(0)

    return run


def _copied(x, conv_state, weight, bias, indices, accepted, cu_seqlens, out) -> tuple:
    lists = map(dense, (bias, indices, accepted, cu_seqlens))
    return x, conv_state, weight.contiguous(), *lists, out
