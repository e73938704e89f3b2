"""Launchers of the products with a tail (training_kernels.py).

Sizes: M tokens, K model width, N hidden width, D output width of Wd.
"""

import functools
from typing import Optional, Tuple

import torch
import triton

from ...runtime import device, tuning
from ...runtime.gluon import Descriptor, box
from ...runtime.launch import prepare
from .forward import lower
from .training_kernels import BM, BN, swiglu_gradient_kernel, swiglu_saving_fwd_kernel

SERVED = (torch.bfloat16, torch.float16)


@functools.lru_cache(maxsize=4096)
def _plan(where: torch.device, kernel, M: int, tiles_n: int, constexprs: tuple, *kind):
    """(columns of a step, grid, rows of tiles to a group, prepared kernel)."""
    config = tuning.lookup("hopper_swiglu_training", where)
    tiles_m = triton.cdiv(M, BM.value)
    group = triton.cdiv(tiles_m, triton.cdiv(tiles_m, config["GROUP"]))  # equal groups
    grid = (min(device.multiprocessor_count(where.index), tiles_m * tiles_n), 1, 1)
    constexprs = (*constexprs, config["STAGES"], config["REGISTERS"])
    options = (("num_warps", 8), ("maxnreg", 168))
    return config["BLOCK_K"], grid, group, prepare(kernel, constexprs, options, where, *kind)


@functools.cache
def _hopper(where: torch.device) -> bool:
    """wgmma is Hopper's own: later chips have other instructions."""
    capability = device.capability(where.index) if where.type == "cuda" else None
    return capability is not None and capability[0] == 9


def serves_forward(x, w_gate, b_gate, b_up) -> bool:
    """Of calls that supports_swiglu_saving_fwd takes: whether the kernel does, and wins."""
    if b_gate is not None or b_up is not None or not _hopper(x.device):
        return False
    return x.shape[0] >= tuning.lookup("hopper_swiglu_training", x.device)["forward_rows"]


def _readable(x: torch.Tensor) -> bool:
    """By the copy engine, or in vectors: a matrix whose rows are 16 bytes times something."""
    aligned = x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0 and x.shape[1] % 8 == 0
    return aligned and x.stride(1) == 1 and x.stride(0) >= x.shape[1] > 0


def serves_gradients(dy: torch.Tensor, w_down: torch.Tensor) -> bool:
    if not _hopper(dy.device) or dy.dtype not in SERVED:
        return False
    least = tuning.lookup("hopper_swiglu_training", dy.device)["gradient_rows"]
    return dy.shape[0] >= least and _readable(dy) and _readable(w_down)


def saving_fwd(x, w_gate, w_up, activation: str) -> Tuple[torch.Tensor, torch.Tensor]:
    """(z [M, N], gate_up [M, 2 N])."""
    (M, K), N = x.shape, w_gate.shape[0]
    z, gate_up = x.new_empty((M, N)), x.new_empty((M, 2 * N))
    low, apart = lower(w_gate, w_up)
    constexprs = (low is w_up, activation)
    tiles_n = triton.cdiv(N, BN.value // 2)
    plan = _plan(x.device, swiglu_saving_fwd_kernel, M, tiles_n, constexprs, x.dtype)
    BK, grid, group, prepared = plan
    with device.on(x.device):
        prepared.launch(
            grid,
            Descriptor(x, (M, K), x.stride(), *box(x.dtype, BM.value, BK)),
            Descriptor(
                low, (2, N, K), (apart, *low.stride()), *box(x.dtype, 2, BN.value // 2, BK)
            ),
            Descriptor(gate_up, (M, 2, N), (2 * N, N, 1), *box(x.dtype, BM.value, 1, 64)),
            z, M, N, K, group,
        )  # fmt: skip
    return z, gate_up


def gate_gradient(
    dy: torch.Tensor,  # [M, D]
    w_down: torch.Tensor,  # [D, N]
    gate_up: torch.Tensor,  # [M, 2 N]: overwritten by its gradient
    activation: str,
    with_z: bool,
) -> Optional[torch.Tensor]:  # z [M, N]
    (M, D), N = dy.shape, w_down.shape[1]
    z = dy.new_empty((M, N)) if with_z else None  # [M, N]
    tiles_n = triton.cdiv(N, BN.value)
    plan = _plan(dy.device, swiglu_gradient_kernel, M, tiles_n, (activation,), dy.dtype, with_z)
    BK, grid, group, prepared = plan
    with device.on(dy.device):
        prepared.launch(
            grid,
            Descriptor(dy, (M, D), dy.stride(), *box(dy.dtype, BM.value, BK)),
            Descriptor(w_down, (D, N), w_down.stride(), *box(dy.dtype, BK, BN.value)),
            gate_up, z, M, N, D, group,
        )  # fmt: skip
    return z
