"""GEMMs of SwiGLU's training step with an overlapped epilogue.

A CTA makes tiles of a product: one warp loads the operands, two warpgroups multiply and leave the
finished tile in shared memory. Three more warps do the memory-bound epilogue (the gate, or its
gradients) while the next tile is multiplied, so the epilogue costs no time and the tile never
reaches memory. Sizes: M tokens, K model width, N hidden width. docs/swiglu.md has the timeline.
"""

from ...runtime import gluon as hw
from ...runtime.gluon import gl, gluon
from ...runtime.primitives import grouped_tile
from .epilogue import BM, BN, Work, for_fp16, hand_over, make_gate, make_gradients


@gluon.jit
def _load_partition(w, gate_up, z_ptr):
    """Loads operands up to STAGES steps ahead; one warp."""
    PAIR: gl.constexpr = len(w.b_desc.block_type.shape) == 3
    BK: gl.constexpr = w.a_desc.block_type.shape[1]
    BYTES: gl.constexpr = (BM + BN) * BK * 2
    it = 0
    for tile in range(gl.program_id(0), w.tiles_m * w.tiles_n, gl.num_programs(0)):
        pid_m, pid_n = grouped_tile(tile, w.tiles_m, w.tiles_n, w.group)
        for step in range(w.depth):
            s = it % w.STAGES
            full = w.full.index(s)
            hw.mbarrier.wait(w.empty.index(s), ((it // w.STAGES) & 1) ^ 1)  # the first round passes
            hw.mbarrier.expect(full, BYTES)
            hw.tma_load(w.a_desc, [pid_m * BM, step * BK], full, w.a_smem.index(s))
            if PAIR:
                hw.tma_load(w.b_desc, [0, pid_n * (BN // 2), step * BK], full, w.b_smem.index(s))
            else:
                hw.tma_load(w.b_desc, [step * BK, pid_n * BN], full, w.b_smem.index(s))
            it += 1


@gluon.jit
def multiply_steps(w, acc, it, depth, TRANSPOSED: gl.constexpr):
    """(a tile of the product, the next step's number) from `depth` steps of operands, of which step
    `it` is the first. acc: registers that the tile may take. TRANSPOSED: b's boxes are."""
    for step in range(depth):
        s = it % w.STAGES
        hw.mbarrier.wait(w.full.index(s), (it // w.STAGES) & 1)
        b = w.b_smem.index(s)
        if len(b.shape) == 3:
            b = b.reshape([b.shape[0] * b.shape[1], b.shape[2]])
        if TRANSPOSED:
            b = b.permute((1, 0))
        acc = hw.warpgroup_mma(w.a_smem.index(s), b, acc, use_acc=step > 0, is_async=True)
        acc = hw.warpgroup_mma_wait(1, (acc,))
        hw.mbarrier.arrive(w.empty.index((it + w.STAGES - 1) % w.STAGES), count=1, pred=step > 0)
        it += 1
    acc = hw.warpgroup_mma_wait(0, (acc,))
    hw.mbarrier.arrive(w.empty.index((it + w.STAGES - 1) % w.STAGES), count=1)
    return acc, it


@gluon.jit
def _multiply_partition(w, gate_up, z_ptr):
    """Computes the product tile after tile into tile_smem; two warpgroups.

    Gate and up are rounded to the dtype in which they are saved. dZ is passed on as fp16: beside
    the bf16 of all other operands that is as good as no rounding.
    """
    PAIR: gl.constexpr = len(w.b_desc.block_type.shape) == 3
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BN, 16])
    acc = gl.zeros((BM, BN), gl.float32, LAYOUT)
    it = 0
    phase = 1  # of `tile_empty`: the first tile passes
    for _ in range(gl.program_id(0), w.tiles_m * w.tiles_n, gl.num_programs(0)):
        acc, it = multiply_steps(w, acc, it, w.depth, PAIR)
        hw.mbarrier.wait(w.tile_empty, phase)
        phase ^= 1
        if PAIR:
            hand_over(w.tile_smem, acc)
        else:
            scaled, factor = for_fp16(acc)
            w.scale_smem.index(0).store(factor)
            hand_over(w.tile_smem, scaled)
        hw.fence_async_shared()
        hw.mbarrier.arrive(w.tile_full, count=1)


@gluon.jit
def _epilogue_partition_0(w, gate_up, z_ptr):
    """Runs two thirds of the epilogue; two warps."""
    if len(w.b_desc.block_type.shape) == 3:
        make_gate(w, gate_up, z_ptr, 0, 11, 2)
    else:
        make_gradients(w, gate_up, z_ptr, 0, 22, 2)


@gluon.jit
def _epilogue_partition_1(w, gate_up, z_ptr):
    """Runs the rest of the epilogue; one warp."""
    if len(w.b_desc.block_type.shape) == 3:
        make_gate(w, gate_up, z_ptr, 22, 32, 1)
    else:
        make_gradients(w, gate_up, z_ptr, 44, 64, 1)


@gluon.jit
def _run(
    a_desc, b_desc, gate_up, z_ptr, M, N, D, group,
    UP_FIRST: gl.constexpr, ACTIVATION: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Allocates the shared memory of a CTA and starts its partitions."""
    PAIR: gl.constexpr = len(b_desc.block_type.shape) == 3
    COLUMNS: gl.constexpr = BN // 2 if PAIR else BN  # of N to a tile
    BK: gl.constexpr = a_desc.block_type.shape[1]
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    ROW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    HANDED: gl.constexpr = a_desc.dtype if PAIR else gl.float16
    a_smem, b_smem = hw.ring(a_desc, STAGES), hw.ring(b_desc, STAGES)
    tile_smem = gl.allocate_shared_memory(HANDED, [4, BM, 64], TILE)
    scale_smem = gl.allocate_shared_memory(gl.float32, [1, BM], ROW)
    full, empty = hw.ring_barriers(STAGES, 1)
    tile_full = gl.allocate_shared_memory(gl.int64, [1], hw.mbarrier.MBarrierLayout())
    tile_empty = gl.allocate_shared_memory(gl.int64, [1], hw.mbarrier.MBarrierLayout())
    hw.mbarrier.init(tile_full, count=1)
    hw.mbarrier.init(tile_empty, count=2)
    w = Work(
        a_desc, b_desc, a_smem, b_smem, tile_smem, scale_smem, full, empty, tile_full, tile_empty,
        M, N, gl.cdiv(D, BK), gl.cdiv(M, BM), gl.cdiv(N, COLUMNS), group, STAGES, UP_FIRST,
        ACTIVATION,
    )  # fmt: skip
    args = (w, gate_up, z_ptr)
    hw.barrier()
    hw.warp_specialize(
        [_multiply_partition, _epilogue_partition_0, _epilogue_partition_1, _load_partition], args,
        [2, 1, 1], [REGISTERS, REGISTERS, REGISTERS],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["M", "N", "K", "group"])
def swiglu_saving_fwd_kernel(
    x_desc,  # [M, K] in boxes [BM, BK]
    w_desc,  # [2, N, K] in boxes [2, BN / 2, BK]
    gate_up_desc,  # [M, 2, N] in boxes [BM, 1, 64]
    z_ptr,  # [M, N]
    M, N, K,
    group,  # rows of tiles that are walked together
    UP_FIRST: gl.constexpr,  # in w_desc
    ACTIVATION: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,  # of the last warps
):  # fmt: skip
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
    M, N, D, group,
    ACTIVATION: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """dz = dy Wd, dgate = dz * up * act'(gate), dup = dz * act(gate), and z recomputed."""
    _run(
        dy_desc, w_down_desc, gate_up_ptr, z_ptr, M, N, D, group,
        False, ACTIVATION, STAGES, REGISTERS,
    )  # fmt: skip
