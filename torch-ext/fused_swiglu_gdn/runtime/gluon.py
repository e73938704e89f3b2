"""Gluon under one set of names for Triton 3.5 to 3.9, which renamed some.

All kernels that are written in Gluon import it from here, and so are written once.
"""

import functools
import math

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate

from .maps import Map

__all__ = [
    "LOADS_FIRST",
    "add",
    "as_box",
    "as_tile",
    "async_copy",
    "barrier",
    "fence_async_global",
    "fence_async_shared",
    "gl",
    "gluon",
    "launch_dependents",
    "mbarrier",
    "mma_v2",
    "own_range",
    "record",
    "ring",
    "ring_barriers",
    "rounded",
    "tile_map",
    "tma",
    "tma_load",
    "tma_store",
    "tma_store_wait",
    "wait_for_predecessor",
    "warpgroup_mma",
    "warpgroup_mma_wait",
    "warp_specialize",
]

TRITON_VERSION = tuple(int(x) for x in triton.__version__.split("+")[0].split(".")[:2])

# 3.9 made it public.
_Smem = gl.shared_memory_descriptor
_reinterpret = getattr(_Smem, "reinterpret", None) or _Smem._reinterpret


@builtin
def as_tile(smem, dtype, shape, layout, _semantic=None):
    """Reinterprets the bytes of smem as another tile of the same size, which Triton 3.8
    requires."""
    dtype, sizes = _plain(dtype), [_plain(n) for n in _plain(shape)]
    bits = dtype.primitive_bitwidth * math.prod(sizes)
    if bits != smem.dtype.primitive_bitwidth * math.prod(smem.shape):
        raise ValueError(f"{smem.dtype} {smem.shape} are not as many bytes as {dtype} {sizes}")
    return _reinterpret(smem, dtype, sizes, layout, _semantic=_semantic)


def _plain(x):
    return x.value if isinstance(x, gl.constexpr) else x


# 3.8 renamed the bulk copies.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
tma_store_wait = tma.store_wait

own_range = triton.language.range  # takes disable_licm

# 3.9 takes all loads of an unrolled loop before anything else, and may spill what they bring.
LOADS_FIRST = gl.constexpr(TRITON_VERSION >= (3, 8))

# 3.7 renamed it.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@builtin
def warp_specialize(partitions, args, warps, registers, _semantic=None, _generator=None):
    """Runs the first partition in the warps of the program, and each other one in warps and
    registers of its own, all with the same args."""
    context = {"_semantic": _semantic, "_generator": _generator}
    if TRITON_VERSION >= (3, 6):
        pairs = [(partition, args) for partition in partitions]
        return gl.warp_specialize(pairs, warps, registers, **context)
    first, *others = partitions
    return gl.warp_specialize(args, first, args, others, warps, registers, **context)


@builtin
def _mma_v2(a, b, acc, _semantic=None):
    product = _semantic.dot(a, b, acc, None, None, acc.dtype)
    return gl.tensor(product.handle, acc.type)


# a b + acc by mma.sync, of operands in registers. 3.6 brought it.
mma_v2 = getattr(hopper, "mma_v2", _mma_v2)


ELEMENTS = {
    torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32,
    torch.float8_e4m3fn: gl.float8e4nv,
}  # fmt: skip


@functools.cache
def _box(dtype: torch.dtype, *shape: int):
    """(block shape, its shared-memory layout): 128-byte swizzle, none for one dimension."""
    return list(shape), gl.NVMMASharedLayout.get_default_for(list(shape), ELEMENTS[dtype])


class _Descriptor(TensorDescriptor):
    """A tensor descriptor of Gluon without its checks, as maps.Descriptor."""

    def __post_init__(self):
        pass


def tile_map(dtype: torch.dtype, shape, strides, *box: int) -> Map:
    """Returns the Map of tensors that a Gluon kernel moves in boxes."""
    return Map(shape, strides, *_box(dtype, *box), kind=_Descriptor)


def record(cls):
    """A Gluon aggregate whose constructor takes its fields in order (what 3.8 does by itself)."""
    names = tuple(cls.__annotations__)

    def __init__(self, *values):
        for name, value in zip(names, values):
            setattr(self, name, value)

    __init__.__triton_builtin__ = True  # the source hash then takes it as given
    cls.__init__ = __init__
    return _aggregate(cls)


@gluon.jit
def add(a, b):
    """The function with which scans combine two values."""
    return a + b


@gluon.jit
def rounded(x, DTYPE: gl.constexpr):
    """x.to(DTYPE), of 16 bits, two numbers an instruction: those that are needed in fp32 again
    would be rounded one by one, which takes as long as an exponential each."""
    if DTYPE == gl.bfloat16:
        low = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.bfloat16, is_pure=True, pack=2
        )
    else:
        low = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.float16, is_pure=True, pack=2
        )
    return low


@gluon.jit
def ring(desc, COUNT: gl.constexpr):
    """Shared memory for COUNT boxes of a descriptor."""
    return gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_type.shape, desc.layout)


@gluon.jit
def ring_barriers(COUNT: gl.constexpr, READERS: gl.constexpr):
    """(full, empty) mbarriers of a ring of COUNT slots, which one warp fills and READERS empty."""
    full = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return full, empty


@gluon.jit
def as_box(smem, desc):
    """Reinterprets a tile in shared memory as the box of a descriptor with more dimensions."""
    return as_tile(smem, desc.dtype, desc.block_type.shape, desc.layout)


@gluon.jit
def fence_async_global():
    """Orders this thread's generic accesses of global memory before those of TMA."""
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for_predecessor():
    """Waits until the kernel launched before this one has finished and its writes are visible
    (Triton's gdc_wait)."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def launch_dependents():
    """Lets the next kernel begin, once all CTAs of this one have said so."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
