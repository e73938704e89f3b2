"""Helpers of gradient.py for vectors of a chunk's tokens and tiles [C, 64] of a warpgroup.

A tile has a row for each token of a chunk; its columns are tokens, or half of the head dim. A
vector [C] belongs to its rows unless stated otherwise.
"""

from ...runtime import gluon as hw
from ...runtime.gluon import gl, gluon
from ..portable.gates import log2_decay
from .primitives import C, D, acc_layout, start_product

LINE = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))  # each warp has all tokens of a chunk
TILE = gl.constexpr(acc_layout(64))  # fp32


@gluon.jit
def cumulative_gates(g_ptr, g_strides, A_log_ptr, dt_bias_ptr, hv, left):
    """cumsum(g) of a head in log2, [C] fp32."""
    t = gl.arange(0, C, layout=LINE)
    g = gl.load(g_ptr + t * g_strides[1] + hv * g_strides[2], mask=t < left, other=0.0)
    g = gl.where(t < left, log2_decay(g, A_log_ptr, dt_bias_ptr, hv), 0.0)
    return gl.associative_scan(g, 0, hw.add)


@gluon.jit
def by_row(x):
    """[C] as a column, broadcastable over a tile."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, TILE)), 1)


@gluon.jit
def by_column(x):
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(0, TILE)), 0)


@gluon.jit
def decay(G):
    """Gam [C, C]; finite values above the diagonal."""
    return gl.exp2(gl.minimum(by_row(G) - by_column(G), 100.0))


@gluon.jit
def half_of(smem, d: gl.constexpr):
    """Half d of the columns of a tile [C, D] in shared memory."""
    return smem.slice(64 * d, 64, 1)


@gluon.jit
def row_dot(x, smem):
    """[C]: dot products of the rows of x [C, 64] fp32 and of a tile in shared memory."""
    return gl.sum(x * smem.load(TILE).to(gl.float32), 1)


@gluon.jit
def inverse_norm(smem, NORM: gl.constexpr):
    """1 / sqrt(sum(x^2) + 1e-6) of each row [C], or 1; fp32."""
    if NORM:
        x0 = half_of(smem, 0).load(TILE).to(gl.float32)
        x1 = half_of(smem, 1).load(TILE).to(gl.float32)
        return gl.rsqrt(gl.sum(x0 * x0, 1) + gl.sum(x1 * x1, 1) + 1e-6)
    else:
        return gl.full((C,), 1.0, gl.float32, gl.SliceLayout(1, TILE))


@gluon.jit
def product(a, b):
    """a b^T [C, 64]."""
    return hw.warpgroup_mma_wait(0, (start_product(a, b),))


@gluon.jit
def rows_of(state, d: gl.constexpr):
    """Half d of the rows (K) of a state [K, ..] in shared memory."""
    return state.slice(64 * d, 64, 0)


@gluon.jit
def add_rows(dx, dots, wide, f, smem):
    """dx + f wide [C, 64], and dots + the dot products of the rows of wide and of a tile."""
    return dx + gl.expand_dims(f, 1) * wide, dots + row_dot(wide, smem)


@gluon.jit
def line(ptr):
    """Loads [C] fp32, a factor for each row of a tile."""
    return gl.load(ptr + gl.arange(0, C, layout=gl.SliceLayout(1, TILE)))


@gluon.jit
def store_line(ptr, x):
    gl.store(ptr + gl.arange(0, C, layout=x.type.layout), x)


@gluon.jit
def store_rows(ptr, x, left, H: gl.constexpr):
    """Stores x [C, 64] of one head to the rows below `left`."""
    i = gl.expand_dims(gl.arange(0, C, layout=gl.SliceLayout(1, TILE)), 1)
    d = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, TILE)), 0)
    gl.store(ptr + i * (H * D) + d, x.to(ptr.dtype.element_ty), mask=i < left)


@gluon.jit
def finish(dx0, dx1, x_smem, r, ptr, left, NORM: gl.constexpr, H: gl.constexpr):
    """Applies the gradient of the norm of x, whose inverse is r, and stores the result."""
    if NORM:
        along = row_dot(dx0, half_of(x_smem, 0)) + row_dot(dx1, half_of(x_smem, 1))
        along = gl.expand_dims(r * r * along, 1)
        dx0 -= half_of(x_smem, 0).load(TILE).to(gl.float32) * along
        dx1 -= half_of(x_smem, 1).load(TILE).to(gl.float32) * along
    store_rows(ptr, dx0, left, H)
    store_rows(ptr + 64, dx1, left, H)


@gluon.jit
def first_token(cu_ptr, end, c, length):
    """(batch, first token) of chunk c in tensors [B, T, ..], int64."""
    if cu_ptr is None:
        return end.to(gl.int64), (c * C).to(gl.int64)
    else:
        return end.to(gl.int64) * 0, (end - length + c * C).to(gl.int64)
