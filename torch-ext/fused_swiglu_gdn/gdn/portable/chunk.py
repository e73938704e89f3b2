"""Chunked gated delta rule for every chip: prepare, then scan (docs/gdn.md). Holds no kernel."""

from typing import Optional

import torch

from ...runtime import device
from ...runtime.launch import aligned, steps
from ...runtime.tuning import lookup
from ..chunks import CHUNK
from .backward import gdn_chunk_bwd, supports_gdn_chunk_bwd  # noqa: F401
from .context import Carry
from .cuts import FEWEST, WHOLE, tokens_at_cut
from .prepare import gdn_prepare
from .scan import Scan

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def supports_gdn_chunk_fwd(q, k, v, *_) -> bool:
    """Head dims up to 256; fp16, bf16 and fp32."""
    return q.dtype in _DTYPES and max(q.shape[-1], v.shape[-1]) <= 256


def _kind(*inputs: torch.Tensor) -> str:
    """Which configurations of configs/ a call takes.

    "": a loop that loads ahead, which needs rows that can be copied in pieces of 16 bytes and a
    state of at most 128 rows. "_plain": any rows and sizes. "_fp32": three products for each.
    """
    if inputs[0].dtype == torch.float32:
        return "_fp32"
    for x in inputs:
        if x.shape[-1] > 128 or x.data_ptr() % 16 or any(n % 16 for n in (x.shape[-1], *steps(x))):
            return "_plain"  # Triton takes no step for a multiple of 8 that is none of 16
    return ""


def supports_gdn_prepare(q, *_) -> bool:
    return q.shape[-1] <= 256 and q.dtype in _DTYPES


def gdn_chunk_fwd(
    q: torch.Tensor,  # [B, T, H, K]
    k: torch.Tensor,  # [B, T, H, K]
    v: torch.Tensor,  # [B, T, HV, V]
    g: torch.Tensor,  # [B, T, HV], natural-log decay, or the raw a when A_log is given
    beta: torch.Tensor,  # [B, T, HV]
    A_log: Optional[torch.Tensor],  # [HV]
    dt_bias: Optional[torch.Tensor],  # [HV]
    initial_state: Optional[torch.Tensor],  # [N | pool, HV, K, V] or [.., V, K]
    state_indices: Optional[torch.Tensor],  # [N]
    cu_seqlens: Optional[torch.Tensor],  # [N + 1]
    scale: float,
    use_qk_l2norm: bool,
    use_beta_sigmoid: bool,
    allow_neg_eigval: bool,
    state_v_first: bool,
    output_final_state: bool,
    state_dtype: Optional[torch.dtype],
    checkpoint_every: int,
    prepared: Optional[tuple] = None,  # what gdn_prepare gives, where the caller has it
):
    """o [B, T, HV, V], the final state or None, the checkpoints or None."""
    tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, cu_seqlens)
    call = _Call(
        *tensors, scale, use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval, state_v_first,
        output_final_state, state_dtype, checkpoint_every,
    )  # fmt: skip
    return call(*tensors, prepared)


def plan_gdn_chunk_fwd(*args):
    """gdn_chunk_fwd for all calls like this one, from their ten tensors."""
    if not aligned(*args[:3]):
        return None
    call, options = _Call(*args), args[10:]

    def run(*tensors):
        return call(*tensors) if aligned(*tensors[:3]) else gdn_chunk_fwd(*tensors, *options)

    return run


class _Call:
    """gdn_chunk_fwd for calls of one kind: shapes, strides, dtypes and options are known."""

    __slots__ = ("options", "final", "checkpoints", "rest", "carry", "scan")

    def __init__(self, *args):
        q, k, v, *_, initial_state, state_indices, cu_seqlens = args[:10]
        self.options, rest = args[10:14], args[14:]
        state_v_first, output_final_state, state_dtype, checkpoint_every = rest
        (B, T, _, K), (HV, V) = q.shape, v.shape[2:]
        N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        dtype = torch.float32 if state_dtype is None else state_dtype
        tail = (HV, V, K) if state_v_first else (HV, K, V)
        self.final = self.checkpoints = self.carry = self.scan = None
        if output_final_state and state_indices is None:
            self.final = {"size": (N, *tail), "dtype": dtype}
        if checkpoint_every:
            self.checkpoints = {"size": (B * (T // checkpoint_every), *tail), "dtype": dtype}
        kind = _kind(q, k, v)
        context, segment = lookup("portable_gdn_context", v.device), (WHOLE, WHOLE)
        behind = tokens_at_cut(K, V, v.element_size())
        # more heads fill the GPU with longer segments, of which fewer must be found first
        shortest = max(context["shortest"], HV, -(-behind // CHUNK))
        cut = HV <= context["heads"] and T >= FEWEST * shortest * CHUNK
        if cut and behind > 0 and kind != "_plain" and max(K, V) <= 128:
            segment = shortest, context["longest"]
            self.carry = Carry(
                k, v, initial_state, state_indices, cu_seqlens, state_v_first, segment, kind,
                context[f"transition{kind}"], context["carry"],
            )  # fmt: skip
        behind = 0 if self.carry is None else behind
        self.rest = (state_v_first, checkpoint_every, segment, behind, kind)

    def __call__(
        self, q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, cu_seqlens,
        prepared=None,
    ):  # fmt: skip
        with device.on(v.device):
            return self._run(
                q, k, v, (g, beta, A_log, dt_bias), initial_state, state_indices, cu_seqlens,
                prepared,
            )  # fmt: skip

    def _run(self, q, k, v, gates, initial_state, state_indices, cu_seqlens, prepared):
        if prepared is None:
            prepared = gdn_prepare(q, k, *gates, cu_seqlens, *self.options)
        tb, p, f, *decay = prepared
        final = None if state_indices is None else initial_state
        checkpoints = None
        o = v.new_empty(v.shape)
        if self.carry is not None:
            self.carry(k, v, tb, f, *decay, o, initial_state, state_indices, cu_seqlens)
        if self.final is not None:
            final = v.new_empty(**self.final)
        if self.checkpoints is not None:
            checkpoints = v.new_empty(**self.checkpoints)
        states = (initial_state, state_indices, final, checkpoints)
        if self.scan is None:
            self.scan = Scan(q, k, v, cu_seqlens, states, *self.rest)
        self.scan((q, k, v, o), (tb, p, f), cu_seqlens, states)
        return o, final, checkpoints
