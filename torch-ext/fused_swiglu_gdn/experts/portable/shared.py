"""out = routed + sigmoid(<x, w>) shared: a program reads the rows of one token.

Sizes: T tokens, H model width.
"""

from typing import Callable, Optional

import torch
import triton
import triton.language as tl

from ...runtime.dtypes import served
from ...runtime.launch import Launch
from ...runtime.sizes import next_power_of_2
from ..call import Shared, SharedGradient


@triton.jit
def _piece(ptr, first, H: tl.constexpr, BLOCK: tl.constexpr):
    """Loads [BLOCK] columns of a row as fp32."""
    offs = first + tl.arange(0, BLOCK)
    return tl.load(ptr + offs, mask=offs < H, other=0.0).to(tl.float32)


@triton.jit
def _dot(a_ptr, b_ptr, H: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for first in tl.static_range(0, H, BLOCK):
        total += _piece(a_ptr, first, H, BLOCK) * _piece(b_ptr, first, H, BLOCK)
    return tl.sum(total, 0)


@triton.jit
def _store(ptr, values, first, H: tl.constexpr, BLOCK: tl.constexpr):
    offs = first + tl.arange(0, BLOCK)
    tl.store(ptr + offs, values.to(ptr.dtype.element_ty), mask=offs < H)


@triton.jit
def _shared_kernel(
    routed_ptr,  # [T, H]
    shared_ptr,  # [T, H]
    x_ptr,  # [T, H]
    w_ptr,  # [H]
    out_ptr,  # [T, H]
    H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * H
    gate = 1.0 / (1.0 + tl.exp(-_dot(x_ptr + row, w_ptr, H, BLOCK)))
    for first in tl.static_range(0, H, BLOCK):
        shared = _piece(shared_ptr + row, first, H, BLOCK)
        out = _piece(routed_ptr + row, first, H, BLOCK) + gate * shared
        _store(out_ptr + row, out, first, H, BLOCK)


@triton.jit
def _shared_backward_kernel(
    dout_ptr,  # [T, H]
    shared_ptr,  # [T, H]
    x_ptr,  # [T, H]
    w_ptr,  # [H]
    dshared_ptr,  # [T, H]
    dx_ptr,  # [T, H]
    dgate_ptr,  # [T]
    H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = token * H
    gate = 1.0 / (1.0 + tl.exp(-_dot(x_ptr + row, w_ptr, H, BLOCK)))
    dgate = gate * (1.0 - gate) * _dot(dout_ptr + row, shared_ptr + row, H, BLOCK)
    tl.store(dgate_ptr + token, dgate.to(dgate_ptr.dtype.element_ty))
    for first in tl.static_range(0, H, BLOCK):
        dout = _piece(dout_ptr + row, first, H, BLOCK)
        _store(dshared_ptr + row, gate * dout, first, H, BLOCK)
        _store(dx_ptr + row, dgate * _piece(w_ptr, first, H, BLOCK), first, H, BLOCK)


def _launch(kernel, *tensors: torch.Tensor) -> Optional[Launch]:
    """The launch for tensors like these, of which x is the third, or None."""
    (T, H), dtype = tensors[2].shape, tensors[2].dtype
    if any([t.dtype != dtype for t in tensors]) or not served(*tensors):
        return None
    if not 0 < H <= 65536 or T >= 2**31:
        return None
    block = min(next_power_of_2(H), 4096)
    options = (("num_warps", max(1, min(8, block // 256))),)
    where = tensors[2].device
    return Launch(kernel, T, where, constexprs=(H, block), options=options, guarded=True)


def prepare_shared_fwd(call: Shared) -> Optional[Callable]:
    """(routed, shared, x, w_gate) -> out [T, H]: one launch."""
    kernel = _launch(_shared_kernel, *call.tensors)

    def run(*tensors):
        tensors = [t.contiguous() for t in tensors]
        out = torch.empty_like(tensors[0])
        kernel(*tensors, out)
        return out

    return None if kernel is None else run


def prepare_shared_bwd(call: SharedGradient) -> Optional[Callable]:
    """(dout, shared, x, w_gate) -> (dshared [T, H], dx [T, H], the gradient of <x, w_gate> [T])."""
    kernel = _launch(_shared_backward_kernel, *call.tensors)

    def run(*tensors):
        dout, shared, x, w_gate = tensors = [t.contiguous() for t in tensors]
        found = torch.empty_like(shared), torch.empty_like(x), x.new_empty(x.shape[0])
        kernel(*tensors, *found)
        return found

    return None if kernel is None else run
