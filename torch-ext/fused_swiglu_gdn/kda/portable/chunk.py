"""Chunked Kimi Delta Attention for every chip: prepare, then scan (docs/kda.md)."""

from typing import Callable, Optional

import torch

from ...gdn.portable.chunk import NewStates, kind_of
from ...gdn.portable.cuts import WHOLE
from ...gdn.portable.primitives import are_served
from ...gdn.portable.scan import Scan
from ...runtime import device
from ...runtime.launch import by_alignment
from ..call import KdaCall
from .backward import prepare_kda_chunk_bwd  # noqa: F401
from .prepare import Prepare
from .recurrent import on_dense_gates


def prepare_kda_chunk_fwd(call: KdaCall) -> Optional[Callable]:
    """The call's tensors -> o [B, T, HV, V]; the final state, the pool or None; checkpoints or
    None.

    For the calls that are_served.
    """
    return on_dense_gates(_prepare, call, "initial_state") if are_served(call) else None


def _prepare(call: KdaCall) -> Callable:
    return by_alignment(Chunked, call, 0, 1, 2)


class Chunked:
    """The launches for all calls with the same shapes, strides, dtypes and options, and with q, k
    and v at multiples of 16 bytes as here."""

    __slots__ = ("states", "prepare", "scan")
    PREPARE = Prepare  # its kind

    def __init__(self, call: KdaCall):
        self.states, self.prepare = NewStates(call), self.PREPARE(call)
        # the scan reads Kd and Qd, which every value head has its own of
        shape = (call.B, call.T, call.HV, call.K)
        like = torch.empty(shape, dtype=call.q.dtype, device="meta")
        scanned = call._replace(q=like, k=like)
        kind = kind_of(call._replace(q=call.v, k=call.v))  # Kd, Qd and Ke begin where memory does
        if kind == "" and (call.K > 128 or call.K % 16):
            kind = "_plain"
        self.scan = Scan(scanned, self.states.like, (WHOLE, WHOLE), 0, kind)

    def __call__(
        self, q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, cu_seqlens
    ) -> tuple:
        with device.on(v.device):
            prepared = self.prepare(q, k, g, beta, A_log, dt_bias, cu_seqlens)
            tb, p, kd, qd, ke, gam, _, _, *decay = prepared
            o = v.new_empty(v.shape)
            final, checkpoints = self.states(v, initial_state, state_indices)
            states = (initial_state, state_indices, final, checkpoints)
            self.scan((qd, kd, v, o), (tb, p, gam), cu_seqlens, states, ke, *decay)
        return o, final, checkpoints
