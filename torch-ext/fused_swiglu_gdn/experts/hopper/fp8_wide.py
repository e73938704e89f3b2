"""Grouped products in e4m3 with block scales of experts with many rows: warps with one job each.

One warp brings operands and the scales of rows, two groups of four warps multiply, 64 rows of a
tile each. Of a step, 128 columns, a group makes the product with one block of 128 weight rows in
registers and adds it, scaled, to half of its sums, then with the other: gate and up, or two
neighbouring blocks of down. The sums are those of fp8_products.py to the bit.

Sizes: S entries, E experts, H model width, I hidden width of an expert. Rows, places and tiles are
../portable/routing.py's: a tile is 128 places without rows of another tile, so it is stored whole.
"""

import torch

from ...fp8.call import BLOCK, INVERSE, LEAST
from ...runtime import device
from ...runtime import gluon as hw
from ...runtime.gluon import gl, gluon, record, tile_map
from ...runtime.launch import Launch
from ...runtime.primitives import grouped_tile
from ..portable.routing import Routing, place_of, tile_at

BM = gl.constexpr(128)
HALF = gl.constexpr(64)  # rows of a group of warps
STEP = gl.constexpr(BLOCK)
GROUP = gl.constexpr(8)
_LEAST, _INVERSE = gl.constexpr(LEAST), gl.constexpr(INVERSE)


@record
class Work:
    """The state that the warps of one CTA share."""

    a_desc: hw.tma.tensor_descriptor  # [places, K] e4m3, box [BM, STEP]
    a_scale_desc: hw.tma.tensor_descriptor  # [K / 128 * places] fp32, box [BM]
    w_desc: hw.tma.tensor_descriptor  # [.., K] e4m3, all experts' rows, box [STEP, STEP]
    out_desc: hw.tma.tensor_descriptor  # [places, N], box [HALF, STEP]
    w_scale_ptr: gl.tensor  # [.. / 128, K / 128]
    routing_ptr: gl.tensor
    a_smem: gl.shared_memory_descriptor  # [DEPTH, BM, STEP]
    s_smem: gl.shared_memory_descriptor  # [DEPTH, BM]
    w_smem: gl.shared_memory_descriptor  # [2 DEPTH, STEP, STEP]
    out_smem: gl.shared_memory_descriptor  # [2, HALF, STEP]
    full: gl.shared_memory_descriptor  # [DEPTH] mbarriers: a step's operands are there
    empty: gl.shared_memory_descriptor  # [DEPTH] mbarriers: both groups have multiplied them
    S: gl.tensor
    E: gl.tensor
    places: gl.tensor
    tiles_m: gl.tensor
    K: gl.constexpr
    N: gl.constexpr  # columns of the result
    GATE: gl.constexpr  # the two blocks are of gate and up, else neighbours
    DEPTH: gl.constexpr


@gluon.jit
def _columns(w):
    """Tiles side by side."""
    wide: gl.constexpr = STEP if w.GATE else 2 * STEP
    return (w.N + wide - 1) // wide


@gluon.jit
def _tile(w, number):
    """(place, rows, number of columns' tile, the first blocks of rows of the two weights)."""
    m, n = grouped_tile(number, w.tiles_m, _columns(w), GROUP)
    expert, row, end = tile_at(w.routing_ptr, m, w.S, w.E)
    blocks: gl.constexpr = w.N // STEP
    if w.GATE:
        first = expert * (2 * blocks) + n
        second = first + blocks
    else:
        first = expert * blocks + 2 * n
        second = first + 1
    return place_of(w.routing_ptr, expert, row, BM), end - row, n, first, second


@gluon.jit
def _load_partition(w, out_scale_ptr):
    it = 0
    for number in range(gl.program_id(0), w.tiles_m * _columns(w), gl.num_programs(0)):
        place, rows, n, first, second = _tile(w, number)
        for k in range(0, w.K // STEP):
            s = it % w.DEPTH
            full = w.full.index(s)
            hw.mbarrier.wait(w.empty.index(s), ((it // w.DEPTH) & 1) ^ 1)
            hw.mbarrier.expect(full, (BM + 2 * STEP) * STEP + BM * 4)
            hw.tma_load(w.a_desc, [place, k * STEP], full, w.a_smem.index(s))
            hw.tma_load(w.a_scale_desc, [k * w.places + place], full, w.s_smem.index(s))
            hw.tma_load(w.w_desc, [first * STEP, k * STEP], full, w.w_smem.index(2 * s))
            hw.tma_load(w.w_desc, [second * STEP, k * STEP], full, w.w_smem.index(2 * s + 1))
            it += 1


@gluon.jit
def _rounded(x):
    return x.to(gl.bfloat16).to(gl.float32)


@gluon.jit
def _store(w, tile, row, column, WG: gl.constexpr):
    hw.tma_store_wait(0)
    w.out_smem.index(WG).store(tile.to(w.out_desc.dtype))
    hw.fence_async_shared()
    hw.tma_store(w.out_desc, [row, column], w.out_smem.index(WG))


@gluon.jit
def _gated(w, gate, up, out_scale_ptr, row, n, WG: gl.constexpr):
    """z of 64 rows and 128 columns, as fp8_products.py rounds it, and its scales."""
    ROWS: gl.constexpr = gl.SliceLayout(1, gate.type.layout)
    gate = _rounded(gate)
    z = _rounded(gate / (1.0 + gl.exp2(-1.4426950408889634 * gate)))
    z = _rounded(z * _rounded(up))
    bits = z.to(gl.int32, bitcast=True) & 0x7FFFFFFF
    amax = gl.max(bits, 1).to(gl.float32, bitcast=True)
    scale = gl.where(amax < _LEAST, _LEAST, amax) * _INVERSE  # NaN stays
    one = gl.full([HALF], 1.0, gl.float32, ROWS)
    offs = n.to(gl.int64) * w.places + row + gl.arange(0, HALF, ROWS)
    gl.store(out_scale_ptr + offs, scale)
    _store(w, z * gl.expand_dims(gl.div_rn(one, scale), 1), row, n * STEP, WG)


@gluon.jit
def _multiply(w, out_scale_ptr, WG: gl.constexpr):
    """Multiplies 64 rows of each tile; for a shorter tile it only arrives at the barriers."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 4)
    ROWS: gl.constexpr = gl.SliceLayout(1, SUMS)
    steps: gl.constexpr = w.K // STEP
    last: gl.constexpr = w.N // STEP - 1
    zeros = gl.zeros([HALF, STEP], gl.float32, SUMS)
    it = 0
    for number in range(gl.program_id(0), w.tiles_m * _columns(w), gl.num_programs(0)):
        place, rows, n, first, second = _tile(w, number)
        if rows > WG * HALF:
            left = gl.zeros([HALF, STEP], gl.float32, SUMS)
            right = gl.zeros([HALF, STEP], gl.float32, SUMS)
            if not w.GATE:  # behind the last block of an expert are the next one's, or none
                second = gl.where(2 * n + 1 > last, first, second)
            left_scales = w.w_scale_ptr + first.to(gl.int64) * steps
            right_scales = w.w_scale_ptr + second.to(gl.int64) * steps
            left_next = gl.load(left_scales)
            right_next = gl.load(right_scales)
            for k in range(0, steps):
                s = it % w.DEPTH
                left_scale, right_scale = left_next, right_next
                ahead = min(k + 1, steps - 1)
                left_next = gl.load(left_scales + ahead)
                right_next = gl.load(right_scales + ahead)
                hw.mbarrier.wait(w.full.index(s), (it // w.DEPTH) & 1)
                a_scale = w.s_smem.index(s).slice(WG * HALF, HALF).load(ROWS)
                a = w.a_smem.index(s).slice(WG * HALF, HALF, 0).load(A)
                b = w.w_smem.index(2 * s).permute((1, 0))
                token = hw.warpgroup_mma(a, b, zeros, use_acc=False, is_async=True)
                part = hw.warpgroup_mma_wait(0, (token,))
                left += part * gl.expand_dims(a_scale * left_scale, 1)
                b = w.w_smem.index(2 * s + 1).permute((1, 0))
                token = hw.warpgroup_mma(a, b, zeros, use_acc=False, is_async=True)
                part = hw.warpgroup_mma_wait(0, (token,))
                hw.mbarrier.arrive(w.empty.index(s), count=1)
                right += part * gl.expand_dims(a_scale * right_scale, 1)
                it += 1
            row = place + WG * HALF
            if w.GATE:
                _gated(w, left, right, out_scale_ptr, row, n, WG)
            else:
                _store(w, left, row, 2 * n * STEP, WG)
                _store(w, right, row, (2 * n + 1) * STEP, WG)  # nothing behind the last column
        else:
            for _ in range(0, steps):
                s = it % w.DEPTH
                hw.mbarrier.wait(w.full.index(s), (it // w.DEPTH) & 1)
                hw.mbarrier.arrive(w.empty.index(s), count=1)
                it += 1
    hw.tma_store_wait(0)


@gluon.jit
def _multiply_partition_0(w, out_scale_ptr):
    _multiply(w, out_scale_ptr, 0)


@gluon.jit
def _multiply_partition_1(w, out_scale_ptr):
    _multiply(w, out_scale_ptr, 1)


@gluon.jit(do_not_specialize=["S", "E", "places"])
def wide_kernel(
    a_desc,  # [places, K] e4m3 in boxes [BM, STEP]
    a_scale_desc,  # [K / 128 * places] fp32 in boxes [BM]
    w_desc,  # [2 E I, K], or [E H, K], e4m3 in boxes [STEP, STEP]
    out_desc,  # [places, N] in boxes [HALF, STEP]: e4m3, or bf16
    w_scale_ptr,  # one for 128 x 128 values of w
    out_scale_ptr,  # [N / 128, places] of e4m3
    routing_ptr, S, E, places,
    K: gl.constexpr, N: gl.constexpr, GATE: gl.constexpr, DEPTH: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """silu(a Wg^T) * (a Wu^T) quantised, or a Wd^T; programs stride over tiles [BM, 128 or 256]."""
    if PDL:
        hw.wait_for_predecessor()
        hw.launch_dependents()
    a_smem, s_smem = hw.ring(a_desc, DEPTH), hw.ring(a_scale_desc, DEPTH)
    w_smem, out_smem = hw.ring(w_desc, 2 * DEPTH), hw.ring(out_desc, 2)
    full, empty = hw.ring_barriers(DEPTH, 2)
    w = Work(
        a_desc, a_scale_desc, w_desc, out_desc, w_scale_ptr, routing_ptr, a_smem, s_smem, w_smem,
        out_smem, full, empty, S, E, places, gl.load(routing_ptr), K, N, GATE, DEPTH,
    )  # fmt: skip
    hw.barrier()
    hw.warp_specialize(
        [_multiply_partition_0, _multiply_partition_1, _load_partition], (w, out_scale_ptr),
        [4, 1], [240, 24],
    )  # fmt: skip


def places_of(routing: Routing) -> int:
    """The length of arrays by places: whole tiles."""
    return -(-routing.places // BM.value) * BM.value


def wide_launch(
    where: torch.device, routing: Routing, width: int, columns: int, gate: bool
) -> Launch:
    """The product of rows of `width` columns, as many results each; routing: without a buffer."""
    _, T, K, E, _ = routing
    places, e4m3 = places_of(routing), torch.float8_e4m3fn
    rows, out = (2 * E * columns, e4m3) if gate else (E * columns, torch.bfloat16)
    box = (BM.value, BLOCK)
    maps = (
        tile_map(e4m3, (places, width), (width, 1), *box),
        tile_map(torch.float32, (width // BLOCK * places,), (1,), BM.value),
        tile_map(e4m3, (rows, width), (width, 1), BLOCK, BLOCK),
        tile_map(out, (places, columns), (columns, 1), HALF.value, BLOCK),
    )
    tiles = routing.tiles * -(-columns // (BLOCK if gate else 2 * BLOCK))
    pdl = device.overlaps_launches(where)
    return Launch(
        wide_kernel, min(device.multiprocessor_count(where.index), tiles), where, maps=maps,
        numbers=(T * K, E, places), constexprs=(width, columns, gate, 4, pdl),
        options=(("num_warps", 4), ("maxnreg", 168)), early=pdl,
    )  # fmt: skip
