"""The inverse Tb of a chunk on Hopper, made of blocks of 16 tokens, and the stores of such blocks.

Blocks are [4, 16, 16]: block (warp), rows, columns. What all warps read of one has 1 in place of 4.
"""

from ...gdn.hopper.blocks import operand
from ...gdn.hopper.primitives import C
from ...gdn.portable.primitives import level
from ...runtime import gluon as hw
from ...runtime.gluon import gl, gluon
from .levels import TILE


@gluon.jit
def _product(a, b_smem, WHICH: gl.constexpr, acc):
    """a b + acc: of accumulators by a block of four [4, 16, 16] fp16 in shared memory."""
    a = gl.convert_layout(a.to(gl.float16), operand(0, TILE), assert_trivial=True)
    b = b_smem.slice(WHICH, 1).load(operand(1, TILE))
    like = gl.zeros((4, 16, 16), gl.float16, operand(1, TILE))
    b, _ = gl.broadcast(b, like)
    return hw.mma_v2(a, b, acc)


@gluon.jit
def _transposed_product(a, b, acc):
    """a b^T + acc of accumulators."""
    a = gl.convert_layout(a.to(gl.float16), operand(0, TILE), assert_trivial=True)
    b = b.to(gl.float16).permute((0, 2, 1))
    return hw.mma_v2(a, gl.convert_layout(b, operand(1, TILE), assert_trivial=True), acc)


@gluon.jit
def _diagonal_inverse(kk, row, column, i, j):
    """(I + strictly_lower(diag(beta) kk))^-1; kk symmetric; beta of rows and of columns."""
    m = kk * -row
    x = gl.where(i == j, 1.0, gl.where(level(i, j, 1), m, 0.0))
    xt = gl.where(i == j, 1.0, gl.where(level(j, i, 1), kk * -column, 0.0))
    for s in gl.static_range(1, 4):
        low = gl.where(level(i, j, 2**s), m, 0.0)
        yt = _transposed_product(xt, low, gl.zeros_like(x))  # (low x)^T
        x, xt = _transposed_product(x, yt, x), _transposed_product(yt, x, xt)
    return x


@gluon.jit
def inverse(smem, kk, k0, k1, k2, row, column, i, j, b):
    """The four columns of blocks of Tb. k0, k1, k2: of A, right below the diagonal.

    Of blocks, T_bj = -(sum over k of j < k <= b of T_bk A_kj) T_jj.
    """
    t = _diagonal_inverse(kk, row, column, i, j) * column
    zero = gl.zeros((4, 16, 16), gl.float32, TILE)
    tt, a0, a1, a2 = smem.index(0), smem.index(1), smem.index(2), smem.index(3)
    tt.store(t.to(gl.float16))
    a0.store((-k0).to(gl.float16))
    a1.store((-k1).to(gl.float16))
    a2.store((-k2).to(gl.float16))
    t3 = gl.where(b == 3, t, 0.0)
    y = _product(t3, a2, 3, zero)
    t2 = gl.where(b == 2, t, _product(y, tt, 2, zero))
    y = _product(t3, a1, 3, _product(t2, a1, 2, zero))
    t1 = gl.where(b == 1, t, _product(y, tt, 1, zero))
    y = _product(t3, a0, 3, _product(t2, a0, 2, _product(t1, a0, 1, zero)))
    t0 = gl.where(b == 0, t, _product(y, tt, 0, zero))
    return t0, t1, t2, t3


@gluon.jit
def store_tile(desc, at, smem, x0, x1, x2, x3):
    """Stores four columns of blocks to rows `at`.. of desc, through smem [C, C]."""
    x0, x1, x2, x3 = x0.to(desc.dtype), x1.to(desc.dtype), x2.to(desc.dtype), x3.to(desc.dtype)
    x = gl.join(gl.join(x0, x2), gl.join(x1, x3))  # [4, 16, 16, 2, 2]
    smem.store(x.permute((0, 1, 3, 4, 2)).reshape([C, C]))
    hw.fence_async_shared()
    hw.tma_store(desc, [at, 0], smem)


@gluon.jit
def store_kept(desc, at, smem, x0, x1, x2, x3):
    """Stores four columns of blocks in the order of kept_at(column, row), gdn/portable/inverse.py,
    to rows `at`.. of desc, through smem [C, C]."""
    x0, x1, x2, x3 = x0.to(desc.dtype), x1.to(desc.dtype), x2.to(desc.dtype), x3.to(desc.dtype)
    x = gl.join(gl.join(x0, x2), gl.join(x1, x3)).reshape([4, 2, 4, 2, 2, 8, 2, 2])
    smem.store(x.permute((6, 7, 0, 5, 2, 1, 4, 3)).reshape([C, C]))
    hw.fence_async_shared()
    hw.tma_store(desc, [at, 0], smem)
