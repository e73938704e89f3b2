"""The gradient of the convolution for contiguous channels of a token.

Computes what causal_conv1d_backward.py does, for calls without final states and seq_idx: a thread
keeps a few channels of a run of tokens, so that each input is loaded and each activation computed
once for all taps. Sizes: B batch, T tokens, D channels, W taps, N sequences; P groups of tokens.
"""

import triton
import triton.language as tl

from .causal_conv1d_rows import advance, sequence_at


@triton.jit
def _places(row, first, T, cu_ptr, N, COUNT: tl.constexpr):
    """(sequences, positions in them) of COUNT tokens from `first` on; int64."""
    n, start, stop = sequence_at(row, first, T, cu_ptr, N)
    sequences, positions = (), ()
    for i in tl.static_range(COUNT):
        n, start, stop = advance(n, start, stop, first + i, T, cu_ptr, N)
        sequences, positions = sequences + (n,), positions + (first + i - start,)
    return sequences, positions


@triton.jit
def _within(x, position, distance: tl.constexpr, PACKED: tl.constexpr):
    """x, or zeros if the token `distance` before is in another sequence."""
    if PACKED and distance > 0:
        x = tl.where(position >= distance, x, 0.0)
    return x


@triton.jit
def _input(
    x, n, position, initial_ptr, initial_strides, d, ok, distance: tl.constexpr, W: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """The input `distance` before a token, in fp32; x is that of the token at that distance."""
    x = _within(x.to(tl.float32), position, distance, PACKED)
    if initial_ptr is not None and distance > 0:
        at = n * initial_strides[0] + (W - 1 + position - distance) * initial_strides[2]
        at += d.to(tl.int64) * initial_strides[1]
        before = tl.load(initial_ptr + at, mask=ok & (position < distance), other=0.0)
        x += before.to(tl.float32)
    return x


@triton.jit
def conv_rows_bwd_kernel(
    x_ptr,  # [B, D, T]
    weight_ptr,  # [D, W]
    bias_ptr,  # [D] or None
    cu_ptr,  # [N + 1] or None
    initial_ptr,  # [N, D, W - 1] or None
    dy_ptr,  # [B, D, T]
    dx_ptr,  # [B, D, T]
    sums_ptr,  # [B, P, W + 1, D] fp32: the group's share of dweight by tap and of dbias
    x_strides,  # of B, T
    dy_strides, dx_strides,
    initial_strides,  # of N, D, W - 1
    T, D, N, P,
    W: tl.constexpr, SILU: tl.constexpr, BLOCK_D: tl.constexpr, RUN: tl.constexpr,
    RUNS: tl.constexpr,
):  # fmt: skip
    """dx of RUNS runs of RUN tokens and BLOCK_D channels, and their contribution to dweight."""
    AHEAD: tl.constexpr = RUN + W - 1  # tokens whose dz a run needs
    PACKED: tl.constexpr = cu_ptr is not None
    tiles_d = tl.cdiv(D, BLOCK_D)
    d = (tl.program_id(0) % tiles_d) * BLOCK_D + tl.arange(0, BLOCK_D)
    ok = d < D
    group = (tl.program_id(0) // tiles_d).to(tl.int64)  # of B * P
    row = group // P
    bias = tl.zeros((BLOCK_D,), tl.float32)
    if bias_ptr is not None:
        bias += tl.load(bias_ptr + d, mask=ok, other=0.0).to(tl.float32)
    taps, sums = (), (bias * 0.0,)
    for w in tl.static_range(W):
        taps = taps + (tl.load(weight_ptr + d * W + w, mask=ok, other=0.0).to(tl.float32),)
        sums = sums + (bias * 0.0,)
    for run in range(0, RUNS):
        first = (group % P) * (RUN * RUNS) + run * RUN
        x_at = x_ptr + row * x_strides[0] + first * x_strides[1] + d
        dy_at = dy_ptr + row * dy_strides[0] + first * dy_strides[1] + d
        dx_at = dx_ptr + row * dx_strides[0] + first * dx_strides[1] + d
        rows, dys, dzs = (), (), ()
        for i in tl.static_range(1 - W, AHEAD):  # every load is under way before the first is used
            there = ok & (first + i >= 0) & (first + i < T)
            rows = rows + (tl.load(x_at + i * x_strides[1], mask=there, other=0.0),)
            if i >= 0:
                dys = dys + (tl.load(dy_at + i * dy_strides[1], mask=there, other=0.0),)
        sequences, positions = _places(row, first, T, cu_ptr, N, AHEAD)
        for i in tl.static_range(AHEAD):
            dz = dys[i].to(tl.float32)
            n, position = sequences[i], positions[i]
            if SILU:
                z = bias
                for back in tl.static_range(W):
                    x = _input(
                        rows[i + W - 1 - back], n, position, initial_ptr, initial_strides, d, ok,
                        back, W, PACKED,
                    )  # fmt: skip
                    z += x * taps[W - 1 - back]
                s = 1.0 / (1.0 + tl.exp(-z))
                dz *= s * (1.0 + z * (1.0 - s))
            dzs = dzs + (dz,)
            if i < RUN:
                added = (sums[0] + dz,)
                for w in tl.static_range(W):
                    x = _input(
                        rows[i + w], n, position, initial_ptr, initial_strides, d, ok, W - 1 - w, W,
                        PACKED,
                    )  # fmt: skip
                    added = added + (sums[1 + w] + dz * x,)
                sums = added
        for i in tl.static_range(RUN):
            dx = bias * 0.0
            for ahead in tl.static_range(W):
                dz = _within(dzs[i + ahead], positions[i + ahead], ahead, PACKED)
                dx += dz * taps[W - 1 - ahead]
            there = ok & (first + i < T)
            tl.store(dx_at + i * dx_strides[1], dx.to(dx_ptr.dtype.element_ty), mask=there)
    sums_ptr += group * (W + 1) * D + d
    for w in tl.static_range(W):
        tl.store(sums_ptr + w * D, sums[1 + w], mask=ok)
    tl.store(sums_ptr + W * D, sums[0], mask=ok)
