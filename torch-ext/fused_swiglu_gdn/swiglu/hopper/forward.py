"""SwiGLU with tensor descriptors (sm_90 and up): z = act(x Wg^T + bg) * (x Wu^T + bu).

Sizes: M tokens, K model width, N hidden width. Derivation and measurements: docs/swiglu.md.
"""

import functools
from typing import NamedTuple, Optional, Tuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ...runtime import device, tuning
from ...runtime.launch import address, prepare, specialized_on
from ...runtime.replay import Replay
from .kernels import swiglu_fwd_kernel, swiglu_three_quarter_fwd_kernel, swiglu_wf_fwd_kernel


@functools.lru_cache(maxsize=4096)
def _serves(where, dtype, size, strides, gate_size, gate_strides, up_strides) -> bool:
    """Whether the copy engine can read tensors of these sizes and strides, addresses apart."""
    (M, K), N, dense = size, gate_size[0], 8  # elements of 16 bytes
    least = tuning.lookup("hopper_swiglu_fwd", where)["least_rows"]
    if M < least or K < 1 or N % dense or dtype not in (torch.float16, torch.bfloat16):
        return False
    if gate_strides != up_strides or strides[0] < K or strides[0] % dense or 1 not in gate_strides:
        return False
    return max(gate_strides) % dense == 0 and min(gate_strides) > 0


def supports_swiglu_fwd(x, w_gate, w_up, b_gate, b_up, activation) -> bool:
    sizes = (x.shape, x.stride(), w_gate.shape, w_gate.stride(), w_up.stride())
    if not _serves(x.device, x.dtype, *sizes):
        return False
    gate, up = w_gate.data_ptr(), w_up.data_ptr()
    return (x.data_ptr() | gate | up) % 16 == 0 and 0 < abs(gate - up) < 2**40


def _describe(base, shape, strides, block) -> TensorDescriptor:
    """A descriptor without the checks of its constructor, 2 us each: supports_... has made them."""
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    descriptor.base, descriptor.shape, descriptor.strides = base, shape, strides
    descriptor.block_shape, descriptor.padding = block, "zero"
    return descriptor


def rows(x, *block) -> TensorDescriptor:
    return _describe(x, list(x.shape), list(x.stride()), list(block))


def lower(first: torch.Tensor, second: torch.Tensor) -> Tuple[torch.Tensor, int]:
    """Which of two lies first in memory, and how many elements further on the other lies."""
    apart = (second.data_ptr() - first.data_ptr()) // first.element_size()
    return (first, apart) if apart > 0 else (second, -apart)


def joined(first, second, *block) -> TensorDescriptor:
    """Two [N, K] as one [2, N, K]: the first dimension's stride is how far they lie apart.

    Halves of a packed and of an interleaved weight are special cases; for two allocations the
    stride is the difference of their addresses. The lower one comes first, whichever it is.
    """
    low, apart = lower(first, second)
    return _describe(low, [2, *low.shape], [apart, *low.stride()], list(block))


@functools.lru_cache(maxsize=4096)
def choose(where: torch.device, M: int, N: int, K: int, wf: bool = False):
    """(tile configuration, tiles made whole, whether the rest is made in halves), by least time.

    A configuration carries its measured cost, in microseconds: a K step and a tile; of a last wave
    made of halves, or of one tile a processor where two fit, as a share of a whole wave.
    wf: for weights whose hidden dimension is dense: only whole tiles of the width BLOCK_N.
    """
    best = None
    processors = device.multiprocessor_count(where.index)
    for tile in tuning.lookup("hopper_swiglu_fwd", where)["tiles"]:
        if wf and tile["columns"] != tile["BLOCK_N"]:
            continue
        count = triton.cdiv(M, tile["BLOCK_M"]) * triton.cdiv(N, tile["columns"])
        slots = processors * tile["per_processor"]
        full, rest = divmod(count, slots)
        wave = triton.cdiv(K, tile["BLOCK_K"]) * tile["step_us"] + tile["tile_us"]
        halves = tile["halves_cost"] > 0 and not wf and full > 0 and 0 < 2 * rest <= slots
        last = tile["halves_cost"] if halves else float(rest > 0)
        if tile["per_processor"] > 1 and 0 < rest <= processors:
            last = tile["alone_cost"]
        time = wave * (full + last)
        if best is None or time < best[0]:
            best = time, tuple(tile.items()), full * slots if halves else count, halves
    return best[1:]


class Plan(NamedTuple):
    """What a call needs besides its addresses."""

    tile: dict
    wf: bool  # the weights' hidden dimension is the dense one
    whole: int  # tiles made whole
    halves: bool  # the others are made in halves
    group: int  # rows of tiles that are walked together
    replay: Replay


@functools.lru_cache(maxsize=4096)
def _plan(
    where: torch.device, dtype, M: int, N: int, K: int, stride_x: int, strides: tuple,
    activation: str, b_gate, b_up, up_first: bool,
) -> Plan:  # fmt: skip
    """strides: of the weights. b_gate, b_up: as specialized_on has them. up_first: in memory."""
    wf = strides[1] != 1
    tile, whole, halves = choose(where, M, N, K, wf)
    tile = dict(tile)
    tiles_m = triton.cdiv(M, tile["BLOCK_M"])
    count = tiles_m * triton.cdiv(N, tile["BLOCK_N"] if wf else tile["columns"])
    slots = device.multiprocessor_count(where.index) * tile["per_processor"]
    group = triton.cdiv(tiles_m, triton.cdiv(tiles_m, tile["GROUP"]))  # equal groups
    three_quarter = not wf and tile["columns"] != tile["BLOCK_N"]
    kernel = swiglu_three_quarter_fwd_kernel if three_quarter else swiglu_fwd_kernel
    kernel = swiglu_wf_fwd_kernel if wf else kernel
    blocks = (tile["BLOCK_M"], tile["BLOCK_N"], tile["BLOCK_K"])
    constexprs = (activation, *blocks) if wf else (activation, up_first, *blocks)
    options = tuple((name, tile[name]) for name in ("num_warps", "num_stages"))
    grid = (count if three_quarter else min(slots, count), 1, 1)
    prepared = prepare(kernel, constexprs, options, where, dtype, halves, b_gate, b_up)
    return Plan(tile, wf, whole, halves, group, Replay(prepared, grid, where))


def _arguments(plan: Plan, x, w_gate, w_up, b_gate, b_up, z) -> tuple:
    """The kernel's, up to its constexprs."""
    (M, K), N = x.shape, w_gate.shape[0]
    BM, BN, BK = (plan.tile[f"BLOCK_{d}"] for d in "MNK")
    sizes = (b_gate, b_up, M, N, K)
    if plan.wf:
        descs = (rows(w_gate.t(), BK, BN), rows(w_up.t(), BK, BN), rows(z, BM, BN))
    elif plan.tile["columns"] != BN:
        weights = [joined(w_gate, w_up, 2, n, BK) for n in (BN // 2, BN // 4)]
        descs = (*weights, rows(z, BM, BN // 2), rows(z, BM, BN // 4))
    else:
        sizes = (*sizes, plan.whole)
        descs = (joined(w_gate, w_up, 2, BN, BK), rows(z, BM, BN))
        half = (joined(w_gate, w_up, 2, BN // 2, BK), rows(z, BM, BN // 2)) if plan.halves else ()
        descs = (*descs, *(half or (None, None)))
    return (rows(x, BM, BK), *descs, *sizes, plan.group)


def swiglu_fwd(
    x: torch.Tensor,  # [M, K], last dimension dense
    w_gate: torch.Tensor,  # [N, K]: (any, 1) strides, or (1, any)
    w_up: torch.Tensor,  # [N, K], strides of w_gate
    b_gate: Optional[torch.Tensor],  # [N]
    b_up: Optional[torch.Tensor],  # [N]
    activation: str,
) -> torch.Tensor:  # [M, N]
    (M, K), N = x.shape, w_gate.shape[0]
    z = x.new_empty((M, N))  # [M, N]
    gate, up = w_gate.data_ptr(), w_up.data_ptr()
    sizes = (M, N, K, x.stride(0), w_gate.stride())
    kind = (activation, specialized_on(b_gate), specialized_on(b_up), gate > up)
    plan = _plan(x.device, x.dtype, *sizes, *kind)
    addresses = (x.data_ptr(), gate, up, address(b_gate), address(b_up), z.data_ptr())
    with device.on(x.device):
        plan.replay(addresses, lambda: _arguments(plan, x, w_gate, w_up, b_gate, b_up, z))
    return z
