"""The control of tools/sanitize_gdn.py: a ring of TMA loads that one warp fills and four sum up."""

from typing import Optional

import torch
from conftest import submodule
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

TILES = 9
compat = submodule("runtime.gluon")
tma_load = compat.tma_load
LAYOUT = gl.NVMMASharedLayout.get_default_for([64, 32], gl.float32)


@gluon.jit
def _consume(
    desc, out_ptr, ring, landed, free, SLOTS: gl.constexpr, TILES: gl.constexpr, WAITS: gl.constexpr
):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    total = gl.zeros((64, 32), gl.float32, layout)
    for c in range(TILES):
        if WAITS:
            mbarrier.wait(landed.index(c % SLOTS), (c // SLOTS) & 1)
        total += ring.index(c % SLOTS).load(layout)
        mbarrier.arrive(free.index(c % SLOTS), count=1)
    i = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, layout)), 1)
    j = gl.expand_dims(gl.arange(0, 32, layout=gl.SliceLayout(0, layout)), 0)
    gl.store(out_ptr + i * 32 + j, total)


@gluon.jit
def _produce(
    desc, out_ptr, ring, landed, free, SLOTS: gl.constexpr, TILES: gl.constexpr, WAITS: gl.constexpr
):
    for c in range(TILES):
        mbarrier.wait(free.index(c % SLOTS), ((c // SLOTS) & 1) ^ 1)
        mbarrier.expect(landed.index(c % SLOTS), 64 * 32 * 4)
        tma_load(desc, [c * 64, 0], landed.index(c % SLOTS), ring.index(c % SLOTS))


@gluon.jit
def ring_sum_kernel(desc, out_ptr, SLOTS: gl.constexpr, TILES: gl.constexpr, WAITS: gl.constexpr):
    ring = gl.allocate_shared_memory(gl.float32, [SLOTS, 64, 32], desc.layout)
    landed = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(landed.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    args = (desc, out_ptr, ring, landed, free, SLOTS, TILES, WAITS)
    gl.warp_specialize([(_consume, args), (_produce, args)], [1], [32])


def ring_sum(pdl=True, maxnreg: Optional[int] = 136, slots=3, waits=True) -> None:
    x = torch.randn(64 * TILES, 32, device="cuda")
    out = torch.empty(64, 32, device="cuda")
    desc = TensorDescriptor(x, list(x.shape), [32, 1], [64, 32], LAYOUT)
    options = {} if maxnreg is None else {"maxnreg": maxnreg}
    ring_sum_kernel[(1,)](desc, out, slots, TILES, waits, num_warps=4, launch_pdl=pdl, **options)
    assert not waits or torch.allclose(out, x.view(TILES, 64, 32).sum(0), atol=1e-4)
