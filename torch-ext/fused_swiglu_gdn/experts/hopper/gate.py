"""The gradient of the experts' gate: a GEMM with an overlapped epilogue.

One warp loads the operands of dz = dout Wd, two warpgroups multiply and leave a finished tile in
shared memory. Three more warps then compute dgate, dup, w z and <dz, z> of it, by the formulas of
portable/gradients.py, while the next tile is multiplied.

Sizes: T tokens, K slots, S = T K entries, E experts, H model width, I hidden width of an expert.
"""

import functools
from typing import Optional

import torch

from ...runtime import device, tuning
from ...runtime import gluon as hw
from ...runtime.gluon import gl, gluon, record, tile_map
from ...runtime.launch import Launch
from ...runtime.primitives import grouped_tile
from ...swiglu.hopper.epilogue import BM, BN, UNIT, for_fp16, hand_over, piece, vector_layout
from ...swiglu.hopper.training_kernels import multiply_steps
from ..portable.gate import gated_with_gradient
from ..portable.routing import Routing, entry_of_row, place_of, tile_at

BK = gl.constexpr(64)
PART = gl.constexpr(64)  # columns whose <dz, z> is summed at once


@record
class Work:
    """State that the warps of one CTA share."""

    dout_desc: hw.tma.tensor_descriptor  # [.., H] by places, box [BM, BK]
    w_desc: hw.tma.tensor_descriptor  # [E, H, I] box [1, BK, BN]
    gate_up_ptr: gl.tensor  # [S, 2 I] by rows
    d_gate_up_ptr: gl.tensor  # [.., 2 I] by places
    wz_ptr: gl.tensor  # [.., I] by places
    weights_ptr: gl.tensor  # [S] by entries
    routing_ptr: gl.tensor
    a_smem: gl.shared_memory_descriptor  # [STAGES, BM, BK]
    b_smem: gl.shared_memory_descriptor  # [STAGES, 1, BK, BN]
    tile_smem: gl.shared_memory_descriptor  # [4, BM, 64] a finished dz by columns, fp16
    rows_smem: gl.shared_memory_descriptor  # [2, BM] fp32: what to multiply its rows by; w of them
    full: gl.shared_memory_descriptor  # [STAGES] mbarriers: the operands of a step are there
    empty: gl.shared_memory_descriptor  # [STAGES] mbarriers: they have been multiplied
    tile_full: gl.shared_memory_descriptor  # [1] mbarrier: tile_smem is written
    tile_empty: gl.shared_memory_descriptor  # [1] mbarrier: and read
    S: gl.tensor
    E: gl.tensor
    tiles_m: gl.tensor
    DEPTH: gl.constexpr  # steps of the product
    I: gl.constexpr  # noqa: E741
    GROUP: gl.constexpr
    ACTIVATION: gl.constexpr
    LIMIT: gl.constexpr
    STAGES: gl.constexpr


@gluon.jit
def _tile(w, number):
    """(expert, first row, end of the expert's rows, place, first column) of a tile."""
    m, n = grouped_tile(number, w.tiles_m, (w.I + BN - 1) // BN, w.GROUP)
    expert, row, end = tile_at(w.routing_ptr, m, w.S, w.E)
    return expert, row, end, place_of(w.routing_ptr, expert, row, BM), n * BN


@gluon.jit
def _tiles(w):
    return w.tiles_m * ((w.I + BN - 1) // BN)


@gluon.jit
def _load_partition(w, parts_ptr):
    """Loads operands up to STAGES steps ahead; one warp."""
    it = 0
    for number in range(gl.program_id(0), _tiles(w), gl.num_programs(0)):
        expert, row, end, place, column = _tile(w, number)
        for step in range(w.DEPTH):
            s = it % w.STAGES
            full = w.full.index(s)
            hw.mbarrier.wait(w.empty.index(s), ((it // w.STAGES) & 1) ^ 1)
            hw.mbarrier.expect(full, (BM + BN) * BK * 2)
            hw.tma_load(w.dout_desc, [place, step * BK], full, w.a_smem.index(s))
            hw.tma_load(w.w_desc, [expert, step * BK, column], full, w.b_smem.index(s))
            it += 1


@gluon.jit
def _multiply_partition(w, parts_ptr):
    """Computes dz tile after tile into tile_smem, as fp16; two warpgroups."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BN, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    acc = gl.zeros((BM, BN), gl.float32, LAYOUT)
    it = 0
    phase = 1  # of `tile_empty`: the first tile passes
    for number in range(gl.program_id(0), _tiles(w), gl.num_programs(0)):
        expert, row, end, place, column = _tile(w, number)
        rows = row + gl.arange(0, BM, layout=ROWS)
        entry = gl.load(entry_of_row(w.routing_ptr, w.E) + rows, mask=rows < end, other=0)
        weight = gl.load(w.weights_ptr + entry, mask=rows < end, other=0.0).to(gl.float32)
        acc, it = multiply_steps(w, acc, it, w.DEPTH, False)
        hw.mbarrier.wait(w.tile_empty, phase)
        phase ^= 1
        scaled, factor = for_fp16(acc)
        w.rows_smem.index(0).store(factor)
        w.rows_smem.index(1).store(weight)
        hand_over(w.tile_smem, scaled)
        hw.mbarrier.arrive(w.tile_full, count=1)


@gluon.jit
def _of_rows(w, kind: gl.constexpr, i, WARPS: gl.constexpr):
    """Row `kind` of rows_smem for the rows of a piece, [UNIT WARPS]."""
    smem = w.rows_smem
    SHAPE: gl.constexpr = [2 * BM // (UNIT * WARPS), UNIT * WARPS]
    HALF: gl.constexpr = SHAPE[0] // 2
    return hw.as_tile(smem, smem.dtype, SHAPE, smem.layout).index(kind * HALF + i % HALF)


@gluon.jit
def _offsets(i, WARPS: gl.constexpr):
    """(row in the tile, column in the tile) of the elements of piece i."""
    LAYOUT: gl.constexpr = vector_layout(WARPS)
    HIGH: gl.constexpr = UNIT * WARPS
    DOWN: gl.constexpr = BM // HIGH
    offs_m = (i % DOWN) * HIGH + gl.arange(0, HIGH, layout=gl.SliceLayout(1, LAYOUT))
    offs_n = (i // DOWN) * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    return offs_m, offs_n


@gluon.jit
def _load_pair(w, i, row, end, column, LAST: gl.constexpr, WARPS: gl.constexpr):
    """Loads gate and up of piece i; pieces from LAST on are masked off."""
    offs_m, offs_n = _offsets(i, WARPS)
    m = gl.expand_dims(row + offs_m, 1)
    n = gl.expand_dims(column + offs_n, 0)
    ptrs = w.gate_up_ptr + m.to(gl.int64) * (2 * w.I) + n
    inside = (m < end) & (n < w.I) & (i < LAST)
    gate = gl.load(ptrs, mask=inside, other=0.0)
    up = gl.load(ptrs + w.I, mask=inside, other=0.0)
    return gate, up


@gluon.jit
def _store_piece(w, parts_ptr, gate, up, i, row, end, place, column, WARPS: gl.constexpr):
    """Stores the results of piece i from its gate and up (fp32) and the dz of tile_smem."""
    LAYOUT: gl.constexpr = vector_layout(WARPS)
    TYPE: gl.constexpr = w.d_gate_up_ptr.dtype.element_ty
    COUNT: gl.constexpr = (w.I + BN - 1) // BN * (BN // PART)
    scale = _of_rows(w, 0, i, WARPS).load(gl.SliceLayout(1, LAYOUT))
    weight = _of_rows(w, 1, i, WARPS).load(gl.SliceLayout(1, LAYOUT))
    dz = piece(w, i, WARPS).load(LAYOUT).to(gl.float32) * gl.expand_dims(scale, 1)
    z, by_gate, by_up = gated_with_gradient(gate, up, w.ACTIVATION, w.LIMIT, True)
    offs_m, offs_n = _offsets(i, WARPS)
    if parts_ptr is not None:
        part = column // PART + i // (BM // (UNIT * WARPS))
        at = (place + offs_m).to(gl.int64) * COUNT + part
        gl.store(parts_ptr + at, gl.sum(dz * z, 1), mask=row + offs_m < end)
    stop = row + (end - row + BK - 1) // BK * BK  # zeros up to a whole step
    weight = gl.expand_dims(weight, 1)
    dz = dz * weight
    m = gl.expand_dims(offs_m, 1)
    n = gl.expand_dims(column + offs_n, 0)
    inside = (row + m < stop) & (n < w.I)
    at = (place + m).to(gl.int64) * w.I
    gl.store(w.d_gate_up_ptr + 2 * at + n, (dz * by_gate).to(TYPE), mask=inside)
    gl.store(w.d_gate_up_ptr + 2 * at + w.I + n, (dz * by_up).to(TYPE), mask=inside)
    gl.store(w.wz_ptr + at + n, (weight * z).to(TYPE), mask=inside)


@gluon.jit
def _epilogue(w, parts_ptr, FIRST: gl.constexpr, LAST: gl.constexpr, WARPS: gl.constexpr):
    """Computes pieces FIRST to LAST, an even number, two at a time.

    The values loaded for the next two stay in registers of their own, since a move between
    registers would wait for the load.
    """
    phase = 0
    for number in range(gl.program_id(0), _tiles(w), gl.num_programs(0)):
        expert, row, end, place, column = _tile(w, number)
        gate_0, up_0 = _load_pair(w, FIRST, row, end, column, LAST, WARPS)
        gate_1, up_1 = _load_pair(w, FIRST + 1, row, end, column, LAST, WARPS)
        hw.mbarrier.wait(w.tile_full, phase)
        phase ^= 1
        for i in range(FIRST, LAST, 2):
            gate = gate_0.to(gl.float32)
            up = up_0.to(gl.float32)
            gate_0, up_0 = _load_pair(w, i + 2, row, end, column, LAST, WARPS)
            _store_piece(w, parts_ptr, gate, up, i, row, end, place, column, WARPS)
            gate = gate_1.to(gl.float32)
            up = up_1.to(gl.float32)
            gate_1, up_1 = _load_pair(w, i + 3, row, end, column, LAST, WARPS)
            _store_piece(w, parts_ptr, gate, up, i + 1, row, end, place, column, WARPS)
        hw.mbarrier.arrive(w.tile_empty, count=1)


@gluon.jit
def _epilogue_partition_0(w, parts_ptr):
    """Runs two thirds of the epilogue; two warps."""
    _epilogue(w, parts_ptr, 0, 22, 2)


@gluon.jit
def _epilogue_partition_1(w, parts_ptr):
    """Runs the rest of the epilogue; one warp."""
    _epilogue(w, parts_ptr, 44, 64, 1)


@gluon.jit(do_not_specialize=["S", "E"])
def gate_gradient_kernel(
    dout_desc,  # [.., H] by places, in boxes [BM, BK]
    w_desc,  # [E, H, I] in boxes [1, BK, BN]
    gate_up_ptr,  # [S, 2 I] by rows
    d_gate_up_ptr,  # [.., 2 I] by places
    weights_ptr,  # [S] by entries
    wz_ptr,  # [.., I] by places
    parts_ptr,  # [.., PARTS] fp32 by places: <dout Wd, z> of PART columns; or None
    routing_ptr, S, E,
    DEPTH: gl.constexpr,
    I: gl.constexpr,  # noqa: E741
    ACTIVATION: gl.constexpr, LIMIT: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Stores dgate and dup, w z, and the parts of dw; programs stride over tiles [BM, BN]."""
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    ROW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BAR: gl.constexpr = hw.mbarrier.MBarrierLayout()
    a_smem, b_smem = hw.ring(dout_desc, STAGES), hw.ring(w_desc, STAGES)
    tile_smem = gl.allocate_shared_memory(gl.float16, [4, BM, 64], TILE)
    rows_smem = gl.allocate_shared_memory(gl.float32, [2, BM], ROW)
    full, empty = hw.ring_barriers(STAGES, 1)
    tile_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
    tile_empty = gl.allocate_shared_memory(gl.int64, [1], BAR)
    hw.mbarrier.init(tile_full, count=1)
    hw.mbarrier.init(tile_empty, count=2)
    w = Work(
        dout_desc, w_desc, gate_up_ptr, d_gate_up_ptr, wz_ptr, weights_ptr, routing_ptr,
        a_smem, b_smem, tile_smem, rows_smem, full, empty, tile_full, tile_empty, S, E,
        gl.load(routing_ptr), DEPTH, I, GROUP, ACTIVATION, LIMIT, STAGES,
    )  # fmt: skip
    hw.barrier()
    hw.warp_specialize(
        [_multiply_partition, _epilogue_partition_0, _epilogue_partition_1, _load_partition],
        (w, parts_ptr), [2, 1, 1], [REGISTERS, REGISTERS, REGISTERS],
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _launch(
    where: torch.device, dtype, places: int, T: int, K: int, E: int, H: int, I: int,  # noqa: E741
    tiles: int, activation: str, limit: Optional[float],
) -> Launch:  # fmt: skip
    config = tuning.lookup("hopper_experts_gate", where)
    maps = (
        tile_map(dtype, (places, H), (H, 1), BM.value, BK.value),
        tile_map(dtype, (E, H, I), (H * I, I, 1), 1, BK.value, BN.value),
    )
    tiles *= -(-I // BN.value)
    constexprs = (-(-H // BK.value), I, activation, limit)
    return Launch(
        gate_gradient_kernel, min(device.multiprocessor_count(where.index), tiles), where,
        maps=maps, numbers=(T * K, E),
        constexprs=(*constexprs, *[config[k] for k in ("GROUP", "STAGES", "REGISTERS")]),
        options=(("num_warps", 8), ("maxnreg", 168)),
    )  # fmt: skip


def gate_gradient(
    spread_dout: torch.Tensor,  # [.., H] by places
    w_down: torch.Tensor,  # [E, H, I]
    gate_up: torch.Tensor,  # [S, 2 I]
    weights: torch.Tensor,  # [T, K]
    routing: Routing,
    d_gate_up: torch.Tensor,  # [.., 2 I] by places, filled
    wz: torch.Tensor,  # [.., I] by places, filled
    needs_weights: bool,
    activation: str,
    limit: Optional[float],
) -> Optional[torch.Tensor]:  # [.., PARTS] fp32 by places
    """Computes gate_gradient of portable/gradients.py in tiles of BM rows."""
    (buffer, T, K, E, _), (_, H, I) = routing, w_down.shape
    count = -(-I // BN.value) * (BN.value // PART.value)
    parts = None
    if needs_weights:
        parts = wz.new_empty((routing.places, count), dtype=torch.float32)
    sizes = (routing.places, T, K, E, H, I, routing.tiles)
    start = _launch(wz.device, wz.dtype, *sizes, activation, limit)
    start(spread_dout, w_down, gate_up, d_gate_up, weights, wz, parts, buffer)
    return parts
