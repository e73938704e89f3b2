"""Tb and P of a value head by one warp on 16 x 16 blocks in registers: docs/gdn_hopper_prepare.md.

All blocks are fragments of mma.sync. A fragment of an accumulator has the layout of an operand A,
and of an operand B of the transpose: so if a product needs a transposed block, the transpose is
computed beside it by the same products, and no element ever moves.

W warps of a CTA, each with a head: blocks are [W, 16, 16].
"""

from ...runtime import gluon as hw
from ...runtime.gluon import gl, gluon, record
from ..portable.primitives import level


@gluon.constexpr_function
def tile_layout(warps):
    """The fragment layout of mma.sync for 16 x 16 blocks, one a warp [W, 16, 16]."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@gluon.constexpr_function
def operand(index, layout):
    return gl.DotOperandLayout(index, layout, 2)


@record
class Gates:
    """Vectors of the CTA's heads in shared memory, each [W, C] fp32. A block has 16 tokens."""

    beta: gl.shared_memory_descriptor
    inside: gl.shared_memory_descriptor  # log2 of the decay from the block's start
    since: gl.shared_memory_descriptor  # decay from the block's start
    until: gl.shared_memory_descriptor  # decay from here to the block's end
    whole: gl.shared_memory_descriptor  # decay of the block
    step: gl.shared_memory_descriptor  # beta times the decay of the token alone


@gluon.jit
def _row(smem, b: gl.constexpr, TILE: gl.constexpr):
    """Loads elements of block b of a vector, one for each row of a 16 x 16 block."""
    return gl.expand_dims(smem.slice(16 * b, 16, 1).load(gl.SliceLayout(2, TILE)), 2)


@gluon.jit
def _column(smem, b: gl.constexpr, TILE: gl.constexpr):
    return gl.expand_dims(smem.slice(16 * b, 16, 1).load(gl.SliceLayout(1, TILE)), 1)


@gluon.jit
def _decayed(smem, gates, scale, i, j, bi: gl.constexpr, bj: gl.constexpr, TILE: gl.constexpr):
    """Block (bi, bj) of Gam times the tile in shared memory, rows times scale [W, 16, 1].

    Between blocks Gam is a product of decays, each an exp2 of nothing positive.
    """
    block = smem.slice(16 * bi, 16, 0).slice(16 * bj, 16, 1)
    block = gl.expand_dims(block.load(gl.SliceLayout(0, TILE)), 0)
    if bi == bj:
        gam = gl.exp2(_row(gates.inside, bi, TILE) - _column(gates.inside, bi, TILE))
        block = block * gl.where(i >= j, gam, 0.0) * scale
    else:
        since = _row(gates.since, bi, TILE) * scale
        for b in gl.static_range(bj + 1, bi):
            since *= _row(gates.whole, b, TILE)
        block = block * since * _column(gates.until, bj, TILE)
    return block


@gluon.jit
def _product(a, b, acc):
    """a b^T + acc of blocks in the registers in which the last product left them.

    No element moves: a fragment of the accumulator is one of A, and one of B of the transpose.
    """
    TILE: gl.constexpr = acc.type.layout
    a = gl.convert_layout(a.to(gl.float16), operand(0, TILE), assert_trivial=True)
    b = b.to(gl.float16).permute((0, 2, 1))
    return hw.mma_v2(a, gl.convert_layout(b, operand(1, TILE), assert_trivial=True), acc)


@gluon.jit
def _inverse_16(kk_smem, gates, i, j, b: gl.constexpr, TILE: gl.constexpr):
    """(I - m)^-1 and its transpose of block b of the diagonal, m = -L, [W, 16, 16] fp32.

    [[A, 0], [-m, D]]^-1 has D^-1 m A^-1 below the diagonal. Blocks of size 1 are joined without a
    product, and so are their transposes, because K K^T is symmetric.
    """
    m = _decayed(kk_smem, gates, _row(gates.beta, b, TILE), i, j, b, b, TILE)
    kk = kk_smem.slice(16 * b, 16, 0).slice(16 * b, 16, 1).load(gl.SliceLayout(0, TILE))
    mt = gl.expand_dims(kk, 0) * _column(gates.step, b, TILE)  # right above the diagonal
    x = gl.where(i == j, 1.0, gl.where(level(i, j, 1), m, 0.0))
    xt = gl.where(i == j, 1.0, gl.where(level(j, i, 1), mt, 0.0))
    m = m.to(gl.float16)
    for s in gl.static_range(1, 4):
        low = m * level(i, j, 2**s).to(gl.float16)
        yt = _product(xt, low, gl.zeros_like(x))  # (low x)^T
        x, xt = _product(x, yt, x), _product(yt, x, xt)
    return x, xt


@gluon.jit
def inverse(kk_smem, gates, i, j, TILE: gl.constexpr):
    """(I + L)^-1 by 16 x 16 blocks below the diagonal, fp32, row after row; zero for the rest."""
    W: gl.constexpr = gates.beta.shape[0]
    o = gl.zeros((W, 16, 16), gl.float32, TILE)
    x00, x00t = _inverse_16(kk_smem, gates, i, j, 0, TILE)
    x11, x11t = _inverse_16(kk_smem, gates, i, j, 1, TILE)
    x22, x22t = _inverse_16(kk_smem, gates, i, j, 2, TILE)
    x33, x33t = _inverse_16(kk_smem, gates, i, j, 3, TILE)
    m10 = _decayed(kk_smem, gates, _row(gates.beta, 1, TILE), i, j, 1, 0, TILE)
    m32 = _decayed(kk_smem, gates, _row(gates.beta, 3, TILE), i, j, 3, 2, TILE)
    y10 = _product(x00t, m10, o)  # (m x)^T; with x of what lies left of m
    x10, x10t = _product(x11, y10, o), _product(y10, x11, o)
    x32 = _product(x33, _product(x22t, m32, o), o)
    beta = _row(gates.beta, 2, TILE)
    m20 = _decayed(kk_smem, gates, beta, i, j, 2, 0, TILE)
    m21 = _decayed(kk_smem, gates, beta, i, j, 2, 1, TILE)
    y20 = _product(x00t, m20, _product(x10t, m21, o))
    y21 = _product(x11t, m21, o)
    x20, x21 = _product(x22, y20, o), _product(x22, y21, o)
    beta = _row(gates.beta, 3, TILE)
    m30 = _decayed(kk_smem, gates, beta, i, j, 3, 0, TILE)
    m31 = _decayed(kk_smem, gates, beta, i, j, 3, 1, TILE)
    y30 = _product(x00t, m30, _product(x10t, m31, o))
    y31 = _product(x11t, m31, o)
    x30 = _product(x32, y20, _product(x33, y30, o))
    x31 = _product(x32, y21, _product(x33, y31, o))
    return (x00, o, o, o), (x10, x11, o, o), (x20, x21, x22, o), (x30, x31, x32, x33)


@gluon.jit
def p_row(qk_smem, gates, i, j, bi: gl.constexpr, DTYPE: gl.constexpr, TILE: gl.constexpr):
    """Row bi of blocks of P."""
    W: gl.constexpr = gates.beta.shape[0]
    row = ()
    for bj in gl.static_range(4):
        if bj <= bi:
            block = _decayed(qk_smem, gates, 1.0, i, j, bi, bj, TILE)
        else:
            block = gl.zeros((W, 16, 16), gl.float32, TILE)
        row = row + (block.to(DTYPE),)
    return row


@gluon.jit
def tb_row(x, gates, DTYPE: gl.constexpr, TILE: gl.constexpr):
    """A row of blocks of Tb, from that of the inverse."""
    row = ()
    for b in gl.static_range(4):
        row = row + ((x[b] * _column(gates.beta, b, TILE)).to(DTYPE),)
    return row
