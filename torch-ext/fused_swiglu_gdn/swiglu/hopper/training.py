"""Launchers of the products with an overlapped epilogue (training_kernels.py).

Sizes: M tokens, K model width, N hidden width, D output width of Wd.
"""

import functools
from typing import Optional, Tuple

import torch

from ...runtime import device, tuning
from ...runtime.dtypes import HALF
from ...runtime.gluon import tile_map
from ...runtime.launch import Launch
from ...runtime.sizes import cdiv
from .forward import between, equal_groups, joined
from .training_kernels import BM, BN, swiglu_gradient_kernel, swiglu_saving_fwd_kernel


@functools.lru_cache(maxsize=4096)
def _forward_plan(
    where: torch.device, dtype, M: int, N: int, K: int, stride_x: int, strides: tuple,
    activation: str, apart: int,
) -> Launch:  # fmt: skip
    """The launch of the training forward, for weights with these strides, `apart` bytes from one
    another."""
    half, BK = BN.value // 2, tuning.lookup("hopper_swiglu_training", where)["BLOCK_K"]
    weights = joined((N, K), strides, apart)
    maps = (
        tile_map(dtype, (M, K), (stride_x, 1), BM.value, BK),
        tile_map(dtype, *weights, 2, half, BK),
        tile_map(dtype, (M, 2, N), (2 * N, N, 1), BM.value, 1, 64),
    )
    constexprs = (apart < 0, activation)
    tiles = cdiv(N, half)
    return _launch(swiglu_saving_fwd_kernel, where, tiles, maps, (M, N, K), constexprs)


@functools.lru_cache(maxsize=4096)
def _gradient_plan(
    where: torch.device, dtype, M: int, N: int, D: int, stride: int, strides: tuple, activation: str
) -> Launch:
    """stride: of the rows of dy; strides: of w_down."""
    BK = tuning.lookup("hopper_swiglu_training", where)["BLOCK_K"]
    maps = (
        tile_map(dtype, (M, D), (stride, 1), BM.value, BK),
        tile_map(dtype, (D, N), strides, BK, BN.value),
    )
    tiles = cdiv(N, BN.value)
    return _launch(swiglu_gradient_kernel, where, tiles, maps, (M, N, D), (activation,))


def _launch(kernel, where, tiles_n: int, maps: tuple, sizes: tuple, constexprs: tuple) -> Launch:
    """sizes: M, N and the depth of the product."""
    config = tuning.lookup("hopper_swiglu_training", where)
    tiles_m = cdiv(sizes[0], BM.value)
    group = equal_groups(tiles_m, config["GROUP"])
    return Launch(
        kernel, min(device.multiprocessor_count(where.index), tiles_m * tiles_n), where, maps=maps,
        numbers=(*sizes, group), constexprs=(*constexprs, config["STAGES"], config["REGISTERS"]),
        options=(("num_warps", 8), ("maxnreg", 168)),
    )  # fmt: skip


def serves_forward(x, b_gate, b_up) -> bool:
    """True if the kernel takes a call of prepare_swiglu_saving_fwd and is the faster way."""
    if b_gate is not None or b_up is not None or not device.has_wgmma(x.device):
        return False
    if x.data_ptr() % 16:  # where TMA cannot read
        return False
    return x.shape[0] >= tuning.lookup("hopper_swiglu_training", x.device)["forward_rows"]


def _readable(x: torch.Tensor) -> bool:
    """True if TMA and vector loads can read x: a matrix whose row stride is a multiple of 16
    bytes."""
    aligned = x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0 and x.shape[1] % 8 == 0
    return aligned and x.stride(1) == 1 and x.stride(0) >= x.shape[1] > 0


def serves_gradients(dy: torch.Tensor, w_down: torch.Tensor) -> bool:
    """True if the kernel takes dy and w_down, and dy has so many rows that it is the faster way."""
    if not device.has_wgmma(dy.device) or dy.dtype not in HALF:
        return False
    least = tuning.lookup("hopper_swiglu_training", dy.device)["gradient_rows"]
    return dy.shape[0] >= least and _readable(dy) and _readable(w_down)


def saving_fwd(x, w_gate, w_up, activation: str) -> Tuple[torch.Tensor, torch.Tensor]:
    """Returns (z [M, N], gate_up [M, 2 N])."""
    (M, K), N = x.shape, w_gate.shape[0]
    z, gate_up = x.new_empty((M, N)), x.new_empty((M, 2 * N))
    apart = between(w_gate, w_up)
    strides = (x.stride(0), w_gate.stride())
    kernel = _forward_plan(x.device, x.dtype, M, N, K, *strides, activation, apart)
    kernel(x, w_up if apart < 0 else w_gate, gate_up, z)
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
    strides = (dy.stride(0), w_down.stride())
    kernel = _gradient_plan(dy.device, dy.dtype, M, N, D, *strides, activation)
    kernel(dy, w_down, gate_up, z)
    return z
