"""The epilogue of training_kernels.py: the work of its last warps on a finished tile.

They take a tile in pieces of 64 columns, vector by vector. Sizes: M tokens, N hidden width.
"""

from ...runtime import gluon as hw
from ...runtime.gluon import gl, gluon, record
from ...runtime.primitives import activate, activate_with_slope, grouped_tile

BM = gl.constexpr(128)  # a tile's rows
BN = gl.constexpr(256)  # and columns
UNIT = gl.constexpr(8)  # rows of a tile, 64 columns wide, that a warp of the tail takes at a time


@record
class Work:
    """State that the warps of one CTA share."""

    a_desc: hw.tma.tensor_descriptor  # [M, D] box [BM, BK]
    b_desc: hw.tma.tensor_descriptor  # weights: [2, N, D] box [2, BN / 2, BK], or [D, N]: [BK, BN]
    a_smem: gl.shared_memory_descriptor  # [STAGES, BM, BK]
    b_smem: gl.shared_memory_descriptor  # [STAGES, *box of b_desc]
    tile_smem: gl.shared_memory_descriptor  # [4, BM, 64] a finished tile by columns, 16 bits
    scale_smem: gl.shared_memory_descriptor  # [1, BM] fp32: what to multiply each row of it with
    full: gl.shared_memory_descriptor  # [STAGES] mbarriers: the operands of a step are there
    empty: gl.shared_memory_descriptor  # [STAGES] mbarriers: they have been multiplied
    tile_full: gl.shared_memory_descriptor  # [1] mbarrier: tile_smem is written
    tile_empty: gl.shared_memory_descriptor  # [1] mbarrier: and read
    M: gl.tensor
    N: gl.tensor
    depth: gl.tensor  # of the product: steps of BK
    tiles_m: gl.tensor
    tiles_n: gl.tensor
    group: gl.tensor  # rows of tiles that are walked together
    STAGES: gl.constexpr
    UP_FIRST: gl.constexpr  # in b_desc
    ACTIVATION: gl.constexpr


@gluon.jit
def hand_over(tile_smem, acc):
    """Stores acc [BM, BN] to tile_smem [4, BM, 64]; the splits only rename registers."""
    left, right = acc.reshape((BM, 2, BN // 2)).permute((0, 2, 1)).split()
    for half in gl.static_range(2):
        part = left if half == 0 else right
        first, second = part.reshape((BM, 2, BN // 4)).permute((0, 2, 1)).split()
        tile_smem.index(2 * half).store(first.to(tile_smem.dtype))
        tile_smem.index(2 * half + 1).store(second.to(tile_smem.dtype))


@gluon.jit
def for_fp16(acc):
    """(acc with each row scaled by the power of two that uses fp16's 11 bits best, what to multiply
    the rows with afterwards)."""
    # 2^e <= max of the row < 2^(e + 1); e at least -112, so that 2^(14 - e) is a number
    most = gl.max(gl.abs(acc), 1).to(gl.int32, bitcast=True) & 0x7F800000
    most = gl.maximum(most, 15 << 23)
    factor = (most - (14 << 23)).to(gl.float32, bitcast=True)
    scale = ((254 << 23) - most + (14 << 23)).to(gl.float32, bitcast=True)
    return acc * gl.expand_dims(scale, 1), factor


@gluon.jit
def piece(w, i, WARPS: gl.constexpr):
    """Piece i of the tile, [UNIT WARPS, 64]: from top to bottom, then the next 64 columns."""
    smem = w.tile_smem
    SHAPE: gl.constexpr = [4 * BM // (UNIT * WARPS), UNIT * WARPS, 64]
    return hw.as_tile(smem, smem.dtype, SHAPE, smem.layout).index(i)


@gluon.jit
def _scales(w, i, WARPS: gl.constexpr):
    """The factors of a piece's rows, [UNIT WARPS]."""
    smem = w.scale_smem
    SHAPE: gl.constexpr = [BM // (UNIT * WARPS), UNIT * WARPS]
    return hw.as_tile(smem, smem.dtype, SHAPE, smem.layout).index(i % SHAPE[0])


@gluon.constexpr_function
def vector_layout(warps):
    """The layout with eight neighbours to a thread."""
    return gl.BlockedLayout([1, 8], [4, 8], [warps, 1], [1, 0])


@gluon.jit
def _elements(w, i, row, column, WARPS: gl.constexpr):
    """(m [.., 1], n [1, ..], mask of those inside [M, N]) of piece i of the tile at row, column."""
    LAYOUT: gl.constexpr = vector_layout(WARPS)
    HIGH: gl.constexpr = UNIT * WARPS
    DOWN: gl.constexpr = BM // HIGH
    offs_m = gl.arange(0, HIGH, layout=gl.SliceLayout(1, LAYOUT))
    offs_n = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    m = gl.expand_dims(row + (i % DOWN) * HIGH + offs_m, 1)
    n = gl.expand_dims(column + (i // DOWN) * 64 + offs_n, 0)
    N = w.N // 8 * 8  # says that N is a multiple of 8, as it is
    return m, n, (m < w.M) & (n < N)


@gluon.jit
def make_gate(w, gate_up, z_ptr, FIRST: gl.constexpr, LAST: gl.constexpr, WARPS: gl.constexpr):
    """Stores gate and up unchanged, and z = act(gate) * up, of pieces FIRST to LAST."""
    LAYOUT: gl.constexpr = vector_layout(WARPS)
    HALF: gl.constexpr = 2 * BM // (UNIT * WARPS)  # the tile's columns 128 to 255 begin here
    GATE: gl.constexpr = HALF if w.UP_FIRST else 0
    N = w.N // 8 * 8
    phase = 0
    for tile in range(gl.program_id(0), w.tiles_m * w.tiles_n, gl.num_programs(0)):
        pid_m, pid_n = grouped_tile(tile, w.tiles_m, w.tiles_n, w.group)
        row = pid_m * BM
        column = pid_n * (BN // 2)
        hw.mbarrier.wait(w.tile_full, phase)
        phase ^= 1
        if FIRST == 0:
            for q in gl.static_range(4):
                where = [row, (q // 2) ^ w.UP_FIRST, column + (q % 2) * 64]
                hw.tma_store(gate_up, where, hw.as_box(w.tile_smem.index(q), gate_up))
        for i in range(FIRST, LAST):
            gate = piece(w, GATE + i, WARPS).load(LAYOUT).to(gl.float32)
            up = piece(w, HALF - GATE + i, WARPS).load(LAYOUT).to(gl.float32)
            z = (activate(gate, w.ACTIVATION) * up).to(z_ptr.dtype.element_ty)
            m, n, inside = _elements(w, i, row, column, WARPS)
            gl.store(z_ptr + m.to(gl.int64) * N + n, z, mask=inside)
        if FIRST == 0:
            hw.tma_store_wait(0)
        hw.mbarrier.arrive(w.tile_empty, count=1)


@gluon.jit
def _load_pair(w, gate_up, i, row, column, LAST: gl.constexpr, WARPS: gl.constexpr):
    """Loads gate and up of piece i; pieces from LAST on are masked off."""
    m, n, inside = _elements(w, i, row, column, WARPS)
    N = w.N // 8 * 8
    ptrs = gate_up + m.to(gl.int64) * (2 * N) + n
    gate = gl.load(ptrs, mask=inside & (i < LAST), other=0.0)
    up = gl.load(ptrs + N, mask=inside & (i < LAST), other=0.0)
    return gate, up


@gluon.jit
def _gradient_piece(w, gate_up, z_ptr, gate, up, i, row, column, WARPS: gl.constexpr):
    """Stores the gradients of piece i from its gate and up (fp32) and the dz of tile_smem."""
    LAYOUT: gl.constexpr = vector_layout(WARPS)
    TYPE: gl.constexpr = gate_up.dtype.element_ty
    N = w.N // 8 * 8
    scale = _scales(w, i, WARPS).load(gl.SliceLayout(1, LAYOUT))
    dz = piece(w, i, WARPS).load(LAYOUT).to(gl.float32) * gl.expand_dims(scale, 1)
    value, slope = activate_with_slope(gate, w.ACTIVATION, PTX=True)
    m, n, inside = _elements(w, i, row, column, WARPS)
    ptrs = gate_up + m.to(gl.int64) * (2 * N) + n
    gl.store(ptrs, (dz * up * slope).to(TYPE), mask=inside)
    gl.store(ptrs + N, (dz * value).to(TYPE), mask=inside)
    if z_ptr is not None:
        gl.store(z_ptr + m.to(gl.int64) * N + n, (value * up).to(TYPE), mask=inside)


@gluon.jit
def make_gradients(w, gate_up, z_ptr, FIRST: gl.constexpr, LAST: gl.constexpr, WARPS: gl.constexpr):
    """Overwrites gate and up [M, 2 N] by their gradients, and stores z = act(gate) * up.

    Takes pieces FIRST to LAST, an even number, two at a time: the values loaded for the next two
    stay in registers of their own, since a move between registers would wait for the load.
    """
    phase = 0
    for tile in range(gl.program_id(0), w.tiles_m * w.tiles_n, gl.num_programs(0)):
        pid_m, pid_n = grouped_tile(tile, w.tiles_m, w.tiles_n, w.group)
        row = pid_m * BM
        column = pid_n * BN
        gate_0, up_0 = _load_pair(w, gate_up, FIRST, row, column, LAST, WARPS)
        gate_1, up_1 = _load_pair(w, gate_up, FIRST + 1, row, column, LAST, WARPS)
        hw.mbarrier.wait(w.tile_full, phase)
        phase ^= 1
        for i in range(FIRST, LAST, 2):
            gate = gate_0.to(gl.float32)
            up = up_0.to(gl.float32)
            gate_0, up_0 = _load_pair(w, gate_up, i + 2, row, column, LAST, WARPS)
            _gradient_piece(w, gate_up, z_ptr, gate, up, i, row, column, WARPS)
            gate = gate_1.to(gl.float32)
            up = up_1.to(gl.float32)
            gate_1, up_1 = _load_pair(w, gate_up, i + 3, row, column, LAST, WARPS)
            _gradient_piece(w, gate_up, z_ptr, gate, up, i + 1, row, column, WARPS)
        hw.mbarrier.arrive(w.tile_empty, count=1)
