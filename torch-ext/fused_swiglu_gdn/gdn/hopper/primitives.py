"""Shared helpers of the Gated DeltaNet kernels on Hopper: sizes, positions of chunks, products."""

from ...runtime import gluon as hw
from ...runtime.gluon import gl, gluon
from ...runtime.primitives import sequence_bounds
from ..portable.primitives import locate as locate_chunk

C = gl.constexpr(64)  # tokens a chunk
D = gl.constexpr(128)  # head dims K and V
# Ragged descriptors (plan.py, token_map) place the end of a packed sequence at this row, so
# that TMA itself zero-fills loads and clips stores past it.
RAGGED_END = gl.constexpr(2**30)


@gluon.jit
def locate(row, cu_ptr, T, N, NT):
    """Maps a chunk row to (batch, end, first row) for the token descriptors, chunk, length."""
    n, c, start, length = locate_chunk(row, cu_ptr, T, N, NT, C)
    batch, end, first = row * 0, n, row * 0
    if cu_ptr is not None:
        batch, end, first = batch + RAGGED_END, start.to(gl.int32) + length, RAGGED_END - length
    return batch, end, first, c, length


@gluon.jit
def sequence_at(cu_ptr, n, T):
    """Maps sequence n to (batch, end, first row) for the token descriptors, its length, and its
    first chunk row."""
    if cu_ptr is None:
        batch, end, row, tokens = n * 0, n, n * 0, T
        block = n * ((T + C - 1) // C)
    else:
        start, end = sequence_bounds(cu_ptr, n, T)
        start, end = start.to(gl.int32), end.to(gl.int32)
        tokens = end - start
        batch, row = n * 0 + RAGGED_END, RAGGED_END - tokens
        block = start // C + n
    return batch, end, row, tokens, block


@gluon.constexpr_function
def acc_layout(columns):
    """The layout of a warpgroup's wgmma accumulator [64, columns] fp32."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def a_layout(columns):
    """The layout of the same tile in bf16 or fp16 as a register operand A: converting moves no
    data."""
    return gl.DotOperandLayout(0, acc_layout(columns), 2)


@gluon.jit
def pin(x):
    """x, in a form that LLVM cannot move.

    Without this phi(round(S0), round(S)) becomes round(phi) at the top of the loop, past the point
    up to which ptxas can see that S is complete, and ptxas then serializes every wgmma (C7515). The
    same holds for S itself, which the next chunk scales while products are in flight (C7517).
    """
    PACK: gl.constexpr = 32 // x.dtype.primitive_bitwidth
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=PACK
    )


@gluon.jit
def as_a(x, DTYPE: gl.constexpr):
    """Rounds an accumulator to a register operand A."""
    LAYOUT: gl.constexpr = a_layout(x.shape[1])
    return gl.convert_layout(x.to(DTYPE), LAYOUT, assert_trivial=True)


@gluon.jit
def start_product(a, b):
    """Starts a b^T [64, C]: a [64, *] in registers, b [C, *] in shared memory."""
    zero = gl.zeros((64, C), gl.float32, acc_layout(C))
    return hw.warpgroup_mma(a, b.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def decayed_state(S, f, more):
    """gam_C S for the chunk whose factors are f; S if there is none."""
    gam = f.slice(3 * C, C).load(gl.SliceLayout(1, acc_layout(D)))
    return S * gl.expand_dims(gl.where(more, gam, 1.0), 1)
