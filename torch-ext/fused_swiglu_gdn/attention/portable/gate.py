"""y = x sigmoid(gate) and its gradient, for strided views: rows of channels at up to three strides.

Sizes: M rows, N channels of a row.
"""

from typing import Callable, List, Optional, Tuple

import torch
import triton
import triton.language as tl

from ...runtime import device, tuning
from ...runtime.copies import contiguous_like, on_copies
from ...runtime.dtypes import served
from ...runtime.launch import Launch
from ...runtime.ops import contiguous
from ...runtime.sizes import next_power_of_2
from ..call import SigmoidGate, SigmoidGradient


@triton.jit
def _row(x_ptr, strides, rows, middle, inner):
    """Addresses of rows of x, [M, 1], computed in int64."""
    outer = rows // (middle * inner)
    place = outer.to(tl.int64) * strides[0]
    place += ((rows // inner) % middle).to(tl.int64) * strides[1]
    place += (rows % inner).to(tl.int64) * strides[2]
    return x_ptr + place[:, None]


@triton.jit(do_not_specialize=["M", "middle", "inner", "columns"])
def _sigmoid_gate_kernel(
    x_ptr,  # [M, N]
    gate_ptr,  # [M, N]
    dy_ptr,  # [M, N] or None
    y_ptr,  # [M, N]; dx where dy is given
    dgate_ptr,  # [M, N] or None
    x_strides,  # of an outer, a middle and an inner row
    gate_strides, dy_strides,
    M, middle, inner, N,
    columns,  # tiles of a row
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,  # the next launch may begin before this one has ended
):  # fmt: skip
    """Computes BLOCK_M rows of BLOCK_N channels."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    rows = (pid // columns) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = (pid % columns).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M)[:, None] & (offs_n < N)
    x = tl.load(_row(x_ptr, x_strides, rows, middle, inner) + offs_n, mask=mask, other=0.0)
    gate = tl.load(_row(gate_ptr, gate_strides, rows, middle, inner) + offs_n, mask=mask, other=0.0)
    x = x.to(tl.float32)
    s = 1.0 / (1.0 + tl.exp2(-1.4426950408889634 * gate.to(tl.float32)))
    at = rows.to(tl.int64)[:, None] * N + offs_n
    if dy_ptr is None:
        tl.store(y_ptr + at, (x * s).to(y_ptr.dtype.element_ty), mask=mask)
    else:
        dy = tl.load(_row(dy_ptr, dy_strides, rows, middle, inner) + offs_n, mask=mask, other=0.0)
        dx = dy.to(tl.float32) * s
        tl.store(y_ptr + at, dx.to(y_ptr.dtype.element_ty), mask=mask)
        dgate = dx * x * (1.0 - s)
        tl.store(dgate_ptr + at, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)


def rows_of(*tensors: torch.Tensor) -> Optional[Tuple[List[int], List[List[int]]]]:
    """Merges dimensions of tensors of one shape as far as their strides allow.

    Returns ([outer, middle, inner, N], strides of outer, middle, inner for each tensor), or None if
    four dimensions do not suffice.
    """
    if tensors[0].numel() == 0:  # whose strides mean nothing, and contiguous() leaves as they are
        return [0, 1, 1, 1], [[0, 0, 0] for _ in tensors]
    found: list = []  # (size, strides), innermost first
    for i in reversed(range(tensors[0].ndim)):
        size, strides = tensors[0].shape[i], [x.stride(i) for x in tensors]
        if size == 1 and (found or i):
            continue
        if found and strides == [found[-1][0] * s for s in found[-1][1]]:
            found[-1] = (size * found[-1][0], found[-1][1])
        else:
            found.append((size, strides))
    if not found or any(s != 1 for s in found[0][1]) and found[0][0] > 1 or len(found) > 4:
        return None
    found += [(1, [0] * len(tensors))] * (4 - len(found))
    sizes, strides = zip(*reversed(found))
    return list(sizes), [list(each) for each in zip(*strides[:3])]


def _launch(*tensors: torch.Tensor) -> Launch:
    """The launch for tensors like these: x, gate and, for the gradient alone, dy."""
    x = tensors[0]
    (outer, middle, inner, N), strides = rows_of(*tensors)
    M = outer * middle * inner
    config = tuning.lookup("portable_sigmoid_gate", x.device, MN=M * N)
    BLOCK_N = min(next_power_of_2(max(N, 1)), config["BLOCK"])
    BLOCK_M = config["BLOCK"] // BLOCK_N
    columns = -(-N // BLOCK_N)
    strides = [tuple(each) for each in strides] + [(0, 0, 0)] * (3 - len(tensors))
    return Launch(
        _sigmoid_gate_kernel, -(-M // BLOCK_M) * columns, x.device,
        numbers=(*strides, M, middle, inner, N, columns), guarded=True, BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N, num_warps=config["num_warps"], PDL=device.overlaps_launches(x.device),
    )  # fmt: skip


def _contiguous(*tensors: torch.Tensor) -> list:
    return list(map(contiguous, tensors))


def prepare_sigmoid_gate_fwd(call: SigmoidGate) -> Optional[Callable]:
    """(x, gate) -> y in the shape of x, contiguous: one launch."""
    if not served(*call.tensors) or call.x.ndim == 0:
        return None
    if rows_of(*call.tensors) is None:
        return on_copies(prepare_sigmoid_gate_fwd, call, _contiguous)
    kernel, make = _launch(*call.tensors), contiguous_like(call.x)

    def run(x, gate):
        y = make(x)
        kernel(x, gate, None, y, None)
        return y

    return run


def prepare_sigmoid_gate_bwd(call: SigmoidGradient) -> Optional[Callable]:
    """(x, gate, dy) -> (dx, dgate), contiguous: one launch."""
    if not served(*call.tensors) or call.x.ndim == 0:
        return None
    if rows_of(*call.tensors) is None:
        return on_copies(prepare_sigmoid_gate_bwd, call, _contiguous)
    kernel = _launch(*call.tensors)
    make_x, make_gate = contiguous_like(call.x), contiguous_like(call.gate)

    def run(x, gate, dy):
        dx, dgate = make_x(x), make_gate(gate)
        kernel(x, gate, dy, dx, dgate)
        return dx, dgate

    return run
