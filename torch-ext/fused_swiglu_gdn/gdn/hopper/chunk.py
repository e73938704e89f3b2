"""Gated DeltaNet prefill on Hopper: prepare, then the warp-specialised scan (docs/gdn_hopper.md).

Sizes: B batch, T tokens, H query/key heads, HV value heads, K = V = 128, N sequences, C = 64 tokens
a chunk.
"""

from typing import Optional

import torch

from ...runtime import device
from ...runtime.cache import CallCache
from ...runtime.dtypes import HALF
from ...runtime.launch import aligned
from ...runtime.workspace import Workspace
from ..call import GdnCall
from ..portable import prepare as portable
from .backward import gdn_chunk_bwd, supports_gdn_chunk_bwd  # noqa: F401
from .plan import HEAD_DIM, Prepare, Scan, reads_by_tma


def _dense_heads(state: Optional[torch.Tensor]) -> bool:
    """True if the heads of each row of a state or pool are contiguous; rows may have any stride."""
    return state is None or state.stride()[1:] == (HEAD_DIM * HEAD_DIM, HEAD_DIM, 1)


def supports_gdn_chunk_fwd(call: GdnCall) -> bool:
    """True for fp16 or bf16, K = V = 128, at least one token and tensors that TMA can address."""
    return (
        device.has_wgmma(call.device)
        and call.q.dtype in HALF
        and call.q.dtype == call.k.dtype == call.v.dtype
        and call.K == call.V == HEAD_DIM
        and 0 < call.B * call.T < 2**30
        and (call.cu_seqlens is None or call.N > 0)
        and all(reads_by_tma(x) for x in (call.q, call.k, call.v))
        and _dense_heads(call.initial_state)
    )


def gdn_chunk_fwd(call: GdnCall) -> tuple:
    """o [B, T, HV, V]; the final state, the pool or None; checkpoints or None; Tb, P, F or None."""
    return _chunked(call)(*call.tensors)


def plan_gdn_chunk_fwd(call: GdnCall):
    """Returns gdn_chunk_fwd as a function of the ten tensors for all calls that match this one."""
    kept, options = _chunked(call), call.options

    def run(q, k, v, *rest):
        if aligned(q, k, v):
            return kept(q, k, v, *rest)
        tokens = (x if reads_by_tma(x) else x.clone() for x in (q, k, v))
        return gdn_chunk_fwd(GdnCall(*tokens, *rest, options))

    return run


_kept = CallCache()


def _chunked(call: GdnCall) -> "_Chunked":
    """Returns the cached _Chunked of calls that match this one, or makes it."""
    key = (call.tensors, call.options)
    return _kept.find(*key) or _kept.keep(*key, _Chunked(call))


class _Chunked:
    """The launches of gdn_chunk_fwd for all calls with the same shapes, strides, dtypes and
    options."""

    __slots__ = ("prepare", "scan", "saves", "workspace")

    def __init__(self, call: GdnCall):
        own = Prepare.serves(call)
        self.prepare = Prepare(call) if own else portable.Prepare(call)
        self.scan, self.saves = Scan(call), call.options.save_blocks
        self.workspace = None
        if own and not self.saves:
            arrays = self.prepare.arrays(call.q.dtype)
            self.workspace = Workspace(*arrays, (self.scan.warm, torch.float32))

    def __call__(
        self, q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, cu_seqlens
    ) -> tuple:
        inputs = (q, k, g, beta, A_log, dt_bias, cu_seqlens)
        saved = None
        with device.on(q.device):
            if self.workspace is not None:
                memory, (*blocks, warm) = self.workspace(q)
                self.prepare.launch(*inputs, blocks)
            else:
                blocks = self.prepare(*inputs)
                *saved, decay = blocks
                warm = decay.new_empty(self.scan.warm)
            results = self.scan(q, k, v, blocks, warm, initial_state, state_indices, cu_seqlens)
        return (*results, tuple(saved) if self.saves else None)
