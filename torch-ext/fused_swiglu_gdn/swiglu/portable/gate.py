"""The gate of SwiGLU for operands in memory: z = act(gate) * up, and its gradients."""

import functools
from typing import Callable, Optional

import torch
import triton
import triton.language as tl

from ...runtime.activations import BY_KERNELS
from ...runtime.copies import contiguous_like, on_copies
from ...runtime.dtypes import SERVED
from ...runtime.launch import Launch
from ...runtime.ops import contiguous, rows_of
from ...runtime.primitives import activate, activate_with_slope
from ...runtime.sizes import cdiv
from ..call import SiluMul, SiluMulGradient

BLOCK = 1024


@triton.jit
def _gate_fwd_kernel(
    gate_ptr,  # [M, N]
    up_ptr,  # [M, N]
    z_ptr,  # [M, N]
    N,
    stride_gate,  # of a row
    stride_up,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """z = act(gate) * up; a program makes BLOCK elements of one row."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    gate = tl.load(gate_ptr + row * stride_gate + offs, mask=mask).to(tl.float32)  # [BLOCK]
    up = tl.load(up_ptr + row * stride_up + offs, mask=mask).to(tl.float32)  # [BLOCK]
    z = activate(gate, ACTIVATION) * up
    tl.store(z_ptr + row * N + offs, z.to(z_ptr.dtype.element_ty), mask=mask)


def gate_fwd(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """z [M, N] of gate and up [M, N], last dimension dense."""
    M, N = gate.shape
    z = gate.new_empty((M, N))
    strides = (gate.stride(0), up.stride(0))
    _kept(False, gate.device, M, N, strides, activation)(gate, up, z)
    return z


def _launch(
    gradient: bool, where: torch.device, M: int, N: int, strides: tuple, activation: str,
    guarded: bool = False,
) -> Launch:  # fmt: skip
    """The launch of a kernel for M rows at these strides; guarded: as Launch has it."""
    kernel = _gate_bwd_kernel if gradient else _gate_fwd_kernel
    return Launch(
        kernel, (M, cdiv(N, BLOCK)), where, numbers=(N, *strides),
        constexprs=(activation, BLOCK), guarded=guarded,
    )  # fmt: skip


_kept = functools.lru_cache(maxsize=4096)(_launch)


def prepare_silu_mul_fwd(call: SiluMul) -> Optional[Callable]:
    """(gate, up) -> z: one launch."""
    gate, up, (activation,) = call
    if gate.dtype not in SERVED or activation not in BY_KERNELS:
        return None
    rows = rows_of(gate), rows_of(up)
    if None in rows:
        return on_copies(prepare_silu_mul_fwd, call, _contiguous)
    (M, N), strides = rows[0].shape, (rows[0].stride(0), rows[1].stride(0))
    kernel = _launch(False, gate.device, M, N, strides, activation, True)
    make = contiguous_like(gate)

    def run(gate, up):
        z = make(gate)
        kernel(gate, up, z)
        return z

    return run


def _contiguous(*tensors: torch.Tensor) -> list:
    return list(map(contiguous, tensors))


@triton.jit
def _gate_bwd_kernel(
    dz_ptr,  # [M, N]
    gate_ptr,  # [M, N]
    up_ptr,  # [M, N]
    d_gate_ptr,  # [M, N], may be gate_ptr
    d_up_ptr,  # [M, N], may be up_ptr
    z_ptr,  # [M, N], or None
    N,
    stride_dz,  # of a row
    stride_gate, stride_up, stride_d,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dgate = dz * up * act'(gate), dup = dz * act(gate), and z recomputed; BLOCK elements of one
    row."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    gate = tl.load(gate_ptr + row * stride_gate + offs, mask=mask).to(tl.float32)  # [BLOCK]
    up = tl.load(up_ptr + row * stride_up + offs, mask=mask).to(tl.float32)  # [BLOCK]
    dz = tl.load(dz_ptr + row * stride_dz + offs, mask=mask).to(tl.float32)  # [BLOCK]
    value, slope = activate_with_slope(gate, ACTIVATION)
    at = row * stride_d + offs
    tl.store(d_gate_ptr + at, (dz * up * slope).to(d_gate_ptr.dtype.element_ty), mask=mask)
    tl.store(d_up_ptr + at, (dz * value).to(d_up_ptr.dtype.element_ty), mask=mask)
    if z_ptr is not None:
        z = (value * up).to(z_ptr.dtype.element_ty)
        tl.store(z_ptr + row * N + offs, z, mask=mask)


def gate_bwd(
    dz: torch.Tensor,  # [M, N], last dimension dense
    gate_up: torch.Tensor,  # [M, 2 N]: overwritten by [dgate, dup]
    activation: str,
    with_z: bool,
) -> Optional[torch.Tensor]:  # z [M, N]
    z = torch.empty_like(dz, memory_format=torch.contiguous_format) if with_z else None  # [M, N]
    gate, up = gate_up.chunk(2, dim=1)
    strides = (dz.stride(0), gate.stride(0), up.stride(0), gate.stride(0))
    kernel = _kept(True, dz.device, *dz.shape, strides, activation)
    kernel(dz, gate, up, gate, up, z)
    return z


def prepare_silu_mul_bwd(call: SiluMulGradient) -> Optional[Callable]:
    """(gate, up, dz) -> (dgate, dup): one launch."""
    *tensors, (activation,) = call
    if call.gate.dtype not in SERVED or activation not in BY_KERNELS:
        return None
    rows = [rows_of(x) for x in tensors]
    if None in rows:
        return on_copies(prepare_silu_mul_bwd, call, _contiguous)
    (M, N), (gate, up, dz) = rows[0].shape, [x.stride(0) for x in rows]
    strides = (dz, gate, up, N)
    kernel = _launch(True, call.gate.device, M, N, strides, activation, True)
    make_gate, make_up = contiguous_like(call.gate), contiguous_like(call.up)

    def run(gate, up, dz):
        d_gate, d_up = make_gate(gate), make_up(up)
        kernel(dz, gate, up, d_gate, d_up, None)
        return d_gate, d_up

    return run
