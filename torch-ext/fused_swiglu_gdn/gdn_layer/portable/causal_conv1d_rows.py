"""The convolution for contiguous channels of a token, the layout of projections.

A thread keeps a few channels of a run of tokens, so that each input is loaded and widened once for
all of its taps. Sizes: T tokens, D channels, W taps, N sequences.
"""

import triton
import triton.language as tl

from ...runtime.primitives import activate, sequence_bounds


@triton.jit
def _add_initial(
    acc,  # [BLOCK_D] fp32
    taps,
    initial_ptr,  # [N, D, W - 1]
    strides,
    n, position, offs_d, mask_d,
    W: tl.constexpr,
):  # fmt: skip
    """Adds the contribution of the inputs before a sequence to the token at `position` in it."""
    for back in tl.static_range(1, W):
        at = n * strides[0] + (W - 1 + position - back) * strides[2]
        wanted = mask_d & (position < back)
        x = tl.load(initial_ptr + at + offs_d * strides[1], mask=wanted, other=0.0)
        acc += x.to(tl.float32) * taps[W - 1 - back]
    return acc


@triton.jit
def sequence_at(row, token, T, cu_ptr, N):
    """(n, its first token, its end) of the sequence of a token; all int64."""
    n = row.to(tl.int64)
    start = n * 0
    stop = start + T
    if cu_ptr is not None:
        n = start
        beyond = start + N
        while beyond - n > 1:  # bisection
            middle = (n + beyond) // 2
            below = tl.load(cu_ptr + middle).to(tl.int64) <= token
            n = tl.where(below, middle, n)
            beyond = tl.where(below, beyond, middle)
        start, stop = sequence_bounds(cu_ptr, n, T)
        start = tl.minimum(start, token)  # wrong offsets may leave tokens before the first one
    return n, start, stop


@triton.jit
def advance(n, start, stop, token, T, cu_ptr, N):
    """The result of sequence_at for a token that is not before the current sequence."""
    if cu_ptr is not None:
        while (token >= stop) & (n < N - 1):
            n += 1
            start = stop
            _, stop = sequence_bounds(cu_ptr, n, T)
    return n, start, stop


@triton.jit
def _alone(first, start, stop, seq_ptr, cu_ptr, initial_ptr, T, W: tl.constexpr, RUN: tl.constexpr):
    """True if a run of tokens and the W - 1 before it are in one sequence, or before its zeros."""
    alone = first >= 0
    if cu_ptr is not None:
        alone = (first - start >= W - 1) & (first + RUN <= stop)
    elif initial_ptr is not None:
        alone = first >= W - 1
    if seq_ptr is not None:
        at = first + 1 - W + tl.arange(0, triton.next_power_of_2(RUN + W - 1))
        at = tl.minimum(tl.maximum(at, 0), tl.minimum(first + RUN, T) - 1)
        marks = tl.load(seq_ptr + at)
        alone = alone & (tl.min(marks, 0) == tl.max(marks, 0))
    return alone


@triton.jit
def _together(token, back, position, seq_ptr):
    """True if the token `back` before is in the same sequence."""
    together = position >= back
    if seq_ptr is not None:
        theirs = tl.load(seq_ptr + token - back, mask=together, other=0)
        together = together & (theirs == tl.load(seq_ptr + token))
    return together


@triton.jit
def _load_run(x_ptr, strides, first, local_d, mask_d, T, W: tl.constexpr, RUN: tl.constexpr):
    """Loads the inputs of a run and the W - 1 before it, [BLOCK_D] each; zeros beyond the T
    tokens."""
    x_at = x_ptr + (first.to(tl.int64) + (1 - W)) * strides[0] + local_d * strides[1]
    rows = ()
    for i in tl.static_range(1 - W, RUN):
        there = first >= -i if i < 0 else i < T - first
        rows = rows + (tl.load(x_at, mask=mask_d & there, other=0.0),)
        x_at += strides[0]  # a sum for each, where products would all be kept in registers
    return rows


@triton.jit
def conv_rows(
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
    T, D, N,
    W: tl.constexpr, SILU: tl.constexpr, PTX: tl.constexpr, BLOCK_T: tl.constexpr,
    RUN: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """y of BLOCK_T tokens and BLOCK_D channels, RUN tokens at a time."""
    local_d = tl.arange(0, BLOCK_D)
    offs_d = d0 + local_d
    mask_d = offs_d < D
    bias = tl.zeros((BLOCK_D,), tl.float32)
    if bias_ptr is not None:
        bias += tl.load(bias_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    taps = ()
    for w in tl.static_range(W):
        tap = tl.load(weight_ptr + offs_d * W + w, mask=mask_d, other=0.0).to(tl.float32)
        taps = taps + (tap,)
    SIMPLE: tl.constexpr = seq_ptr is None and cu_ptr is None and initial_ptr is None
    n, start, stop = sequence_at(row, t0, T, None, N)
    for run in range(0, tl.cdiv(tl.minimum(T - t0, BLOCK_T), RUN)):
        first = t0 + run * RUN
        # on their way before it is known whether they serve: they need not wait for the search
        rows = _load_run(x_ptr, x_strides, first, local_d, mask_d, T, W, RUN)
        alone = True
        if not SIMPLE:
            if run == 0:
                n, start, stop = sequence_at(row, first, T, cu_ptr, N)
            n, start, stop = advance(n, start, stop, first, T, cu_ptr, N)
            alone = _alone(first, start, stop, seq_ptr, cu_ptr, initial_ptr, T, W, RUN)
        if alone:
            y_at = y_ptr + first.to(tl.int64) * y_strides[0] + local_d * y_strides[1]
            for i in tl.static_range(RUN):
                acc = bias
                for back in tl.static_range(W):
                    acc += rows[i + W - 1 - back].to(tl.float32) * taps[W - 1 - back]
                acc = activate(acc, "silu", PTX) if SILU else acc
                y = acc.to(y_ptr.dtype.element_ty)
                tl.store(y_at, y, mask=mask_d & (i < T - first))
                y_at += y_strides[0]
        else:  # near where a sequence begins or ends
            for i in range(0, tl.minimum(RUN, T - first)):
                token = first + i
                n, start, stop = advance(n, start, stop, token, T, cu_ptr, N)
                at = token.to(tl.int64)
                acc = bias
                for back in tl.static_range(W):
                    mine = mask_d & _together(token, back, token - start, seq_ptr)
                    x_back = x_ptr + (at - back) * x_strides[0] + local_d * x_strides[1]
                    x = tl.load(x_back, mask=mine, other=0.0)
                    acc += x.to(tl.float32) * taps[W - 1 - back]
                if initial_ptr is not None:
                    if token - start < W - 1:
                        acc = _add_initial(
                            acc, taps, initial_ptr, initial_strides, n, token - start, offs_d,
                            mask_d, W,
                        )  # fmt: skip
                acc = activate(acc, "silu", PTX) if SILU else acc
                y = acc.to(y_ptr.dtype.element_ty)
                tl.store(y_ptr + at * y_strides[0] + local_d * y_strides[1], y, mask=mask_d)
