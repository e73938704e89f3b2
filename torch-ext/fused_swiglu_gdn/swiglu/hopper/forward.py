"""SwiGLU with tensor descriptors (sm_90 and up): z = act(x Wg^T + bg) * (x Wu^T + bu).

Sizes: M tokens, K model width, N hidden width. Derivation and measurements: docs/swiglu.md.
"""

import functools
from typing import Callable, NamedTuple, Optional, Tuple

import torch

from ...runtime import device, tuning
from ...runtime.cache import keep
from ...runtime.copies import on_copies
from ...runtime.launch import Launch
from ...runtime.maps import Map
from ...runtime.ops import rows_of
from ...runtime.sizes import cdiv
from ..call import Swiglu
from ..portable import forward as portable
from ..portable.forward import in_dense_rows
from .kernels import swiglu_fwd_kernel, swiglu_three_quarter_fwd_kernel, swiglu_wf_fwd_kernel

LONGEST = 2**40  # bytes: strides of tensor maps are shorter
X, GATE, UP, LOWER, Z, NONE, B_GATE, B_UP = range(8)  # the tensors of a call


def takes(x, w_gate, w_up, activation: str) -> bool:
    """True if these kernels compute SwiGLU of x [M, K] and weights of these sizes and strides, at
    addresses that TMA can read."""
    (M, K), N, dense = x.shape, w_gate.shape[0], 8  # elements of 16 bytes
    least = tuning.lookup("hopper_swiglu_fwd", x.device)["least_rows"]
    if activation == "gelu" or x.dtype not in (torch.float16, torch.bfloat16):
        return False
    if M < least or K < 1 or N % dense:
        return False
    strides, step = w_gate.stride(), x.stride(0)
    if strides != w_up.stride() or step < K or step % dense or 1 not in strides:
        return False
    return max(strides) % dense == 0 and min(strides) > 0


def strides_between(w_gate, w_up, most: int = 1) -> int:
    """The number of equal strides of a map that lead from one weight to the other; 0 if it is above
    `most`, if none do, or if TMA cannot read at these addresses.

    A stride is shorter than 2**40 bytes. After NCCL has begun, the driver places some allocations
    127 * 2**40 bytes from the others.
    """
    gate, up = w_gate.data_ptr(), w_up.data_ptr()
    apart, count = abs(up - gate), 1
    while apart >= count * LONGEST:
        count *= 2
    fits = (gate | up) % 16 == 0 < apart and apart % (16 * count) == 0 and count <= most
    return count if fits else 0


def side_by_side(w_gate, w_up, most: int = 1) -> tuple:
    """The weights, or copies of both where no map reads them with so many strides between them.

    Another way to compute has other roundings, and where memory lies is chance.
    """
    if strides_between(w_gate, w_up, most):
        return w_gate, w_up
    return torch.stack((w_gate, w_up)).unbind()


def between(first: torch.Tensor, second: torch.Tensor) -> int:
    """Distance in elements from the start of the first tensor to that of the second; may be
    negative."""
    return (second.data_ptr() - first.data_ptr()) // first.element_size()


def equal_groups(tiles: int, most: int) -> int:
    """Group size of at most `most` tiles that splits `tiles` into groups of about equal size."""
    return cdiv(tiles, cdiv(tiles, most))


def joined(size: tuple, strides: tuple, apart: int, last: int = 1) -> Tuple[tuple, tuple]:
    """Shape and strides of two [N, K] tensors seen as the first and the last of [1 + last, N, K],
    `apart` elements from one another.

    Halves of a packed or an interleaved weight are special cases; for two allocations the stride is
    a part of the difference of their addresses. The tensor with the lower address comes first.
    """
    return (1 + last, *size), (abs(apart) // last, *strides)


@functools.lru_cache(maxsize=4096)
def choose(where: torch.device, M: int, N: int, K: int, wf: bool = False):
    """(tile configuration, number of whole tiles, whether the rest is split in halves) of least
    time.

    A configuration carries its measured cost: microseconds of a K step and of a tile, and the cost
    of a last wave as a share of a whole one, if it is made of halves or has one tile an SM where
    two fit. wf: for weights whose hidden dimension is contiguous: only whole tiles of the width
    BLOCK_N.
    """
    best = None
    processors = device.multiprocessor_count(where.index)
    for tile in tuning.lookup("hopper_swiglu_fwd", where)["tiles"]:
        if wf and tile["columns"] != tile["BLOCK_N"]:
            continue
        count = cdiv(M, tile["BLOCK_M"]) * cdiv(N, tile["columns"])
        slots = processors * tile["per_processor"]
        full, rest = divmod(count, slots)
        wave = cdiv(K, tile["BLOCK_K"]) * tile["step_us"] + tile["tile_us"]
        halves = tile["halves_cost"] > 0 and not wf and full > 0 and 0 < 2 * rest <= slots
        last = tile["halves_cost"] if halves else float(rest > 0)
        if tile["per_processor"] > 1 and 0 < rest <= processors:
            last = tile["alone_cost"]
        time = wave * (full + last)
        if best is None or time < best[0]:
            best = time, tuple(tile.items()), full * slots if halves else count, halves
    return best[1:]


@functools.lru_cache(maxsize=4096)
def map_of_weights(size: tuple, strides: tuple, apart: int, box: tuple) -> Map:
    """The map of both weights; calls with other M, and their encoded maps, have it in common."""
    return Map(*joined(size, strides, apart), box)


class Plan(NamedTuple):
    """The launch of a call and the order of its tensors."""

    kernel: Launch
    order: tuple  # places of the launch's tensors among x, the weights or the lower one, z, biases


def _plan(
    where: torch.device, M: int, N: int, K: int, stride_x: int, strides: tuple, activation: str,
    apart: int,
) -> Plan:  # fmt: skip
    """The launch of the forward, for weights with these strides, `apart` bytes from one another; 0
    where that does not matter."""
    wf = strides[1] != 1
    tile, whole, halves = choose(where, M, N, K, wf)
    tile = dict(tile)
    BM, BN, BK = (tile[f"BLOCK_{d}"] for d in "MNK")
    tiles_m = cdiv(M, BM)
    count = tiles_m * cdiv(N, BN if wf else tile["columns"])
    slots = device.multiprocessor_count(where.index) * tile["per_processor"]
    group = equal_groups(tiles_m, tile["GROUP"])
    three_quarter = not wf and tile["columns"] != BN
    weights = functools.partial(map_of_weights, (N, K), strides, apart)

    def made(columns: int) -> Map:
        return Map((M, N), (N, 1), (BM, columns))

    numbers, head = (M, N, K, group), (activation, apart < 0)
    if wf:
        kernel, head = swiglu_wf_fwd_kernel, (activation,)
        weight = Map((K, N), strides[::-1], (BK, BN))
        maps, order = (weight, weight, made(BN)), (X, GATE, UP, Z)
    elif three_quarter:
        kernel = swiglu_three_quarter_fwd_kernel
        maps = (*(weights((2, n, BK)) for n in (BN // 2, BN // 4)), made(BN // 2))
        maps, order = (*maps, made(BN // 4)), (X, LOWER, LOWER, Z, Z)
    else:
        kernel, numbers = swiglu_fwd_kernel, (M, N, K, whole, group)
        maps, order = (weights((2, BN, BK)), made(BN)), (X, LOWER, Z)
        half = (weights((2, BN // 2, BK)), made(BN // 2)) if halves else (None, None)
        maps, order = (*maps, *half), (*order, *((LOWER, Z) if halves else (NONE, NONE)))
    launch = Launch(
        kernel, count if three_quarter else min(slots, count), where,
        maps=(Map((M, K), (stride_x, 1), (BM, BK)), *maps), numbers=numbers,
        constexprs=(*head, BM, BN, BK),
        options=tuple((name, tile[name]) for name in ("num_warps", "num_stages")),
    )  # fmt: skip
    return Plan(launch, (*order, B_GATE, B_UP))


def _moved(plan: Plan, size: tuple, strides: tuple, apart: int) -> Plan:
    """The plan of weights of one map that lie at another distance, of the same sign."""
    launch = plan.kernel
    maps = [
        map_of_weights(size, strides, apart, tuple(m.box)) if m and len(m.box) == 3 else m
        for m in launch.maps
    ]
    return plan._replace(kernel=launch.at(launch.numbers, tuple(maps)))


def prepare_swiglu_fwd(call: Swiglu) -> Optional[Callable]:
    """(x, w_gate, w_up, b_gate, b_up) -> z: one launch. portable's takes the addresses that TMA
    cannot read."""
    x, w_gate, w_up, b_gate, b_up, (activation,) = call
    if any([a is not b for a, b in zip(in_dense_rows(*call.tensors), call.tensors)]):
        return on_copies(prepare_swiglu_fwd, call, in_dense_rows)
    rows, N, size, strides = rows_of(x), w_gate.shape[0], x.element_size(), w_gate.stride()
    if not takes(rows, w_gate, w_up, activation):
        return None
    (M, K), shape = rows.shape, (*x.shape[:-1], N)
    sizes = (x.device, M, N, K, rows.stride(0), strides, activation)
    together = strides[1] == 1  # both weights by one map, which holds how far they lie apart
    plans: dict = {}  # by that distance in bytes, since layers of one size differ in it
    signs: dict = {}  # the last of them, by its sign
    elsewhere: list = []  # portable's function, once a call's addresses have needed it

    def run(x, w_gate, w_up, b_gate, b_up):
        gate, up = w_gate.data_ptr(), w_up.data_ptr()
        apart = up - gate
        if (x.data_ptr() | gate | up) & 15 or not 0 < abs(apart) < LONGEST:
            tensors = (x, w_gate, w_up, b_gate, b_up)
            if not elsewhere:
                elsewhere.append(portable.prepare_swiglu_fwd(Swiglu.of((*tensors, activation))))
            return elsewhere[0](*tensors)
        plan = plans.get(apart if together else 0)
        if plan is None:
            distance, like = apart // size if together else 0, signs.get(apart < 0)
            if like is None:
                plan = _plan(*sizes, distance)
            else:
                plan = _moved(like, (N, K), strides, distance)
            signs[apart < 0] = keep(plans, apart if together else 0, plan)
        z = x.new_empty(shape)
        tensors = (x, w_gate, w_up, w_up if apart < 0 else w_gate, z, None, b_gate, b_up)
        plan.kernel(*[tensors[place] for place in plan.order])
        return z

    return run
