"""What the kernels of Gated DeltaNet on Hopper share: sizes, where a chunk lies, products."""

from ...runtime.gluon import gl, gluon, warpgroup_mma
from ..portable.primitives import locate as locate_chunk

C = gl.constexpr(64)  # tokens a chunk
D = gl.constexpr(128)  # head dims K and V
# Ragged descriptors (plan.py, token_map) place the end of a packed sequence at this row, so
# that the copy engine itself zero-fills loads and clips stores past it.
RAGGED_END = gl.constexpr(2**30)


@gluon.jit
def locate(row, cu_ptr, T, N, NT):
    """Chunk row -> (batch, end, first row) for the token descriptors, chunk, length."""
    n, c, start, length = locate_chunk(row, cu_ptr, T, N, NT, C)
    batch, end, first = row * 0, n, row * 0
    if cu_ptr is not None:
        batch, end, first = batch + RAGGED_END, start.to(gl.int32) + length, RAGGED_END - length
    return batch, end, first, c, length


@gluon.constexpr_function
def acc_layout(columns):
    """A warpgroup's wgmma accumulator [64, columns] fp32."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def a_layout(columns):
    """The same tile rounded to 16 bits, as a register A operand: the conversion moves nothing."""
    return gl.DotOperandLayout(0, acc_layout(columns), 2)


@gluon.jit
def pin(x):
    """x, where LLVM cannot move it.

    Without this phi(round(S0), round(S)) becomes round(phi) at the top of the loop, past the point
    up to which ptxas can see that S is complete, and ptxas then serializes every wgmma (C7515). So
    it is with S itself, which the next chunk scales while products are in flight (C7517).
    """
    PACK: gl.constexpr = 32 // x.dtype.primitive_bitwidth
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=PACK
    )


@gluon.jit
def as_a(x, DTYPE: gl.constexpr):
    """An accumulator, rounded, as a register A operand."""
    LAYOUT: gl.constexpr = a_layout(x.shape[1])
    return gl.convert_layout(x.to(DTYPE), LAYOUT, assert_trivial=True)


@gluon.jit
def start_product(a, b):
    """a b^T [64, C], started: a [64, *] in registers, b [C, *] in shared memory."""
    zero = gl.zeros((64, C), gl.float32, acc_layout(C))
    return warpgroup_mma(a, b.permute((1, 0)), zero, use_acc=False, is_async=True)
