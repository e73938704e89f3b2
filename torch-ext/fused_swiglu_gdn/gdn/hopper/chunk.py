"""Gated DeltaNet prefill on Hopper: prepare, then the warp-specialised scan (docs/gdn_hopper.md).

Sizes: B batch, T tokens, H query/key heads, HV value heads, K = V = 128, N sequences, C = 64 tokens
a chunk.
"""

from typing import Callable, Optional

import torch

from ...runtime import device
from ...runtime.dtypes import HALF
from ...runtime.launch import aligned, by_alignment
from ...runtime.operation import on_copies, on_dense
from ...runtime.workspace import Workspace
from ..call import GdnCall
from ..portable import prepare as portable
from .backward import prepare_gdn_chunk_bwd  # noqa: F401
from .plan import HEAD_DIM, Prepare, Scan, lies_for_tma


def dense_heads(state: Optional[torch.Tensor]) -> bool:
    """True if the heads of each row of a state or pool are contiguous; rows may have any stride."""
    return state is None or state.stride()[1:] == (HEAD_DIM * HEAD_DIM, HEAD_DIM, 1)


def prepare_gdn_chunk_fwd(call: GdnCall) -> Optional[Callable]:
    """The function that prepare_gdn_chunk_fwd of portable/chunk.py describes, by these kernels.

    For fp16 or bf16, K = V = 128, at least one token and head and strides that TMA can address.
    """
    return on_dense(_prepare, call, "g", "beta", "initial_state")


def computes(call) -> bool:
    """True for calls that these kernels compute, if tokens begin at multiples of 16 bytes."""
    return (
        device.has_wgmma(call.device)
        and call.q.dtype in HALF
        and call.q.dtype == call.k.dtype == call.v.dtype
        and call.K == call.V == HEAD_DIM
        and call.HV > 0
        and 0 < call.B * call.T < 2**30
        and (call.cu_seqlens is None or call.N > 0)
        and all(lies_for_tma(x) for x in (call.q, call.k, call.v))
        and dense_heads(call.initial_state)
    )


def _prepare(call: GdnCall) -> Optional[Callable]:
    return by_alignment(_made, call, 0, 1, 2) if computes(call) else None


def _made(call: GdnCall) -> Callable:
    return _Chunked(call) if aligned(*call[:3]) else on_copies(_Chunked, call, copied)


def copied(q, k, v, *rest) -> tuple:
    return *[x.clone(memory_format=torch.contiguous_format) for x in (q, k, v)], *rest


class _Chunked:
    """The launches for all calls with the same shapes, strides, dtypes and options."""

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
        saved = (None, None, None)
        with device.on(q.device):
            if self.workspace is not None:
                memory, (*blocks, warm) = self.workspace(q)
                self.prepare.launch(*inputs, blocks)
            else:
                blocks = self.prepare(*inputs)
                *found, decay = blocks
                saved = found if self.saves else saved
                warm = decay.new_empty(self.scan.warm)
            results = self.scan(q, k, v, blocks, warm, initial_state, state_indices, cu_seqlens)
        return (*results, *saved)
