"""The gate of SwiGLU where its operands are in memory: z = act(gate) * up, and its gradients."""

from typing import Optional

import torch
import triton
import triton.language as tl

from ...runtime.launch import Launch
from ...runtime.primitives import activate, activate_with_slope

BLOCK = 1024


@triton.jit
def _gate_fwd_kernel(
    gate_ptr,  # [M, N] rows stride_in apart
    up_ptr,  # [M, N] rows stride_in apart
    z_ptr,  # [M, N]
    N,
    stride_in,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """z = act(gate) * up; a program makes BLOCK elements of one row."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    gate = tl.load(gate_ptr + row * stride_in + offs, mask=mask).to(tl.float32)  # [BLOCK]
    up = tl.load(up_ptr + row * stride_in + offs, mask=mask).to(tl.float32)  # [BLOCK]
    z = activate(gate, ACTIVATION) * up
    tl.store(z_ptr + row * N + offs, z.to(z_ptr.dtype.element_ty), mask=mask)


def gate_fwd(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """z [M, N] of gate and up [M, N], whose rows lie equally far apart."""
    M, N = gate.shape
    z = torch.empty((M, N), dtype=gate.dtype, device=gate.device)  # [M, N]
    kernel = Launch(
        _gate_fwd_kernel, (M, triton.cdiv(N, BLOCK)), gate.device, numbers=(N, gate.stride(0)),
        constexprs=(activation, BLOCK),
    )  # fmt: skip
    kernel(gate, up, z)
    return z


@triton.jit
def _gate_bwd_kernel(
    dz_ptr,  # [M, N] rows stride_dz apart
    gate_up_ptr,  # [M, 2 N]: gate and up, overwritten by their gradients
    z_ptr,  # [M, N], or None
    N,
    stride_dz,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dgate = dz * up * act'(gate), dup = dz * act(gate), z again; BLOCK elements of one row."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    gate_ptrs = gate_up_ptr + row * 2 * N + offs
    gate = tl.load(gate_ptrs, mask=mask).to(tl.float32)  # [BLOCK]
    up = tl.load(gate_ptrs + N, mask=mask).to(tl.float32)  # [BLOCK]
    dz = tl.load(dz_ptr + row * stride_dz + offs, mask=mask).to(tl.float32)  # [BLOCK]
    value, slope = activate_with_slope(gate, ACTIVATION)
    tl.store(gate_ptrs, (dz * up * slope).to(gate_up_ptr.dtype.element_ty), mask=mask)
    tl.store(gate_ptrs + N, (dz * value).to(gate_up_ptr.dtype.element_ty), mask=mask)
    if z_ptr is not None:
        z = (value * up).to(z_ptr.dtype.element_ty)
        tl.store(z_ptr + row * N + offs, z, mask=mask)


def gate_bwd(
    dz: torch.Tensor,  # [M, N], last dimension dense
    gate_up: torch.Tensor,  # [M, 2 N]: overwritten by [dgate, dup]
    activation: str,
    with_z: bool,
) -> Optional[torch.Tensor]:  # z [M, N]
    M, N = dz.shape
    z = torch.empty((M, N), dtype=dz.dtype, device=dz.device) if with_z else None  # [M, N]
    kernel = Launch(
        _gate_bwd_kernel, (M, triton.cdiv(N, BLOCK)), dz.device, numbers=(N, dz.stride(0)),
        constexprs=(activation, BLOCK),
    )  # fmt: skip
    kernel(dz, gate_up, z)
    return z
