"""The short depthwise causal convolution of a layer, for the next tokens.

    y_t = act(bias + sum_w weight[w] x[t - W + 1 + w])        with the inputs before in a state

Sizes: B batch, D channels, T tokens, W taps, S columns of the state.
"""

import functools
from typing import Optional

import torch
import triton
import triton.language as tl

from ...runtime import tuning
from ...runtime.dtypes import served
from ...runtime.launch import Launch, named
from ...runtime.primitives import activate


def supports_causal_conv1d_update(x, conv_state, weight, bias, activation) -> bool:
    return served(x, conv_state, weight, bias)


@triton.jit
def update_tile(
    x_row,  # [BLOCK_D] pointers to token 0
    y_row,  # [BLOCK_D] pointers to token 0
    state,  # [BLOCK_D] pointers to column 0
    weight_ptr,  # [D, W]
    bias_ptr,  # [D] or None
    x_step,
    y_step,
    state_step,
    offs_d,
    mask_d,
    T,
    S: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    ONE: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """T tokens of y after those in the state, which then moves T columns on; ONE says T = 1."""
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
        for t in range(0, T):
            acc = bias
            for w in tl.static_range(0, W):
                tap = tl.load(weight_ptr + offs_d * W + w, mask=mask_d, other=0.0).to(tl.float32)
                at = t - (W - 1) + w  # the token, or a column counted from the state's end
                seen = tl.load(x_row + at * x_step, mask=mask_d & (at >= 0), other=0.0)
                held = tl.load(state + (S + at) * state_step, mask=mask_d & (at < 0), other=0.0)
                acc += tap * (seen.to(tl.float32) + held.to(tl.float32))
            if SILU:
                acc = activate(acc, "silu")
            tl.store(y_row + t * y_step, acc.to(y_row.dtype.element_ty), mask=mask_d)
    tl.debug_barrier()  # every thread has read before any writes
    tl.store(state_ptrs, moved, mask=mask)


@triton.jit
def _packed_step(
    x_row,  # [BLOCK_D] pointers to the token
    y_row,  # [BLOCK_D] pointers to the token
    state,  # [BLOCK_D] pointers to column 0
    weight_ptr,  # [D, W]
    bias_ptr,  # [D] or None
    offs_d,
    mask_d,
    W: tl.constexpr,
    SILU: tl.constexpr,
):
    """update_tile of one token where a channel's four columns of 16 bits are one integer."""
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
    """Whether _packed_step takes a token of x [B, D, 1]."""
    return (
        x.dtype == conv_state.dtype
        and x.element_size() == 2
        and conv_state.shape[2] == 4
        and W <= 4
        and conv_state.stride()[1:] == (4, 1)
        and conv_state.stride(0) % 4 == 0
        and conv_state.data_ptr() % 8 == 0
    )


@triton.jit
def _causal_conv1d_update_kernel(
    x_ptr,  # [B, D, T]
    state_ptr,  # [B, D, S]
    weight_ptr,  # [D, W]
    bias_ptr,  # [D] or None
    y_ptr,  # [B, D, T]
    x_strides,  # of B, D, T
    y_strides,  # of B, D, T
    state_strides,  # of B, D, S
    T,
    D,
    S: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    ONE: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A program takes BLOCK_D channels of a row through its T tokens, then moves the state on."""
    tiles_d = tl.cdiv(D, BLOCK_D)
    pid = tl.program_id(0)
    b = (pid // tiles_d).to(tl.int64)
    offs_d = (pid % tiles_d) * BLOCK_D + tl.arange(0, BLOCK_D)
    at_d = offs_d.to(tl.int64)
    x_row = x_ptr + b * x_strides[0] + at_d * x_strides[1]
    y_row = y_ptr + b * y_strides[0] + at_d * y_strides[1]
    state = state_ptr + b * state_strides[0] + at_d * state_strides[1]
    if PACKED:
        _packed_step(x_row, y_row, state, weight_ptr, bias_ptr, offs_d, offs_d < D, W, SILU)
    else:
        update_tile(
            x_row, y_row, state, weight_ptr, bias_ptr, x_strides[2], y_strides[2],
            state_strides[2], offs_d, offs_d < D, T, S, W, SILU, ONE, BLOCK_S,
        )  # fmt: skip


@functools.lru_cache(maxsize=1024, typed=True)
def _plan(
    where: torch.device, B: int, S: int, W: int, silu: bool, one: bool, packed: bool, *numbers
) -> Launch:
    """numbers: the kernel's."""
    D = numbers[-1]
    config = tuning.lookup("portable_causal_conv1d_update", where, D=D)
    constexprs, options = named(
        _causal_conv1d_update_kernel, S=S, W=W, SILU=silu, ONE=one, PACKED=packed,
        BLOCK_S=triton.next_power_of_2(S), **config,
    )  # fmt: skip
    return Launch(
        _causal_conv1d_update_kernel,
        B * triton.cdiv(D, config["BLOCK_D"]),
        where,
        numbers=numbers,
        constexprs=constexprs,
        options=options,
    )


def causal_conv1d_update(
    x: torch.Tensor,  # [B, D, T], any strides
    conv_state: torch.Tensor,  # [B, D, S], any strides, updated in place
    weight: torch.Tensor,  # [D, W]
    bias: Optional[torch.Tensor],  # [D]
    activation: Optional[str],
) -> torch.Tensor:  # [B, D, T]
    """One launch; y in the memory order of x."""
    (B, D, T), W, S = x.shape, weight.shape[1], conv_state.shape[2]
    y = torch.empty_like(x)  # [B, D, T]
    if y.numel() == 0:
        return y
    flags = (activation is not None, T == 1, T == 1 and _is_packed(x, conv_state, W))
    strides = (x.stride(), y.stride(), conv_state.stride())
    kernel = _plan(x.device, B, S, W, *flags, *strides, T, D)
    kernel(x, conv_state, weight.contiguous(), bias, y)
    return y
