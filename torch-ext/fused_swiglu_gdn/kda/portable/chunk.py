"""Chunked Kimi Delta Attention for every chip: prepare, then scan (docs/kda.md)."""

import torch

from ...gdn.portable.chunk import kind_of
from ...gdn.portable.cuts import WHOLE
from ...gdn.portable.scan import Scan
from ...runtime import device
from ...runtime.dtypes import SERVED
from ...runtime.launch import aligned
from ..call import KdaCall
from .backward import kda_chunk_bwd, supports_kda_chunk_bwd  # noqa: F401
from .prepare import Prepare
from .recurrent import together


def supports_kda_chunk_fwd(call: KdaCall) -> bool:
    """Head dims up to 256; fp16, bf16 and fp32; gates whose heads lie side by side."""
    dtypes = {call.q.dtype, call.g.dtype, call.beta.dtype}
    return dtypes.issubset(SERVED) and max(call.K, call.V) <= 256 and together(call.g)


def kda_chunk_fwd(call: KdaCall) -> tuple:
    """o [B, T, HV, V]; the final state, the pool or None; checkpoints or None; None."""
    return _Chunked(call)(*call.tensors)


def plan_kda_chunk_fwd(call: KdaCall):
    """kda_chunk_fwd for all calls like this one, from their ten tensors."""
    if not aligned(call.q, call.k, call.v):
        return None
    kept, options = _Chunked(call), call.options

    def run(q, k, v, *rest):
        if aligned(q, k, v):
            return kept(q, k, v, *rest)
        return kda_chunk_fwd(KdaCall(q, k, v, *rest, options))  # of another kind

    return run


class _Chunked:
    """kda_chunk_fwd for calls of one kind: shapes, strides, dtypes and options are known."""

    __slots__ = ("final", "checkpoints", "prepare", "scan")

    def __init__(self, call: KdaCall):
        options = call.options
        dtype = torch.float32 if options.state_dtype is None else options.state_dtype
        self.final = self.checkpoints = final = None
        if call.state_indices is not None:
            final = call.initial_state
        elif options.output_final_state:
            self.final = {"size": (call.N, *call.state_shape), "dtype": dtype}
            final = torch.empty(self.final["size"], device="meta")
        if options.checkpoint_every:
            rows = call.B * (call.T // options.checkpoint_every)
            self.checkpoints = {"size": (rows, *call.state_shape), "dtype": dtype}
        self.prepare = Prepare(call)
        # the scan reads Kd and Qd, which every value head has its own of
        shape = (call.B, call.T, call.HV, call.K)
        like = torch.empty(shape, dtype=call.q.dtype, device="meta")
        scanned = call._replace(q=like, k=like)
        kind = kind_of(call._replace(q=call.v, k=call.v))  # Kd, Qd and Ke begin where memory does
        if kind == "" and (call.K > 128 or call.K % 16):
            kind = "_plain"
        self.scan = Scan(scanned, final, (WHOLE, WHOLE), 0, kind)

    def __call__(
        self, q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, cu_seqlens
    ) -> tuple:
        with device.on(v.device):
            tb, p, kd, qd, ke, gam, *_ = self.prepare(q, k, g, beta, A_log, dt_bias, cu_seqlens)
            final = None if state_indices is None else initial_state
            checkpoints = None
            o = v.new_empty(v.shape)
            if self.final is not None:
                final = v.new_empty(**self.final)
            if self.checkpoints is not None:
                checkpoints = v.new_empty(**self.checkpoints)
            states = (initial_state, state_indices, final, checkpoints)
            self.scan((qd, kd, v, o), (tb, p, gam), cu_seqlens, states, ke)
        return o, final, checkpoints, None
