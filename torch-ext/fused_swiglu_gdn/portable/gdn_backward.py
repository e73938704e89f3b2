"""The gradient of the chunked gated delta rule for every chip (docs/gdn_backward.md).

Prepare (unless it was saved), both passes over the states in one launch, all chunks' gradients in
another, and dbeta where beta is next to nothing. No atomics: the same bits every run.
"""

from typing import Optional

import torch
import triton

from .. import tuning
from ..common.gdn_prepare import gdn_prepare
from .gdn_backward_beta import gdn_backward_beta
from .gdn_backward_gates import gdn_backward_gates
from .gdn_backward_key import gdn_backward_key
from .gdn_backward_query import gdn_backward_query
from .gdn_backward_states import gdn_backward_states

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def supports_gdn_chunk_bwd(q, k, v, *_) -> bool:
    """Head dims up to 256; fp16, bf16 and fp32."""
    return q.shape[-1] <= 256 and v.shape[-1] <= 256 and q.dtype in _DTYPES


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
    if do.stride(-1) != 1:
        do = do.contiguous()
    if prepared is None:
        prepared = gdn_prepare(q, k, g, beta, A_log, dt_bias, cu_seqlens, scale, *flags)
    tb, p, f = prepared[:3]
    K = triton.next_power_of_2(q.shape[3])
    config = tuning.lookup("portable_gdn_chunk_bwd", q.device, K=K, bytes=q.element_size())
    h, dh, vt, dv, d_initial = gdn_backward_states(
        q, k, v, do, tb, p, f, initial_state, d_final_state, cu_seqlens, state_v_first,
        config["states"],
    )  # fmt: skip
    if values_only:
        return None, None, dv, None, None, None, None, d_initial
    rows, HV = tb.shape[:2]
    NV = -(-v.shape[3] // config["query"]["BLOCK_V"])  # the blocks of both kernels of gradients
    cumulative = f.new_empty(rows, HV, 64)
    parts, ends = f.new_empty(rows, HV, NV, 8, 64), f.new_empty(rows, HV, NV)
    dq = gdn_backward_query(
        q, k, g, A_log, dt_bias, cu_seqlens, f, do, vt, h, cumulative, parts, scale, use_qk_l2norm,
        config["query"],
    )  # fmt: skip
    dk = gdn_backward_key(
        q, k, cu_seqlens, f, cumulative, do, vt, dv, h, dh, parts, ends, scale, use_qk_l2norm,
        config["key"],
    )  # fmt: skip
    dg, dbeta, dA_log, ddt_bias = gdn_backward_gates(
        g, beta, A_log, dt_bias, cu_seqlens, f, parts, ends, use_beta_sigmoid, allow_neg_eigval,
        config["gates"],
    )  # fmt: skip
    gdn_backward_beta(
        k, v, beta, cu_seqlens, p, f, cumulative, do, vt, dv, h, dh, dbeta, *flags, config["beta"]
    )
    return dq, dk, dv, dg, dbeta, dA_log, ddt_bias, d_initial
