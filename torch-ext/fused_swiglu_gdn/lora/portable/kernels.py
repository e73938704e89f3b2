"""Three kernels for the adapters of projections that share x, round torch's own products.

    narrow   out_i [M, r_i] = scale_i x_i w_i^T: h of x and a, dh of dy and b
    wide     y_i [M, N_i] += scale_i h_i w_i^T, in place: y of h and b; dx of dh and a, all in one
    weights  out_i [C_i, r_i] = scale_i z_i^T h_i: db of dy and h, da of x and dh

x, y and their gradients are in bf16 (or fp32), h and dh in fp32, adapters and their gradients in
fp32 or in the dtype of x. An fp32 factor beside bf16 is the sum of two in bf16, so that tensor
cores multiply it with a relative error of 2^-17; sums are fp32.

A launch serves up to MOST adapters; those behind the last are None. Sizes: M tokens, r ranks.

Dropout of x has a mask for each adapter: a hash of a seed, the adapter, the row and the column,
which the backward makes again. No mask is kept.
"""

import triton
import triton.language as tl


@triton.jit
def _split(x, dtype: tl.constexpr):
    """x in fp32 as the sum of two numbers in `dtype`."""
    high = x.to(dtype)
    return high, (x - high.to(tl.float32)).to(dtype)


@triton.jit
def _mixed(x):
    """A hash of 32 bits, of which each depends on all of x ("lowbias32", C. Wellons)."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _is_kept(seed_ptr, adapter: tl.constexpr, rows, words, p):
    """Mask of the numbers of x that are kept, at these rows and columns, each [n, 1] or [1, n]."""
    seed = tl.load(seed_ptr)
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    other: tl.constexpr = ((adapter + 1) * 0x9E3779B9) & 0xFFFFFFFF
    of_row = _mixed(_mixed(rows.to(tl.uint32) ^ low) + other)
    found = _mixed(of_row ^ _mixed(words.to(tl.uint32) + high))
    return (found >> 8).to(tl.float32) * (1.0 / 16777216.0) >= p


@triton.jit
def _dot(x, w, total, SPLIT: tl.constexpr):
    """total + x w for an x that is not fp32 where SPLIT, and w in fp32 or in the dtype of x."""
    if SPLIT and w.dtype == x.dtype:
        total = tl.dot(x, w, total)
    elif SPLIT:
        high, low = _split(w, x.dtype)
        total = tl.dot(x, low, total)
        total = tl.dot(x, high, total)
    else:
        total = tl.dot(x, w, total, input_precision="ieee")
    return total


@triton.jit
def _narrow(
    x_ptr, w_ptr, out_ptr, seed_ptr, p, scale, M, K, stride, total, column,
    adapter: tl.constexpr, r: tl.constexpr, R: tl.constexpr, UP: tl.constexpr, ROWS: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """ROWS rows of out [M, total] from `column` on. w is [r, K], or with UP [K, r]."""
    SPLIT: tl.constexpr = x_ptr.dtype.element_ty != tl.float32
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ranks = tl.arange(0, R)
    found = tl.zeros((ROWS, R), tl.float32)
    x_ptr += rows.to(tl.int64)[:, None] * stride
    for k in range(0, K, STEP):
        at = k + tl.arange(0, STEP)
        here = (rows[:, None] < M) & (at[None, :] < K)
        x = tl.load(x_ptr + at[None, :], mask=here, other=0.0)
        if seed_ptr is not None:
            x = tl.where(_is_kept(seed_ptr, adapter, rows[:, None], at[None, :], p), x, 0.0)
        if UP:
            place = at[:, None] * r + ranks[None, :]
        else:
            place = ranks[None, :] * K + at[:, None]
        w = tl.load(w_ptr + place, mask=(at[:, None] < K) & (ranks[None, :] < r), other=0.0)
        found = _dot(x, w, found, SPLIT)
    out = out_ptr + rows.to(tl.int64)[:, None] * total + column + ranks[None, :]
    tl.store(out, found * scale, mask=(rows[:, None] < M) & (ranks[None, :] < r))


@triton.jit(do_not_specialize=["M"])
def narrow_kernel(
    x0, x1, x2, x3, w0, w1, w2, w3, out_ptr, seed_ptr, M, sizes, strides, scales, drops, total,
    r0: tl.constexpr, r1: tl.constexpr, r2: tl.constexpr, r3: tl.constexpr, R: tl.constexpr,
    UP: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """out_i = scale_i x_i w_i^T; seed_ptr: with dropout of x."""
    x, w = (x0, x1, x2, x3), (w0, w1, w2, w3)
    RANKS: tl.constexpr = (r0, r1, r2, r3)
    FIRST: tl.constexpr = (0, r0, r0 + r1, r0 + r1 + r2)
    i = tl.program_id(1)
    for n in tl.static_range(4):
        if RANKS[n] > 0:
            if i == n:
                _narrow(
                    x[n], w[n], out_ptr, seed_ptr, drops[n], scales[n], M, sizes[n], strides[n],
                    total, FIRST[n], n, RANKS[n], R, UP, ROWS, STEP,
                )  # fmt: skip


@triton.jit
def _is_of(tile, ends, n: tl.constexpr):
    """True if a tile is of output n; ends: the first tile behind each output."""
    if n == 0:
        return tile < ends[0]
    elif n == 3:
        return tile >= ends[2]
    else:
        return (tile >= ends[n - 1]) & (tile < ends[n])


@triton.jit
def _product(
    h_ptr, w_ptr, scale, rows, words, M, N, total, column, found, dtype: tl.constexpr,
    r: tl.constexpr, R: tl.constexpr, UP: tl.constexpr,
):  # fmt: skip
    """found + scale h w^T, a tile. w is [N, r] with UP, or [r, N]."""
    ranks = tl.arange(0, R)
    here = (rows[:, None] < M) & (ranks[None, :] < r)
    at = h_ptr + rows.to(tl.int64)[:, None] * total + column + ranks[None, :]
    h = tl.load(at, mask=here, other=0.0) * scale
    if UP:
        place = words[None, :] * r + ranks[:, None]
    else:
        place = ranks[:, None] * N + words[None, :]
    w = tl.load(w_ptr + place, mask=(words[None, :] < N) & (ranks[:, None] < r), other=0.0)
    if dtype == tl.float32:
        found = tl.dot(h, w, found, input_precision="ieee")
    else:
        high, low = _split(h, dtype)
        found = _dot(high, w, found, True)
        found = tl.dot(low, w.to(dtype), found)
    return found


@triton.jit
def _wide(
    y_ptr, h_ptr, w_ptr, scale, M, N, total, column, tile, r: tl.constexpr, R: tl.constexpr,
    ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """A tile of y [M, N] += scale h w^T."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    words = tile * WORDS + tl.arange(0, WORDS)
    at = y_ptr + rows.to(tl.int64)[:, None] * N + words[None, :]
    here = (rows[:, None] < M) & (words[None, :] < N)
    y = tl.load(at, mask=here, other=0.0)
    found = tl.zeros((ROWS, WORDS), tl.float32)
    found = _product(
        h_ptr, w_ptr, scale, rows, words, M, N, total, column, found, y.dtype, r, R, True
    )
    tl.store(at, (y.to(tl.float32) + found).to(y.dtype), mask=here)


@triton.jit(do_not_specialize=["M"])
def wide_kernel(
    y0, y1, y2, y3, w0, w1, w2, w3, h_ptr, M, sizes, ends, scales, total,
    r0: tl.constexpr, r1: tl.constexpr, r2: tl.constexpr, r3: tl.constexpr, R: tl.constexpr,
    ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """y_i += scale_i h_i w_i^T. ends: the first tile of columns behind each output."""
    y, w = (y0, y1, y2, y3), (w0, w1, w2, w3)
    RANKS: tl.constexpr = (r0, r1, r2, r3)
    FIRST: tl.constexpr = (0, r0, r0 + r1, r0 + r1 + r2)
    tile = tl.program_id(1)
    for n in tl.static_range(4):
        if RANKS[n] > 0:
            if _is_of(tile, ends, n):
                at = tile if n == 0 else tile - ends[n - 1]
                _wide(
                    y[n], h_ptr, w[n], scales[n], M, sizes[n], total, FIRST[n], at, RANKS[n], R,
                    ROWS, WORDS,
                )  # fmt: skip


@triton.jit
def _to_input(
    found, dh_ptr, a_ptr, seed_ptr, p, scale, rows, words, M, K, total, column,
    adapter: tl.constexpr, dtype: tl.constexpr, r: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """found + scale dh a of one adapter, where its dropout has kept x."""
    nothing = tl.zeros_like(found)
    more = _product(
        dh_ptr, a_ptr, scale, rows, words, M, K, total, column, nothing, dtype, r, R, False
    )
    if seed_ptr is not None:
        kept = _is_kept(seed_ptr, adapter, rows[:, None], words[None, :], p)
        more = tl.where(kept, more, 0.0)
    return found + more


@triton.jit(do_not_specialize=["M"])
def input_kernel(
    dx_ptr, dh_ptr, a0, a1, a2, a3, seed_ptr, M, K, scales, drops, total,
    r0: tl.constexpr, r1: tl.constexpr, r2: tl.constexpr, r3: tl.constexpr, R: tl.constexpr,
    ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """dx += sum of scale_i dh_i a_i, with one rounding."""
    a = (a0, a1, a2, a3)
    RANKS: tl.constexpr = (r0, r1, r2, r3)
    FIRST: tl.constexpr = (0, r0, r0 + r1, r0 + r1 + r2)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    words = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    at = dx_ptr + rows.to(tl.int64)[:, None] * K + words[None, :]
    here = (rows[:, None] < M) & (words[None, :] < K)
    dx = tl.load(at, mask=here, other=0.0)
    kind: tl.constexpr = dx.dtype
    found = tl.zeros((ROWS, WORDS), tl.float32)
    for n in tl.static_range(4):
        if RANKS[n] > 0:
            found = _to_input(
                found, dh_ptr, a[n], seed_ptr, drops[n], scales[n], rows, words, M, K, total,
                FIRST[n], n, kind, RANKS[n], R,
            )  # fmt: skip
    tl.store(at, (dx.to(tl.float32) + found).to(dx.dtype), mask=here)


@triton.jit
def _weights(
    z_ptr, h_ptr, out_ptr, seed_ptr, p, scale, M, C, stride, total, column, tile,
    adapter: tl.constexpr, r: tl.constexpr, R: tl.constexpr, UP: tl.constexpr, STEP: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """WORDS columns of z: scale z^T h. out is [C, r] with UP, or [r, C]."""
    SPLIT: tl.constexpr = z_ptr.dtype.element_ty != tl.float32
    words = tile * WORDS + tl.arange(0, WORDS)
    ranks = tl.arange(0, R)
    found = tl.zeros((WORDS, R), tl.float32)
    for m in range(0, M, STEP):
        rows = m + tl.arange(0, STEP)
        at = z_ptr + rows.to(tl.int64)[None, :] * stride + words[:, None]
        z = tl.load(at, mask=(rows[None, :] < M) & (words[:, None] < C), other=0.0)
        if seed_ptr is not None:
            z = tl.where(_is_kept(seed_ptr, adapter, rows[None, :], words[:, None], p), z, 0.0)
        at = h_ptr + rows.to(tl.int64)[:, None] * total + column + ranks[None, :]
        h = tl.load(at, mask=(rows[:, None] < M) & (ranks[None, :] < r), other=0.0)
        found = _dot(z, h, found, SPLIT)
    if UP:
        place = words[:, None] * r + ranks[None, :]
    else:
        place = ranks[None, :] * C + words[:, None]
    tl.store(out_ptr + place, found * scale, mask=(words[:, None] < C) & (ranks[None, :] < r))


@triton.jit(do_not_specialize=["M"])
def weights_kernel(
    z0, z1, z2, z3, out0, out1, out2, out3, h_ptr, seed_ptr, M, sizes, strides, ends, scales,
    drops, total, r0: tl.constexpr, r1: tl.constexpr, r2: tl.constexpr, r3: tl.constexpr,
    R: tl.constexpr, UP: tl.constexpr, STEP: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """out_i = scale_i z_i^T h_i. ends: the first tile of columns behind each output."""
    z, out = (z0, z1, z2, z3), (out0, out1, out2, out3)
    RANKS: tl.constexpr = (r0, r1, r2, r3)
    FIRST: tl.constexpr = (0, r0, r0 + r1, r0 + r1 + r2)
    tile = tl.program_id(0)
    for n in tl.static_range(4):
        if RANKS[n] > 0:
            if _is_of(tile, ends, n):
                at = tile if n == 0 else tile - ends[n - 1]
                _weights(
                    z[n], h_ptr, out[n], seed_ptr, drops[n], scales[n], M, sizes[n], strides[n],
                    total, FIRST[n], at, n, RANKS[n], R, UP, STEP, WORDS,
                )  # fmt: skip
