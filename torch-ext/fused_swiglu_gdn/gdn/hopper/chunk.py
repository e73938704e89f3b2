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


class _Chunked:
    """The launches for all calls with the same shapes, strides, dtypes and options."""

    __slots__ = ("prepare", "scan", "saves", "workspace")

    def __init__(self, call: GdnCall):
        self.prepare = prepare_of(call)
        self.scan, self.saves = Scan(call), call.options.save_blocks
        self.workspace = None
        if isinstance(self.prepare, Prepare) and not self.saves:
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
