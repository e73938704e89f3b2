"""The gradient of the chunked gated delta rule for every chip (docs/gdn_backward.md).

Prepare (unless the forward saved its blocks); both passes over the states in one launch; then all
chunks side by side: queries, keys, gates, and dbeta where beta is next to nothing. No atomics: the
same bits every run.
"""

from typing import Optional

import torch
import triton

from .. import device, tuning
from ..common.gdn_prepare import gdn_prepare
from .gdn_backward_beta import gdn_backward_beta
from .gdn_backward_gates import gdn_backward_gates
from .gdn_backward_key import gdn_backward_key
from .gdn_backward_query import gdn_backward_query
from .gdn_backward_states import gdn_backward_states

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def supports_gdn_chunk_bwd(q, k, v, *_) -> bool:
    """Head dims of 128 in fp16 and bf16, up to 128 in fp32.

    With others an illegal access was seen on an H200 (Triton 3.6.0, 2026-11-21; K = 64 with V = 128
    in fp16), so the reference serves them until that is understood.
    """
    K, V = q.shape[-1], v.shape[-1]
    if q.dtype == torch.float32:
        return max(K, V) <= 128
    return K == V == 128 and q.dtype in _DTYPES


def _config(q, v, cu_seqlens) -> dict:
    """Launch configurations of the phases."""
    K, size = triton.next_power_of_2(q.shape[3]), q.element_size()
    if K > 128 or size > 2:
        return tuning.lookup("portable_gdn_chunk_bwd_wide", q.device, K=K, bytes=size)
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return tuning.lookup("portable_gdn_chunk_bwd", q.device, units=N * v.shape[2])


def gdn_chunk_bwd(
    q: torch.Tensor,  # [B, T, H, K]
    k: torch.Tensor,  # [B, T, H, K]
    v: torch.Tensor,  # [B, T, HV, V]
    g: torch.Tensor,  # [B, T, HV], natural-log decay, or the raw a when A_log is given
    beta: torch.Tensor,  # [B, T, HV]
    A_log: Optional[torch.Tensor],  # [HV]
    dt_bias: Optional[torch.Tensor],  # [HV]
    initial_state: Optional[torch.Tensor],  # [N, HV, K, V]
    cu_seqlens: Optional[torch.Tensor],  # [N + 1]
    do: torch.Tensor,  # [B, T, HV, V]
    d_final_state: Optional[torch.Tensor],  # [N, HV, K, V]
    prepared: Optional[tuple],  # Tb, P, F of gdn_prepare, where the forward saved them
    scale: float,
    use_qk_l2norm: bool,
    use_beta_sigmoid: bool,
    allow_neg_eigval: bool,
    state_v_first: bool,
    values_only: bool,
):
    """dq, dk, dv, dg, dbeta, dA_log, ddt_bias, d_initial_state; None for what was not given.

    With values_only, only dv and d_initial_state.
    """
    flags = (use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval)
    q, k, v, do = (_near(x) for x in (q, k, v, do))
    config = _config(q, v, cu_seqlens)
    with device.on(q.device):
        if prepared is None:
            prepared = gdn_prepare(q, k, g, beta, A_log, dt_bias, cu_seqlens, scale, *flags)
        h, dh, vt, dv, d_initial = gdn_backward_states(
            q, k, v, do, *prepared[:3], initial_state, d_final_state, cu_seqlens, state_v_first,
            config["states"],
        )  # fmt: skip
        if values_only:
            return None, None, dv, None, None, None, None, d_initial
        dq, dk, *gates = _chunk_gradients(
            q, k, v, g, beta, A_log, dt_bias, cu_seqlens, do, prepared, h, dh, vt, dv, scale, flags,
            config,
        )  # fmt: skip
    return dq, dk, dv, *gates, d_initial


def _near(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy where kernels could not reach across a chunk of it with 32 bits."""
    return x if x.stride(-1) == 1 and x.stride(1) < 2**25 else x.contiguous()


def _chunk_gradients(
    q, k, v, g, beta, A_log, dt_bias, cu_seqlens, do, prepared, h, dh, vt, dv, scale, flags, config
):
    """dq, dk, dg, dbeta, dA_log and ddt_bias: what each chunk gives by itself."""
    _, p, f = prepared[:3]
    rows, HV = p.shape[:2]
    NQ, NK = (-(-v.shape[3] // config[side]["BLOCK_V"]) for side in ("query", "key"))
    cumulative = f.new_empty(rows, HV, 64)
    by_query = f.new_empty(rows, HV, NQ, 8, 64)
    by_key, ends = f.new_empty(rows, HV, NK, 8, 64), f.new_empty(rows, HV, NK)
    dq = gdn_backward_query(
        q, k, g, A_log, dt_bias, cu_seqlens, f, do, vt, h, cumulative, by_query, scale, flags[0],
        config["query"],
    )  # fmt: skip
    dk = gdn_backward_key(
        q, k, cu_seqlens, f, cumulative, do, vt, dv, h, dh, by_key, ends, scale, flags[0],
        config["key"],
    )  # fmt: skip
    dg, dbeta, dA_log, ddt_bias = gdn_backward_gates(
        g, beta, A_log, dt_bias, cu_seqlens, f, by_query, by_key, ends, *flags[1:], q.dtype,
        config["gates"],
    )  # fmt: skip
    gdn_backward_beta(
        k, v, beta, cu_seqlens, p, f, cumulative, do, vt, dv, h, dh, dbeta, *flags, config["beta"]
    )
    return dq, dk, dg, dbeta, dA_log, ddt_bias
