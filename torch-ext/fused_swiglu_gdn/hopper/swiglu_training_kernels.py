"""Products of SwiGLU's training step with what comes after them done by warps of their own.

A CTA makes tiles of a product: one warp brings the operands, two warpgroups multiply, and hand the
finished tile over in shared memory. Two more warps then do the memory-bound part (the gate, or its
gradients) while the next tile is multiplied, so that part costs no time and the tile never reaches
memory. Sizes: M tokens, K model width, N hidden width. docs/swiglu.md has the timeline.
"""

from ..common.primitives import activate, activate_with_slope, grouped_tile
from .gluon_compat import (
    REINTERPRET_IS_PUBLIC,
    WARP_SPECIALIZE_TAKES_LIST,
    as_box,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    record,
    tma,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)

BM = gl.constexpr(128)  # a tile's rows
BN = gl.constexpr(256)  # and columns
UNIT = gl.constexpr(8)  # rows of a tile, 64 columns wide, that a warp of the tail takes at a time


@record
class Work:
    """What the warps of one CTA share."""

    a_desc: tma.tensor_descriptor  # [M, D] box [BM, BK]
    b_desc: tma.tensor_descriptor  # weights: [2, N, D] box [2, BN / 2, BK], or [D, N] box [BK, BN]
    a_smem: gl.shared_memory_descriptor  # [STAGES, BM, BK]
    b_smem: gl.shared_memory_descriptor  # [STAGES, *box of b_desc]
    tile_smem: gl.shared_memory_descriptor  # [4, BM, 64] a finished tile by columns, 16 bits
    scale_smem: gl.shared_memory_descriptor  # [1, BM] fp32: what to multiply each row of it with
    landed: gl.shared_memory_descriptor  # [STAGES] mbarriers: the operands of a step are there
    free: gl.shared_memory_descriptor  # [STAGES] mbarriers: they have been multiplied
    ready: gl.shared_memory_descriptor  # [1] mbarrier: tile_smem is written
    taken: gl.shared_memory_descriptor  # [1] mbarrier: and read
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
def _load_partition(w, gate_up, z_ptr):
    """One warp: operands, STAGES steps ahead at most."""
    PAIR: gl.constexpr = len(w.b_desc.block_type.shape) == 3
    BK: gl.constexpr = w.a_desc.block_type.shape[1]
    BYTES: gl.constexpr = (BM + BN) * BK * 2
    it = 0
    for tile in range(gl.program_id(0), w.tiles_m * w.tiles_n, gl.num_programs(0)):
        pid_m, pid_n = grouped_tile(tile, w.tiles_m, w.tiles_n, w.group)
        for step in range(w.depth):
            s = it % w.STAGES
            landed = w.landed.index(s)
            mbarrier.wait(w.free.index(s), ((it // w.STAGES) & 1) ^ 1)  # the first round passes
            mbarrier.expect(landed, BYTES)
            tma_load(w.a_desc, [pid_m * BM, step * BK], landed, w.a_smem.index(s))
            if PAIR:
                tma_load(w.b_desc, [0, pid_n * (BN // 2), step * BK], landed, w.b_smem.index(s))
            else:
                tma_load(w.b_desc, [step * BK, pid_n * BN], landed, w.b_smem.index(s))
            it += 1


@gluon.jit
def _multiply_partition(w, gate_up, z_ptr):
    """Two warpgroups: the product, a tile after another, into tile_smem.

    Gate and up are rounded as they are kept. dZ is handed on as fp16, each row by the power of two
    that makes the most of its 11 bits: as good as not rounded beside the bf16 of everything else.
    """
    PAIR: gl.constexpr = len(w.b_desc.block_type.shape) == 3
    BK: gl.constexpr = w.a_desc.block_type.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BN, 16])
    acc = gl.zeros((BM, BN), gl.float32, LAYOUT)
    it = 0
    phase = 1  # of `taken`: the first tile passes
    for _ in range(gl.program_id(0), w.tiles_m * w.tiles_n, gl.num_programs(0)):
        for step in range(w.depth):
            s = it % w.STAGES
            mbarrier.wait(w.landed.index(s), (it // w.STAGES) & 1)
            b = w.b_smem.index(s)
            if PAIR:
                b = b.reshape([BN, BK]).permute((1, 0))
            acc = warpgroup_mma(w.a_smem.index(s), b, acc, use_acc=step > 0, is_async=True)
            acc = warpgroup_mma_wait(1, (acc,))
            mbarrier.arrive(w.free.index((it + w.STAGES - 1) % w.STAGES), count=1, pred=step > 0)
            it += 1
        acc = warpgroup_mma_wait(0, (acc,))
        mbarrier.arrive(w.free.index((it + w.STAGES - 1) % w.STAGES), count=1)
        mbarrier.wait(w.taken, phase)
        phase ^= 1
        if PAIR:
            _hand_over(w.tile_smem, acc)
        else:
            # 2^e <= max of the row < 2^(e + 1); e at least -112, so that 2^(14 - e) is a number
            most = gl.max(gl.abs(acc), 1).to(gl.int32, bitcast=True) & 0x7F800000
            most = gl.maximum(most, 15 << 23)
            w.scale_smem.index(0).store((most - (14 << 23)).to(gl.float32, bitcast=True))
            scale = ((254 << 23) - most + (14 << 23)).to(gl.float32, bitcast=True)
            _hand_over(w.tile_smem, acc * gl.expand_dims(scale, 1))
        fence_async_shared()
        mbarrier.arrive(w.ready, count=1)


@gluon.jit
def _hand_over(tile_smem, acc):
    """acc [BM, BN] into [4, BM, 64]; the splits only rename registers."""
    left, right = acc.reshape((BM, 2, BN // 2)).permute((0, 2, 1)).split()
    for half in gl.static_range(2):
        part = left if half == 0 else right
        first, second = part.reshape((BM, 2, BN // 4)).permute((0, 2, 1)).split()
        tile_smem.index(2 * half).store(first.to(tile_smem.dtype))
        tile_smem.index(2 * half + 1).store(second.to(tile_smem.dtype))


@gluon.jit
def _piece(w, i, WARPS: gl.constexpr):
    """Piece i of the tile, [UNIT WARPS, 64]: from top to bottom, then the next 64 columns."""
    smem = w.tile_smem
    SHAPE: gl.constexpr = [4 * BM // (UNIT * WARPS), UNIT * WARPS, 64]
    if REINTERPRET_IS_PUBLIC:
        pieces = smem.reinterpret(smem.dtype, SHAPE, smem.layout)
    else:
        pieces = smem._reinterpret(smem.dtype, SHAPE, smem.layout)
    return pieces.index(i)


@gluon.jit
def _scales(w, i, WARPS: gl.constexpr):
    """The factors of a piece's rows, [UNIT WARPS]."""
    smem = w.scale_smem
    SHAPE: gl.constexpr = [BM // (UNIT * WARPS), UNIT * WARPS]
    if REINTERPRET_IS_PUBLIC:
        scales = smem.reinterpret(smem.dtype, SHAPE, smem.layout)
    else:
        scales = smem._reinterpret(smem.dtype, SHAPE, smem.layout)
    return scales.index(i % SHAPE[0])


@gluon.constexpr_function
def vector_layout(warps):
    """Eight neighbours to a thread."""
    return gl.BlockedLayout([1, 8], [4, 8], [warps, 1], [1, 0])


@gluon.jit
def _elements(w, i, row, column, WARPS: gl.constexpr):
    """(m [.., 1], n [1, ..], whether inside [M, N]) of piece i of the tile at row, column."""
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
def _make_gate(w, gate_up, z_ptr, FIRST: gl.constexpr, LAST: gl.constexpr, WARPS: gl.constexpr):
    """Gate and up, as they are, to memory, and z = act(gate) * up: pieces FIRST to LAST."""
    LAYOUT: gl.constexpr = vector_layout(WARPS)
    HALF: gl.constexpr = 2 * BM // (UNIT * WARPS)  # the tile's columns 128 to 255 begin here
    GATE: gl.constexpr = HALF if w.UP_FIRST else 0
    N = w.N // 8 * 8
    phase = 0
    for tile in range(gl.program_id(0), w.tiles_m * w.tiles_n, gl.num_programs(0)):
        pid_m, pid_n = grouped_tile(tile, w.tiles_m, w.tiles_n, w.group)
        row = pid_m * BM
        column = pid_n * (BN // 2)
        mbarrier.wait(w.ready, phase)
        phase ^= 1
        if FIRST == 0:
            for q in gl.static_range(4):
                where = [row, (q // 2) ^ w.UP_FIRST, column + (q % 2) * 64]
                tma_store(gate_up, where, as_box(w.tile_smem.index(q), gate_up))
        for i in range(FIRST, LAST):
            gate = _piece(w, GATE + i, WARPS).load(LAYOUT).to(gl.float32)
            up = _piece(w, HALF - GATE + i, WARPS).load(LAYOUT).to(gl.float32)
            z = (activate(gate, w.ACTIVATION) * up).to(z_ptr.dtype.element_ty)
            m, n, inside = _elements(w, i, row, column, WARPS)
            gl.store(z_ptr + m.to(gl.int64) * N + n, z, mask=inside)
        if FIRST == 0:
            tma_store_wait(0)
        mbarrier.arrive(w.taken, count=1)


@gluon.jit
def _load_pair(w, gate_up, i, row, column, LAST: gl.constexpr, WARPS: gl.constexpr):
    """gate and up of piece i, nothing past LAST."""
    m, n, inside = _elements(w, i, row, column, WARPS)
    N = w.N // 8 * 8
    ptrs = gate_up + m.to(gl.int64) * (2 * N) + n
    gate = gl.load(ptrs, mask=inside & (i < LAST), other=0.0)
    up = gl.load(ptrs + N, mask=inside & (i < LAST), other=0.0)
    return gate, up


@gluon.jit
def _gradient_piece(w, gate_up, z_ptr, gate, up, i, row, column, WARPS: gl.constexpr):
    """Piece i from its gate and up (fp32) and the dz of tile_smem."""
    LAYOUT: gl.constexpr = vector_layout(WARPS)
    TYPE: gl.constexpr = gate_up.dtype.element_ty
    N = w.N // 8 * 8
    scale = _scales(w, i, WARPS).load(gl.SliceLayout(1, LAYOUT))
    dz = _piece(w, i, WARPS).load(LAYOUT).to(gl.float32) * gl.expand_dims(scale, 1)
    value, slope = activate_with_slope(gate, w.ACTIVATION, PTX=True)
    m, n, inside = _elements(w, i, row, column, WARPS)
    ptrs = gate_up + m.to(gl.int64) * (2 * N) + n
    gl.store(ptrs, (dz * up * slope).to(TYPE), mask=inside)
    gl.store(ptrs + N, (dz * value).to(TYPE), mask=inside)
    if z_ptr is not None:
        gl.store(z_ptr + m.to(gl.int64) * N + n, (value * up).to(TYPE), mask=inside)


@gluon.jit
def _make_gradients(
    w, gate_up, z_ptr, FIRST: gl.constexpr, LAST: gl.constexpr, WARPS: gl.constexpr
):
    """gate and up [M, 2 N] overwritten by their gradients, and z = act(gate) * up.

    Pieces FIRST to LAST, an even number, by twos: what is loaded for the next two stays in its
    registers, since a move from one to another would wait for the load.
    """
    phase = 0
    for tile in range(gl.program_id(0), w.tiles_m * w.tiles_n, gl.num_programs(0)):
        pid_m, pid_n = grouped_tile(tile, w.tiles_m, w.tiles_n, w.group)
        row = pid_m * BM
        column = pid_n * BN
        gate_0, up_0 = _load_pair(w, gate_up, FIRST, row, column, LAST, WARPS)
        gate_1, up_1 = _load_pair(w, gate_up, FIRST + 1, row, column, LAST, WARPS)
        mbarrier.wait(w.ready, phase)
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
        mbarrier.arrive(w.taken, count=1)


@gluon.jit
def _tail_partition_0(w, gate_up, z_ptr):
    """Two warps: two thirds of what comes after the product."""
    if len(w.b_desc.block_type.shape) == 3:
        _make_gate(w, gate_up, z_ptr, 0, 11, 2)
    else:
        _make_gradients(w, gate_up, z_ptr, 0, 22, 2)


@gluon.jit
def _tail_partition_1(w, gate_up, z_ptr):
    """One warp: the rest."""
    if len(w.b_desc.block_type.shape) == 3:
        _make_gate(w, gate_up, z_ptr, 22, 32, 1)
    else:
        _make_gradients(w, gate_up, z_ptr, 44, 64, 1)


@gluon.jit
def _run(
    a_desc, b_desc, gate_up, z_ptr, M, N, D, group,
    UP_FIRST: gl.constexpr,
    ACTIVATION: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Sets up one CTA and divides it."""
    PAIR: gl.constexpr = len(b_desc.block_type.shape) == 3
    COLUMNS: gl.constexpr = BN // 2 if PAIR else BN  # of N to a tile
    BK: gl.constexpr = a_desc.block_type.shape[1]
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    ROW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    HANDED: gl.constexpr = a_desc.dtype if PAIR else gl.float16
    a_smem = gl.allocate_shared_memory(
        a_desc.dtype, [STAGES] + a_desc.block_type.shape, a_desc.layout
    )
    b_smem = gl.allocate_shared_memory(
        b_desc.dtype, [STAGES] + b_desc.block_type.shape, b_desc.layout
    )
    tile_smem = gl.allocate_shared_memory(HANDED, [4, BM, 64], TILE)
    scale_smem = gl.allocate_shared_memory(gl.float32, [1, BM], ROW)
    landed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(landed.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    mbarrier.init(ready, count=1)
    mbarrier.init(taken, count=2)
    w = Work(
        a_desc, b_desc, a_smem, b_smem, tile_smem, scale_smem, landed, free, ready, taken, M, N,
        gl.cdiv(D, BK), gl.cdiv(M, BM), gl.cdiv(N, COLUMNS), group, STAGES, UP_FIRST, ACTIVATION,
    )  # fmt: skip
    args = (w, gate_up, z_ptr)
    barrier()
    if WARP_SPECIALIZE_TAKES_LIST:
        gl.warp_specialize(
            [
                (_multiply_partition, args), (_tail_partition_0, args), (_tail_partition_1, args),
                (_load_partition, args),
            ],
            [2, 1, 1], [REGISTERS, REGISTERS, REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            args, _multiply_partition, args,
            [_tail_partition_0, _tail_partition_1, _load_partition],
            [2, 1, 1], [REGISTERS, REGISTERS, REGISTERS],
        )  # fmt: skip


@gluon.jit(do_not_specialize=["M", "N", "K", "group"])
def swiglu_saving_fwd_kernel(
    x_desc,  # [M, K] in boxes [BM, BK]
    w_desc,  # [2, N, K] in boxes [2, BN / 2, BK]
    gate_up_desc,  # [M, 2, N] in boxes [BM, 1, 64]
    z_ptr,  # [M, N]
    M,
    N,
    K,
    group,  # rows of tiles that are walked together
    UP_FIRST: gl.constexpr,  # in w_desc
    ACTIVATION: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,  # of the last warps
):
    """gate = x Wg^T, up = x Wu^T, z = act(gate) * up; programs stride over tiles."""
    _run(
        x_desc, w_desc, gate_up_desc, z_ptr, M, N, K, group,
        UP_FIRST, ACTIVATION, STAGES, REGISTERS,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["M", "N", "D", "group"])
def swiglu_gradient_kernel(
    dy_desc,  # [M, D] in boxes [BM, BK]
    w_down_desc,  # [D, N] in boxes [BK, BN]
    gate_up_ptr,  # [M, 2 N]: gate and up, overwritten by their gradients
    z_ptr,  # [M, N], or None
    M,
    N,
    D,
    group,
    ACTIVATION: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """dz = dy Wd, dgate = dz * up * act'(gate), dup = dz * act(gate), and z again."""
    _run(
        dy_desc, w_down_desc, gate_up_ptr, z_ptr, M, N, D, group,
        False, ACTIVATION, STAGES, REGISTERS,
    )  # fmt: skip
