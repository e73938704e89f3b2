"""SwiGLU training on sm_90 and up: portable/gradients.py with faster kernels for some of its steps.

dX = dG Wg + dU Wu in one accumulator: neither product is rounded before they are added, and the sum
is not read again. Large products have the gate in their epilogue (training.py). Sizes: M tokens, K
model width, N hidden width. docs/swiglu.md has the times.
"""

import functools
from typing import Callable, Optional

import torch
import triton
import triton.language as tl

from ...runtime import device, tuning
from ...runtime.launch import Launch
from ...runtime.maps import Map
from ...runtime.ops import in_rows
from ...runtime.primitives import grouped_tile
from ...runtime.sizes import cdiv
from ..call import MlpGradient, Swiglu, SwigluGradient, SwigluMlp
from ..portable import backward
from ..portable import gradients as plain
from . import training as tailed
from .forward import (
    between,
    equal_groups,
    joined,
    prepare_swiglu_fwd,
    side_by_side,
    strides_between,
    takes,
)

MOST = 128  # strides between the weights in dx's map: 2**47 bytes, all that a process can address


@triton.jit(do_not_specialize=["M", "N", "K", "group", "last"])
def _swiglu_dx_kernel(
    d_desc,  # [2, M, N] in blocks [1, BLOCK_M, BLOCK_K]: dG and dU
    w_desc,  # [1 + last, N, K] in blocks [1, BLOCK_K, BLOCK_N]
    dx_desc,  # [M, K] in blocks [BLOCK_M, BLOCK_N / 2]
    M, N, K,
    group,  # rows of tiles that are walked together
    last,  # the place of the second weight in w_desc
    UP_FIRST: tl.constexpr,  # in w_desc
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dX = dG Wg + dU Wu in one accumulator; programs stride over tiles [BLOCK_M, BLOCK_N]."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(K, BLOCK_N)
    steps = tl.cdiv(N, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        pid_m, pid_n = grouped_tile(tile, tiles_m, tiles_n, group)
        row = pid_m * BLOCK_M
        column = pid_n * BLOCK_N
        dx = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(2 * steps):
            half = (step >= steps).to(tl.int32)
            n = (step - half * steps) * BLOCK_K
            d = d_desc.load([half, row, n]).reshape(BLOCK_M, BLOCK_K)
            w = w_desc.load([(half ^ UP_FIRST) * last, n, column]).reshape(BLOCK_K, BLOCK_N)
            dx = tl.dot(d, w, dx)
        halves = tl.permute(tl.reshape(dx, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
        left, right = tl.split(halves)  # renames registers; the store needs half the memory
        dx_desc.store([row, column], left.to(dx_desc.dtype))
        dx_desc.store([row, column + BLOCK_N // 2], right.to(dx_desc.dtype))


@functools.lru_cache(maxsize=4096)
def _dx_plan(
    where: torch.device, M: int, N: int, K: int, strides: tuple, apart: int, last: int
) -> Launch:
    """The launch of dx, for weights with these strides, `apart` elements from one another by `last`
    strides of the map."""
    tile = tuning.lookup("hopper_swiglu_dx", where)
    BM, BN, BK = blocks = (tile["BLOCK_M"], tile["BLOCK_N"], tile["BLOCK_K"])
    tiles_m = cdiv(M, BM)
    group = equal_groups(tiles_m, tile["GROUP"])
    maps = (
        Map(*joined((M, N), (2 * N, 1), N), (1, BM, BK)),
        Map(*joined((N, K), strides, apart, last), (1, BK, BN)),
        Map((M, K), (K, 1), (BM, BN // 2)),
    )
    return Launch(
        _swiglu_dx_kernel, min(device.multiprocessor_count(where.index), tiles_m * cdiv(K, BN)),
        where, maps=maps, numbers=(M, N, K, group, last), constexprs=(apart < 0, *blocks),
        options=tuple((name, tile[name]) for name in ("num_warps", "num_stages")),
    )  # fmt: skip


def input_gradient(d_gate_up, w_gate, w_up) -> torch.Tensor:
    """dx [M, K] of d_gate_up [M, 2 N] and the weights [N, K]."""
    M, (N, K) = d_gate_up.shape[0], w_gate.shape
    w_gate, w_up = side_by_side(w_gate, w_up, MOST)
    dx = d_gate_up.new_empty((M, K))  # [M, K]
    apart, last = between(w_gate, w_up), strides_between(w_gate, w_up, MOST)
    kernel = _dx_plan(dx.device, M, N, K, w_gate.stride(), apart, last)
    kernel(d_gate_up, w_up if apart < 0 else w_gate, dx)
    return dx


def _saving_fwd(x, w_gate, w_up, b_gate, b_up, activation: str):
    """(z [M, N], gate_up [M, 2 N]) by the faster of the two ways."""
    if tailed.serves_forward(x, b_gate, b_up):
        return tailed.saving_fwd(x, *side_by_side(w_gate, w_up), activation)
    return plain.saving_fwd(x, w_gate, w_up, b_gate, b_up, activation)


def _gate_gradient(dy, w_down, gate_up, activation: str, with_z: bool):
    """Computes gate_gradient of portable/gradients.py by the faster of the two ways."""
    way = tailed if tailed.serves_gradients(dy, w_down) else plain
    return way.gate_gradient(dy, w_down, gate_up, activation, with_z)


def _prepare(portable: Callable, call, **steps: Callable) -> Optional[Callable]:
    """Prepares a call as portable/backward.py does, with these steps."""
    x, w_gate, w_up = in_rows(call.x), call.w_gate, call.w_up
    dense = w_gate.stride(1) == 1 and w_gate.shape[1] % 8 == 0
    fits = dense and takes(x, w_gate, w_up, call.options.activation)
    return portable(call, **steps) if fits else None


def prepare_swiglu_saving_fwd(call: Swiglu) -> Optional[Callable]:
    return _prepare(backward.prepare_swiglu_saving_fwd, call, forward=_saving_fwd)


def prepare_swiglu_bwd(call: SwigluGradient) -> Optional[Callable]:
    return _prepare(backward.prepare_swiglu_bwd, call, input_gradient=input_gradient)


def prepare_swiglu_mlp_fwd(call: SwigluMlp) -> Optional[Callable]:
    steps = {"forward": _saving_fwd, "recomputed": prepare_swiglu_fwd}
    return _prepare(backward.prepare_swiglu_mlp_fwd, call, **steps)


def prepare_swiglu_mlp_bwd(call: MlpGradient) -> Optional[Callable]:
    steps = {"gate_gradient": _gate_gradient, "input_gradient": input_gradient}
    return _prepare(backward.prepare_swiglu_mlp_bwd, call, **steps)
