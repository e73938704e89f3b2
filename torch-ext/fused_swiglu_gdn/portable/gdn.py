"""Chunked gated delta rule for every chip: prepare, then scan (docs/gdn.md). Holds no kernel."""

from typing import Optional

import torch

from ..common.gdn_prepare import CHUNK, gdn_prepare
from ..common.launch import steps
from ..tuning import lookup
from .gdn_backward import gdn_chunk_bwd, supports_gdn_chunk_bwd  # noqa: F401
from .gdn_context import gdn_carry
from .gdn_scan import gdn_scan

WHOLE = 1 << 24  # chunks in a segment that no sequence fills
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
    B, T, _, K = q.shape
    HV, V = v.shape[2:]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dtype = torch.float32 if state_dtype is None else state_dtype
    tail = (HV, V, K) if state_v_first else (HV, K, V)
    final_state, checkpoints = None, None
    if state_indices is not None:
        final_state = initial_state
    elif output_final_state:
        final_state = torch.empty((N,) + tail, dtype=dtype, device=v.device)
    if checkpoint_every:
        rows = B * (T // checkpoint_every)
        checkpoints = torch.empty((rows,) + tail, dtype=dtype, device=v.device)
    prepared = prepared or gdn_prepare(
        q, k, g, beta, A_log, dt_bias, cu_seqlens, scale, use_qk_l2norm, use_beta_sigmoid,
        allow_neg_eigval,
    )  # fmt: skip
    blocks = prepared[:3]
    kind = _kind(q, k, v)
    context = lookup("portable_gdn_context", v.device)
    segment, carry = WHOLE, None
    long = HV <= context["heads"] and T > context["segment"] * CHUNK
    if long and kind != "_plain" and max(K, V) <= 128:
        segment = context["segment"]
        carry = gdn_carry(
            k, v, blocks[0], *prepared[2:4], initial_state, state_indices, cu_seqlens,
            state_v_first, segment, context[f"transition{kind}"], context["carry"],
        )  # fmt: skip
    o = gdn_scan(
        q, k, v, blocks, initial_state, final_state, state_indices, carry, checkpoints, cu_seqlens,
        state_v_first, checkpoint_every, segment, kind,
    )  # fmt: skip
    return o, final_state, checkpoints
