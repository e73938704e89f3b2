"""Chunked Kimi Delta Attention on Hopper: prepare in one launch, then the scan (docs/kda.md)."""

from typing import Callable, Optional, Union

import torch

from ...gdn.chunks import CHUNK
from ...gdn.hopper.chunk import dense_heads
from ...gdn.hopper.plan import CAP, REGISTERS, block_map, lies_for_tma, token_map
from ...gdn.hopper.scan import gdn_scan_fwd_kernel
from ...runtime import device
from ...runtime.dtypes import HALF, SERVED
from ...runtime.gluon import tile_map
from ...runtime.launch import Launch, aligned, by_alignment, steps
from ..call import KdaBackward, KdaCall
from ..portable import backward
from ..portable import chunk as portable
from ..portable.recurrent import on_dense_gates
from .prepare import kda_prepare_fwd_kernel

HEAD_DIM = 128
PREPARE_CAP = 168  # registers of a thread of prepare: three programs a multiprocessor


class Prepare:
    """The launch of prepare for calls of one kind: shapes, strides, dtypes and options are
    known."""

    __slots__ = ("kernel", "rows", "shape", "keep")

    def __init__(self, call: Union[KdaCall, KdaBackward], keep: bool = False):
        """keep: for the gradient."""
        q, k, H, HV, options = call.q, call.k, call.H, call.HV, call.options
        self.rows, self.shape, self.keep = call.rows, (call.B, call.T, HV, call.K), keep
        packed, block = call.cu_seqlens is not None, block_map(self.rows * HV, q.dtype)
        tokens = (token_map(x.shape, x.stride(), x.dtype, 32, packed) for x in (q, k, call.g))
        kept = block_map(self.rows * HV, torch.float16) if keep else None
        chunks = (call.T, call.N, -(-call.T // CHUNK))
        self.kernel = Launch(
            kda_prepare_fwd_kernel, self.rows * HV, q.device, maps=(*tokens, block, block, kept),
            numbers=(steps(call.beta), *chunks, options.scale),
            constexprs=(HV, HV // H, options.beta_max, options.lower_bound),
            options=(("num_warps", 4), ("maxnreg", PREPARE_CAP)), guarded=True,
        )  # fmt: skip

    def __call__(self, q, k, g, beta, A_log, dt_bias, cu_seqlens) -> tuple:
        """Tb, P [rows, HV, C, C]; Kd, Qd, Ke [B, T, HV, K]; gam [rows, HV, K] fp32; and with `keep`
        what the portable Prepare returns behind them."""
        rows, (*_, HV, K) = self.rows, self.shape
        tb, p = q.new_empty((2, rows, HV, CHUNK, CHUNK)).unbind(0)
        kd, qd, ke = q.new_empty((3, *self.shape)).unbind(0)
        gam = g.new_empty((rows, HV, K), dtype=torch.float32)
        factors = kept = None
        if self.keep:
            kept = tb.new_empty(tb.shape, dtype=torch.float16)
            factors = gam.new_empty((rows, HV, 3, CHUNK))
        inputs = (q, k, g, tb, p, kept, beta, A_log, dt_bias, cu_seqlens)
        self.kernel(*inputs, kd, qd, ke, gam, factors)
        return tb, p, kd, qd, ke, gam, factors, kept


def computes(call: Union[KdaCall, KdaBackward]) -> bool:
    """True for calls whose prepare this kernel computes, if q, k and g begin at multiples of 16
    bytes: with keys of length 1, whose products fit fp16."""
    return (
        device.has_wgmma(call.device)
        and call.options.use_qk_l2norm
        and call.q.dtype in HALF
        and call.q.dtype == call.k.dtype == call.v.dtype
        and call.K == HEAD_DIM
        and call.HV > 0
        and 0 < call.B * call.T < 2**30
        and (call.cu_seqlens is None or call.N > 0)
        and all(map(lies_for_tma, (call.q, call.k, call.g)))
    )


def prepare_kda_chunk_fwd(call: KdaCall) -> Optional[Callable]:
    """The function that prepare_kda_chunk_fwd of portable/chunk.py describes, with the prepare
    above; None for other calls."""
    if {call.g.dtype, call.beta.dtype}.issubset(SERVED) and call.V <= 256:
        return on_dense_gates(_prepare, call, "initial_state")
    return None


def _prepare(call: KdaCall) -> Optional[Callable]:
    return by_alignment(_made, call, 0, 1, 2, 3) if computes(call) else None


def _made(call: KdaCall) -> Callable:
    return (Chunked if aligned(*call[:4]) else portable.Chunked)(call)


def prepare_kda_chunk_bwd(call: KdaBackward) -> Optional[Callable]:
    """The function that prepare_kda_chunk_bwd of portable/backward.py describes, with the prepare
    above; None for other calls."""
    return backward.prepare_kda_chunk_bwd(call, _prepare_kind) if computes(call) else None


def _prepare_kind(call: KdaBackward) -> type:
    return Prepare if aligned(call.q, call.k, call.g) else portable.Prepare


class Scan:
    """The launch of the gated delta rule's scan for calls of one kind, one state warpgroup a CTA.

    No sequence is cut: what a chunk's transition keeps has no bound that is close for gates that
    differ between channels.
    """

    __slots__ = ("kernel",)

    def __init__(self, call: KdaCall):
        v, N, HV, options, dtype = call.v, call.N, call.HV, call.options, call.v.dtype
        units, packed = call.rows * HV, call.cu_seqlens is not None
        size = (call.B, call.T, HV, HEAD_DIM)
        dense = (call.T * HV * HEAD_DIM, HV * HEAD_DIM, HEAD_DIM, 1)
        operand, block = token_map(size, dense, dtype, HEAD_DIM, packed), block_map(units, dtype)
        maps = (
            operand, operand, token_map(v.shape, v.stride(), dtype, 64, packed),
            token_map(size, dense, dtype, 64, packed), block, block,
            tile_map(torch.float32, (units * HEAD_DIM,), (1,), HEAD_DIM), operand,
        )  # fmt: skip
        pool_step = 0 if call.initial_state is None else call.initial_state.stride(0)
        every = max(options.checkpoint_every // CHUNK, 1)
        in_place = call.state_indices is not None
        self.kernel = Launch(
            gdn_scan_fwd_kernel, N * HV * 2, v.device, maps=maps,
            numbers=(call.T, HV, HV, N, every, 1, pool_step, 0),
            constexprs=(in_place, 1, options.state_v_first, *REGISTERS[1], False),
            options=(("num_warps", 4), ("maxnreg", CAP[1]), ("launch_pdl", True)), guarded=True,
        )  # fmt: skip

    @staticmethod
    def serves(call: KdaCall) -> bool:
        """True for values of 128 channels that TMA can read, at multiples of 16 bytes."""
        return call.V == HEAD_DIM and lies_for_tma(call.v) and dense_heads(call.initial_state)

    def __call__(self, tokens, blocks, cu_seqlens, states, k_end) -> None:
        """The arguments of gdn/portable/scan.py's Scan, with Ke."""
        initial_state, state_indices, final, checkpoints = states
        rest = (state_indices, cu_seqlens, None, None, tokens[3])
        self.kernel(*tokens, *blocks, k_end, initial_state, final, checkpoints, *rest)


class Chunked(portable.Chunked):
    """portable.Chunked with the prepare above, and the scan where it serves."""

    __slots__ = ()
    PREPARE = Prepare

    def __init__(self, call: KdaCall):
        super().__init__(call)
        if Scan.serves(call):
            self.scan = Scan(call)
