"""out = routed + sigmoid(<x, w>) shared: a program reads the rows of one token.

Sizes: T tokens, H model width.
"""

import functools
from typing import Tuple

import torch
import triton
import triton.language as tl

from ...runtime.dtypes import SERVED
from ...runtime.launch import Launch


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


@functools.lru_cache(maxsize=1024)
def _launch(kernel, where, T: int, H: int) -> Launch:
    block = min(triton.next_power_of_2(H), 4096)
    options = (("num_warps", max(1, min(8, block // 256))),)
    return Launch(kernel, T, where, constexprs=(H, block), options=options)


def supports_shared_fwd(routed, shared, x, w_gate) -> bool:
    same = routed.dtype == shared.dtype == x.dtype == w_gate.dtype
    return same and x.dtype in SERVED and 0 < x.shape[1] <= 65536 and x.shape[0] < 2**31


def supports_shared_bwd(dout, shared, x, w_gate) -> bool:
    return supports_shared_fwd(dout, shared, x, w_gate)


def shared_fwd(
    routed: torch.Tensor,  # [T, H]
    shared: torch.Tensor,  # [T, H]
    x: torch.Tensor,  # [T, H]
    w_gate: torch.Tensor,  # [H]
) -> torch.Tensor:  # [T, H]
    routed, shared, x, w_gate = (t.contiguous() for t in (routed, shared, x, w_gate))
    out = torch.empty_like(routed)
    _launch(_shared_kernel, x.device, *x.shape)(routed, shared, x, w_gate, out)
    return out


def shared_bwd(
    dout: torch.Tensor,  # [T, H]
    shared: torch.Tensor,  # [T, H]
    x: torch.Tensor,  # [T, H]
    w_gate: torch.Tensor,  # [H]
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dshared [T, H], dx [T, H], the gradient of <x, w_gate> [T])."""
    dout, shared, x, w_gate = (t.contiguous() for t in (dout, shared, x, w_gate))
    dshared, dx, dgate = torch.empty_like(shared), torch.empty_like(x), x.new_empty(x.shape[0])
    start = _launch(_shared_backward_kernel, x.device, *x.shape)
    start(dout, shared, x, w_gate, dshared, dx, dgate)
    return dshared, dx, dgate
