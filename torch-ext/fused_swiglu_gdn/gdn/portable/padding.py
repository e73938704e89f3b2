"""Zeroes what belongs to no sequence: tokens behind the last of cu_seqlens, as engines pad a batch.

The scan does so for the outputs; the kernel here for gradients.
"""

from typing import Optional

import triton
import triton.language as tl

from ...runtime import device
from ...runtime.launch import Launch
from ..chunks import CHUNK


@triton.jit
def first_padding(cu_ptr, T, N):
    """The first token behind N packed sequences, int64; clamped, for cu may be wrong."""
    return tl.minimum(tl.maximum(tl.load(cu_ptr + N), 0), T).to(tl.int64)


@triton.jit
def zero_padding(ptr, cu_ptr, T, N, row, rows, stride, columns, mask):
    """Zeroes columns of tokens behind the last sequence, of every rows-th 64 of them."""
    if cu_ptr is not None:
        t = tl.arange(0, 64)
        first = first_padding(cu_ptr, T, N) + row * 64
        while first < T:
            at = ptr + (first + t)[:, None] * stride + columns[None, :]
            zero = tl.zeros((64, columns.shape[0]), ptr.dtype.element_ty)
            tl.store(at, zero, mask=(first + t < T)[:, None] & mask[None, :])
            first += rows * 64


@triton.jit
def _zero_rows(ptr, cu_ptr, T, N, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    if ptr is not None:
        for first in range(0, WIDTH, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            row, rows = tl.program_id(0), tl.num_programs(0)
            zero_padding(ptr, cu_ptr, T, N, row, rows, WIDTH, columns, columns < WIDTH)


@triton.jit(do_not_specialize=["T", "N"])
def _padding_kernel(
    cu_ptr,  # [N + 1]
    a_ptr,  # [T, A] or None, as all
    b_ptr, c_ptr, d_ptr, e_ptr, T, N,
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    _zero_rows(a_ptr, cu_ptr, T, N, A, BLOCK)
    _zero_rows(b_ptr, cu_ptr, T, N, B, BLOCK)
    _zero_rows(c_ptr, cu_ptr, T, N, C, BLOCK)
    _zero_rows(d_ptr, cu_ptr, T, N, D, BLOCK)
    _zero_rows(e_ptr, cu_ptr, T, N, E, BLOCK)


def padding_launch(call) -> Optional[Launch]:
    """The launch, of cu_seqlens, dq, dk, dv, dg and dbeta, for a packed call; None for others.

    The five are contiguous, and each may be None.
    """
    if call.cu_seqlens is None:
        return None
    return Launch(
        _padding_kernel, -(-call.T // CHUNK), call.device, numbers=(call.T, call.N),
        constexprs=(*[x.shape[2:].numel() for x in call[:5]], 256), options=(("num_warps", 4),),
    )  # fmt: skip


class Padded:
    """A gradient whose launches are followed by that of its padding. A subclass has `launched`,
    which returns the gradients, `where`, the device, and `padding`, a launch or None."""

    __slots__ = ()

    def __call__(self, *tensors) -> tuple:
        with device.on(self.where):
            gradients = self.launched(*tensors)
            if self.padding is not None:
                self.padding(tensors[8], *gradients[:5])
        return gradients
