"""Gated DeltaNet prefill on Hopper: prepare, then the warp-specialised scan (docs/gdn_hopper.md).

Sizes: B batch, T tokens, H query/key heads, HV value heads, K = V = 128, N sequences, C = 64 tokens
a chunk.
"""

import functools
from typing import Callable, Optional

import torch

from ...runtime import device
from ...runtime.copies import on_dense
from ...runtime.workspace import Workspace
from ..call import GdnCall
from ..portable.primitives import on_read
from .backward import prepare_gdn_chunk_bwd  # noqa: F401
from .plan import HEAD_DIM, Prepare, Scan, computes, lies_for_tma, prepare_of


def dense_heads(state: Optional[torch.Tensor]) -> bool:
    """True if the heads of each row of a state or pool are contiguous; rows may have any stride."""
    return state is None or state.stride()[1:] == (HEAD_DIM * HEAD_DIM, HEAD_DIM, 1)


def prepare_gdn_chunk_fwd(call: GdnCall) -> Optional[Callable]:
    """The function that prepare_gdn_chunk_fwd of portable/chunk.py describes, by these kernels.

    For fp16 or bf16, K = V = 128, at least one token and head and strides that TMA can address.
    """
    return on_dense(functools.partial(prompts, _Chunked), call, "g", "beta", "initial_state")


def prompts(kind: Callable, call) -> Optional[Callable]:
    """kind(call) as on_read has it, or None for layouts of tokens and states that are not read."""
    fits = computes(call) and dense_heads(call.initial_state) and all(map(lies_for_tma, call[:3]))
    return on_read(kind, call, 0, 1, 2, lies=lies_for_tma) if fits else None


class Halves:
    """The launches of both halves, for all calls with the same shapes, strides, dtypes and
    options."""

    __slots__ = ("prepare", "scan", "saves", "workspace")

    def __init__(self, call, scan: Scan):
        self.prepare = prepare_of(call)
        self.scan, self.saves = scan, call.options.save_blocks
        self.workspace = None
        if isinstance(self.prepare, Prepare) and not self.saves:
            arrays = self.prepare.arrays(call.q.dtype)
            self.workspace = Workspace(*arrays, (self.scan.warm, torch.float32))

    def first(self, q, k, g, beta, A_log, dt_bias, cu_seqlens) -> tuple:
        """Launches the first half; returns its Tb, P, F and decay, the scan's words, those of the
        blocks that the call saves, or None for each, and what must live until all is launched."""
        gates = (g, beta, A_log, dt_bias, cu_seqlens)
        if self.workspace is not None:
            memory, (*blocks, warm) = self.workspace(q)
            tb, p, f, decay = blocks
            self.prepare.kernel(q, k, tb, p, *gates, f, decay)
            return blocks, warm, (None, None, None), memory
        blocks = self.prepare(q, k, *gates)
        saved = blocks[:3] if self.saves else (None, None, None)
        return blocks, blocks[3].new_empty(self.scan.warm), saved, None


class _Chunked(Halves):
    __slots__ = ()

    def __init__(self, call: GdnCall):
        super().__init__(call, Scan(call))

    def __call__(
        self, q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, cu_seqlens
    ) -> tuple:
        with device.on(q.device):
            blocks, warm, saved, memory = self.first(q, k, g, beta, A_log, dt_bias, cu_seqlens)
            results = self.scan(q, k, v, blocks, warm, initial_state, state_indices, cu_seqlens)
        return (*results, *saved)
