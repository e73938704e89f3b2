"""Shared helpers of the kernels of the chunked gated delta rule, and of their launchers.

Sizes: B T H HV K V; N sequences; C = 64 tokens a chunk; rows of chunks as in gdn/chunks.py.
"""

from typing import Callable, Optional

import torch
import triton
import triton.language as tl

from ...runtime.copies import on_contiguous, on_copies
from ...runtime.dtypes import SERVED
from ...runtime.launch import aligned, by_alignment
from ...runtime.primitives import sequence_bounds
from ..call import GdnCall
from ..chunks import CHUNK

SCALES = 2**-10, 2**5  # the least and the largest in fp16
FAR = 2**25  # from such a step between tokens on, offsets inside a chunk have more than 32 bits
# fp32 products to fp32's accuracy: three products of tf32 each on NVIDIA's tensor cores
EXACT_FP32 = "ieee" if torch.version.hip else "tf32x3"


@triton.jit
def locate(row, cu_ptr, T, N, ROWS, SPAN):
    """Maps a row of SPAN tokens to (sequence, span within it, first token, length of the sequence).

    Sequence n owns the rows from cu[n] // SPAN + n (n * ROWS at equal length) on. That is enough
    for its tokens and needs no prefix sum; the caller skips rows past a sequence's end.
    """
    if cu_ptr is None:
        n = row // ROWS
        span = row % ROWS
        start = tl.cast(0, tl.int64)
        length = T
    else:
        n = 0
        end = N
        while end - n > 1:
            mid = (n + end) // 2
            left = (tl.maximum(tl.load(cu_ptr + mid), 0) // SPAN + mid) > row
            end = tl.where(left, mid, end)
            n = tl.where(left, n, mid)
        start, stop = sequence_bounds(cu_ptr, n, T)
        span = (row - (start // SPAN + n)).to(tl.int32)
        # a row before the first sequence, which only wrong offsets leave, has nothing to do
        length = tl.where(span < 0, 0, stop - start).to(tl.int32)
        span = tl.maximum(span, 0)
    return n, span, start, length


@triton.jit
def level(i, j, S: tl.constexpr):
    """Mask of the blocks below the diagonal that join two S x S blocks into one of 2S x 2S."""
    return (i // S == j // S + 1) & ((j // S) % 2 == 0)


def chunk_numbers(call: GdnCall) -> tuple:
    """Scalars T, N and NT of a kernel that finds its chunk by `locate`."""
    return call.T, 1 if call.cu_seqlens is None else call.N, -(-call.T // CHUNK)


def precision(dtype: torch.dtype) -> str:
    """input_precision for products of tensors of this dtype; it matters for fp32 only."""
    if dtype == torch.float32 or torch.version.hip is not None:
        return EXACT_FP32
    return "tf32"


def far_tokens(call) -> list:
    """The places of those of q, k, v, g and beta whose tokens are FAR from one another."""
    return [i for i, x in enumerate(call[:5]) if x.stride(1) >= FAR]


def on_near(prepare: Callable, call) -> Optional[Callable]:
    """prepare(call), where q, k, v, g and beta whose tokens are FAR from one another are copied."""
    return on_contiguous(prepare, call, far_tokens(call))


def on_read(kind: Callable, call, *places: int, lies: Callable) -> Callable:
    """kind(call), as a function of the tensors of all calls like this one.

    It takes copies of tensors at these places that do not lie(x) as the kernels read them. If any
    begins at no multiple of 16 bytes, all are made contiguous, for the next call may pass others.
    """

    def made(call) -> Callable:
        tokens = [call[i] for i in places]
        keeps = lies if aligned(*tokens) else _is_whole
        if all(map(keeps, tokens)):
            return kind(call)

        def copied(*tensors) -> list:
            return [
                x if i not in places or keeps(x) else x.clone(memory_format=torch.contiguous_format)
                for i, x in enumerate(tensors)
            ]

        return on_copies(kind, call, copied)

    return on_near(lambda call: by_alignment(made, call, *places), call)


def _is_whole(x: torch.Tensor) -> bool:
    return x.is_contiguous() and aligned(x)


def are_served(call) -> bool:
    """True for a call of a chunked form, or of its gradient, that kernels can compute: fp16, bf16
    or fp32, head dims of up to 256, some value head (none would write dq and dk), some sequence of
    a packed call, states whose matrices [K, V] 32-bit offsets span, and in fp16 a scale that leaves
    P and scaled queries in its range."""
    dtypes = {call.q.dtype, call.g.dtype, call.beta.dtype}
    states = [call.initial_state, getattr(call, "d_final_state", None)]
    steps = [(*x.shape[2:], *x.stride()[2:]) for x in states if x is not None]
    reached = all((K - 1) * row + (V - 1) * column < 2**31 for K, V, row, column in steps)
    fits = max(call.K, call.V) <= 256 and call.HV > 0
    fits = fits and (call.cu_seqlens is None or call.N > 0)
    if call.q.dtype == torch.float16:
        fits = fits and SCALES[0] <= call.options.scale <= SCALES[1]
    return fits and reached and dtypes.issubset(SERVED)


def kv_strides(state: Optional[torch.Tensor], v_first: bool) -> tuple:
    """Strides of (sequence, head, K, V) for either layout of a state."""
    if state is None:
        return (0, 0, 0, 0)
    a, b, c, d = state.stride()
    return (a, b, d, c) if v_first else (a, b, c, d)
