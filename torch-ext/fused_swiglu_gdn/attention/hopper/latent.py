"""Latent attention of a few tokens with wgmma: slots as rows of both products, heads as columns.

    S^T = c qa^T + r q_rot^T         [64, rows]     c [64, C] and r [64, R]: a block of slots
    o^T = o^T shrink + c^T P^T       [C, rows]      the same block, transposed by its descriptor

The second half of qa, if there is one, is more columns, so that a block is read once for both. A
block is copied while the one before it is computed. The other launches are the portable ones.
"""

from typing import Callable, Optional

from ...runtime import device
from ...runtime import gluon as hw
from ...runtime.gluon import gl, gluon
from ..call import LatentAttention
from ..portable import latent
from ..portable.latent import Form
from . import latent_wide
from .latent_wide import part_of

LOG2E = gl.constexpr(1.4426950408889634)
SHARED = 225 << 10  # bytes of shared memory that a program may use here
# by the most rows of queries: rows of a program, warps
FORMS = ((16, 16, 4), (32, 32, 4), (None, 64, 8))
FEW = 5  # blocks of slots that a multiprocessor takes, up to which 32 rows are faster than 64


@gluon.jit
def _copy(c_rows, r_rows, cs, rs, at, stop, C: gl.constexpr, R: gl.constexpr, W: gl.constexpr):
    """Begins the copy of 64 slots; those from stop on are zeros, and are not read."""
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [W, 1], [1, 0])
    thin: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // R, R // 8], [W, 1], [1, 0])
    slot = at + gl.arange(0, 64, layout=gl.SliceLayout(1, wide))
    ch = gl.arange(0, C, layout=gl.SliceLayout(0, wide))
    there = (slot < stop)[:, None] & (ch >= 0)[None, :]
    rows = c_rows + slot.to(gl.int64)[:, None] * C + ch[None, :]
    hw.async_copy.async_copy_global_to_shared(cs, rows, mask=there)
    slot = at + gl.arange(0, 64, layout=gl.SliceLayout(1, thin))
    e = gl.arange(0, R, layout=gl.SliceLayout(0, thin))
    there = (slot < stop)[:, None] & (e >= 0)[None, :]
    rows = r_rows + slot.to(gl.int64)[:, None] * R + e[None, :]
    hw.async_copy.async_copy_global_to_shared(rs, rows, mask=there)
    hw.async_copy.commit_group()


@gluon.jit(do_not_specialize=["B", "S", "SPLITS"])
def _ring_kernel(
    q_ptr,  # [B, ROWS, C + R], or of two HALVES C + R + C: the last C are added to the first
    c_ptr,  # [B, S, C]
    r_ptr,  # [B, S, R]
    len_ptr,  # [B], [] or None: all slots are filled
    mask_ptr,  # [B or 1, T or 1, S] or None: each token attends to the slots up to its own
    parts_ptr,  # fp32 [B, ROWS, SPLITS, C] and [2, B, ROWS, SPLITS]: maxima, to base 2, and sums
    c_step,  # of B
    r_step,
    mask_steps,  # of B, T, S
    len_step,
    B, S, SPLITS,
    scale2,  # times log2(e)
    H: gl.constexpr, ROWS: gl.constexpr, C: gl.constexpr, R: gl.constexpr, BLOCK_R: gl.constexpr,
    NEW: gl.constexpr, HALVES: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """BLOCK_R rows of queries over one part of the slots, with online softmax.

    P enters the second product rounded, as SDPA has it. The first block is copied before
    the queries are there: the launch before this one is that of absorb, which has waited for all
    older ones and writes no latents but those of the NEW slots beyond the length.
    """
    DT: gl.constexpr = q_ptr.dtype.element_ty
    TILES: gl.constexpr = (ROWS + BLOCK_R - 1) // BLOCK_R
    LAST: gl.constexpr = ROWS // H - 1
    WIDTH: gl.constexpr = HALVES * C + R
    COLUMNS: gl.constexpr = BLOCK_R // (W // 4)  # of a warp
    sl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, W // 4], [16, COLUMNS, 16])
    both: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, W // 4], [16, HALVES * COLUMNS, 16])
    al: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, BLOCK_R, 16])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [W, 1], [1, 0])
    thin: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // R, R // 8], [W, 1], [1, 0])
    c_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, C], DT)
    r_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, R], DT)
    q_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALVES * BLOCK_R, C], DT)
    qr_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALVES * BLOCK_R, R], DT)
    p_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_R], DT)
    cs = gl.allocate_shared_memory(DT, [2, 64, C], c_shared)
    rs = gl.allocate_shared_memory(DT, [2, 64, R], r_shared)
    qs = gl.allocate_shared_memory(DT, [HALVES * BLOCK_R, C], q_shared)
    qr = gl.allocate_shared_memory(DT, [HALVES * BLOCK_R, R], qr_shared)
    ps = gl.allocate_shared_memory(DT, [64, BLOCK_R], p_shared)
    pid = gl.program_id(0)
    split = (pid // TILES) % SPLITS
    first = (pid % TILES) * BLOCK_R
    b = (pid // (TILES * SPLITS)).to(gl.int64)
    start, stop, length = part_of(len_ptr, b, len_step, S, SPLITS, split, NEW)
    c_rows = c_ptr + b * c_step
    r_rows = r_ptr + b * r_step
    if NEW == 0:
        _copy(c_rows, r_rows, cs.index(0), rs.index(0), start, stop, C, R, W)
        hw.wait_for_predecessor()
    else:
        is_old = start + 64 <= length - NEW
        if is_old:
            _copy(c_rows, r_rows, cs.index(0), rs.index(0), start, stop, C, R, W)
        hw.wait_for_predecessor()
        if not is_old:
            _copy(c_rows, r_rows, cs.index(0), rs.index(0), start, stop, C, R, W)
    hw.launch_dependents()
    # low halves are rows behind those of the high ones, and have no rotary channels
    j = gl.arange(0, HALVES * BLOCK_R, layout=gl.SliceLayout(1, wide))
    qrow = first + j % BLOCK_R
    ch = gl.arange(0, C, layout=gl.SliceLayout(0, wide))
    rows = q_ptr + ((b * ROWS + qrow) * WIDTH + j // BLOCK_R * (C + R))[:, None] + ch[None, :]
    qs.store(gl.load(rows, mask=(qrow < ROWS)[:, None] & (ch >= 0)[None, :], other=0.0))
    j = gl.arange(0, HALVES * BLOCK_R, layout=gl.SliceLayout(1, thin))
    e = gl.arange(0, R, layout=gl.SliceLayout(0, thin))
    rows = q_ptr + (b * ROWS + first + j)[:, None] * WIDTH + C + e[None, :]
    real = (j < BLOCK_R) & (first + j < ROWS)
    qr.store(gl.load(rows, mask=real[:, None] & (e >= 0)[None, :], other=0.0))
    row = first + gl.arange(0, BLOCK_R, layout=gl.SliceLayout(0, sl))
    n = gl.arange(0, 64, layout=gl.SliceLayout(1, sl))
    token = row // H
    top = gl.full((BLOCK_R,), float("-inf"), gl.float32, gl.SliceLayout(0, sl))
    total = gl.zeros((BLOCK_R,), gl.float32, gl.SliceLayout(0, sl))
    acc = gl.zeros((C, BLOCK_R), gl.float32, al)
    blank = gl.zeros((64, HALVES * BLOCK_R), gl.float32, both)
    for i in range(gl.cdiv(stop - start, 64)):
        buffer = i & 1
        here = start + i * 64
        slot = here + n
        if mask_ptr is not None:  # before the copy, under which it comes
            at = b * mask_steps[0] + slot.to(gl.int64) * mask_steps[2]
            if ROWS == H:
                m = gl.load(mask_ptr + at, mask=slot < stop, other=0)[:, None]
            else:
                at = at[:, None] + (token * mask_steps[1])[None, :]
                there = (slot < stop)[:, None] & (row < ROWS)[None, :]
                m = gl.load(mask_ptr + at, mask=there, other=0)
        _copy(c_rows, r_rows, cs.index(1 - buffer), rs.index(1 - buffer), here + 64, stop, C, R, W)
        hw.async_copy.wait_group(1)
        hw.fence_async_shared()
        s = hw.warpgroup_mma(
            cs.index(buffer), qs.permute((1, 0)), blank, use_acc=False, is_async=True
        )
        s = hw.warpgroup_mma(rs.index(buffer), qr.permute((1, 0)), s, is_async=True)
        s = hw.warpgroup_mma_wait(0, (s,))
        if HALVES == 2:  # both are in one thread
            s = gl.convert_layout(gl.sum(s.reshape((64, 2, BLOCK_R)), 1), sl)
        s = s * scale2
        if mask_ptr is None:
            seen = slot[:, None] < gl.minimum(stop, length - LAST + token)[None, :]
        else:
            seen = (slot < stop)[:, None] & (row < ROWS)[None, :]
            if mask_ptr.dtype.element_ty == gl.int1:
                seen = seen & (m != 0)
            else:
                s = s + m.to(gl.float32) * LOG2E
        s = gl.where(seen, s, float("-inf"))
        new = gl.maximum(top, gl.max(s, 0))
        base = gl.where(new == float("-inf"), 0.0, new)
        p = gl.exp2(s - base[None, :])
        shrink = gl.exp2(top - base)
        ps.store(p.to(DT))
        hw.fence_async_shared()
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(0, al))[None, :]
        turned = cs.index(buffer).permute((1, 0))
        acc = hw.warpgroup_mma(turned, ps, acc, is_async=True)
        total = total * shrink + gl.sum(p, 0)
        acc = hw.warpgroup_mma_wait(0, (acc,))
        top = new
    hw.async_copy.wait_group(0)
    place = (b * ROWS + row) * SPLITS + split
    every = B.to(gl.int64) * (ROWS * SPLITS)
    gl.store(parts_ptr + every * C + place, top, mask=row < ROWS)
    gl.store(parts_ptr + every * (C + 1) + place, total, mask=row < ROWS)
    if start < stop:
        arow = first + gl.arange(0, BLOCK_R, layout=gl.SliceLayout(0, al))
        ach = gl.arange(0, C, layout=gl.SliceLayout(1, al))
        places = (((b * ROWS + arow) * SPLITS + split) * C)[None, :] + ach[:, None]
        gl.store(parts_ptr + places, acc, mask=(arow < ROWS)[None, :] & (ach >= 0)[:, None])


def form_of(call: LatentAttention) -> Form:
    """The form of a call, by shapes alone. Up to 32 rows have both halves of the queries, if shared
    memory has room for them."""
    (B, T, H, _), (S, C), R = call.q.shape, call.latents.shape[2:], call.rotated.shape[3]
    rows = T * H
    if rows > 32 and R == 64 and C > 128:
        work = B * -(-rows // 32) * -(-S // 64)
        if work > FEW * device.multiprocessor_count(call.q.device.index):
            options = {"num_warps": 4, "maxnreg": 168}
            return Form(latent_wide.wide_kernel, 64, 64, options, 1, latent_wide.maps)
        rows = 32
    _, block_r, warps = next(f for f in FORMS if f[0] is None or rows <= f[0])
    shared = 2 * (128 + 2 * block_r) * (C + R) + 128 * block_r
    halves = 2 if block_r <= 32 and shared <= SHARED else 1
    return Form(_ring_kernel, block_r, 64, {"W": warps, "num_warps": warps}, halves)


def takes(call: LatentAttention) -> bool:
    latents, rotated = call.latents, call.rotated
    aligned = latents.stride(0) % 16 == rotated.stride(0) % 16 == 0
    return latent.takes(call) and latents.shape[3] >= 128 and aligned


def prepare_latent_attention(call: LatentAttention) -> Optional[Callable]:
    """The function of portable/latent.py, for latents of 128 to 512 channels that begin at
    multiples of 16 bytes."""
    return latent.prepared(call, form_of) if takes(call) else None
