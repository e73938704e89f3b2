"""One token of a Gated DeltaNet layer between its projections, in two launches.

    q, k, v = silu(conv([q, k, v]))        the convolution's state moves on by a token
    S = exp(g) (I - beta k k^T) S + beta k v^T        o = scale * S^T q        k, q normalised
    y = weight * o / sqrt(mean(o^2) + eps) * act(z)

Sizes: B rows, H and HV heads, K and V head dims, D = 2 H K + HV V channels, W taps, S columns.
"""

from typing import Dict, Optional, Tuple

import torch
import triton
import triton.language as tl

from .. import device, tuning
from ..common.gates import log_decay, write_strength
from ..common.launch import Program
from .causal_conv1d import served
from .causal_conv1d_update import update_tile
from .gdn_delta import key_norms, load, read_step, store, write_step
from .gdn_layer_prologue import channel_block, head_row
from .gdn_recurrent_step import is_dense
from .rms_norm_gated import gate_activation


def supports_gdn_layer_decode(
    q, k, v, z, a, b, conv_state, state, weight, bias, activation, A_log, dt_bias, norm_weight, eps,
    gate_activation, allow_neg_eigval,
) -> bool:  # fmt: skip
    K, V = q.shape[3], v.shape[3]
    return (
        served(q, k, v, z, a, b, conv_state, state, weight, bias, norm_weight)
        and all(x.shape[1] == 1 and x.stride(-1) == 1 for x in (q, k, v, z, a, b))
        and channel_block(K, V) >= 16
        and max(K, V) <= 256
        and is_dense(state)
    )


@triton.jit
def _conv_step_kernel(
    q_ptr,  # [B, H, K]
    k_ptr,  # [B, H, K]
    v_ptr,  # [B, HV, V]
    state_ptr,  # [B, D, S]
    weight_ptr,  # [D, W]
    bias_ptr,  # [D] or None
    y_ptr,  # [B, D] fp32
    strides,  # of B, T and a head in q, k, v
    state_strides,  # of B, D, S
    S: tl.constexpr,
    HK: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A program makes BLOCK_D channels of one head."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    b = (pid // (D // BLOCK_D)).to(tl.int64)
    d0 = (pid % (D // BLOCK_D)) * BLOCK_D
    local = tl.arange(0, BLOCK_D)
    x_row, _ = head_row(q_ptr, k_ptr, v_ptr, strides, b, d0, HK, K, V)
    offs_d = d0 + local
    at_d = offs_d.to(tl.int64)
    update_tile(
        x_row + local, y_ptr + b * D + offs_d,
        state_ptr + b * state_strides[0] + at_d * state_strides[1], weight_ptr, bias_ptr, 1, 1,
        state_strides[2], offs_d, offs_d < D, 1, S, W, SILU, True, BLOCK_S,
    )  # fmt: skip


@triton.jit
def _gated_step_kernel(
    qkv_ptr,  # [B, D] fp32
    z_ptr,  # [B, HV, V]
    a_ptr,  # [B, HV]
    b_ptr,  # [B, HV]
    A_log_ptr,  # [HV]
    dt_bias_ptr,  # [HV] or None
    state_ptr,  # [B, HV, K, V]
    norm_ptr,  # [V]
    y_ptr,  # [B, HV, V]
    strides,  # of a row and a head in z, a row in a, b, a row of the states
    scale,
    eps,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BETA_SCALE: tl.constexpr,
    SILU: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    RELOAD: tl.constexpr,
):
    """A program takes one head of one row: its whole state, so that it can norm what it read."""
    pid = tl.program_id(0)
    row = (pid // HV).to(tl.int64)
    hv = pid % HV
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = tl.arange(0, BLOCK_V)
    mask_k = offs_k < K
    mask_v = offs_v < V
    state_ptrs = state_ptr + row * strides[4] + hv * (K * V) + offs_k[:, None] * V + offs_v[None, :]
    mask = None
    if BLOCK_K != K or BLOCK_V != V:
        mask = mask_k[:, None] & mask_v[None, :]
    # the state, the gates and z were there before the convolution began
    S = load(state_ptrs, mask)  # [BLOCK_K, BLOCK_V] fp32
    z = tl.load(z_ptr + row * strides[0] + hv * strides[1] + offs_v, mask=mask_v, other=0.0)
    norm = tl.load(norm_ptr + offs_v, mask=mask_v, other=0.0).to(tl.float32)
    g = log_decay(tl.load(a_ptr + row * strides[2] + hv), A_log_ptr, dt_bias_ptr, hv)
    beta = write_strength(tl.load(b_ptr + row * strides[3] + hv), BETA_SCALE)
    if PDL:
        tl.extra.cuda.gdc_wait()
    D: tl.constexpr = 2 * H * K + HV * V
    q_at = qkv_ptr + row * D + (hv // (HV // H)) * K + offs_k
    q = tl.load(q_at, mask=mask_k, other=0.0).to(tl.float32)
    k = tl.load(q_at + H * K, mask=mask_k, other=0.0).to(tl.float32)
    v = tl.load(qkv_ptr + row * D + 2 * H * K + hv * V + offs_v, mask=mask_v, other=0.0)
    rstd_k, scale, kq = key_norms(q, k, scale, True)
    delta, o = read_step(S, q, k, v.to(tl.float32), g, beta, rstd_k, scale, kq, 0)
    rstd = tl.rsqrt(tl.sum(o * o, 0) / V + eps)
    y = norm * (o * rstd) * gate_activation(z.to(tl.float32), SILU)
    tl.store(y_ptr + (row * HV + hv) * V + offs_v, y.to(y_ptr.dtype.element_ty), mask=mask_v)
    if RELOAD:  # from the cache, so that registers hold less while more programs run
        S = load(state_ptrs, mask)
    store(state_ptrs, write_step(S, k, delta, g, 0), mask)


def _both_programs(
    q, k, v, z, a, b, conv_state, state, weight, activation, eps, gate_activation, allow_neg_eigval
) -> Tuple[Program, Program]:
    (B, _, H, K), (HV, V), (D, W) = q.shape, v.shape[2:], weight.shape
    block, S = channel_block(K, V), conv_state.shape[2]
    pdl = device.overlaps_launches(q.device)
    config = tuning.lookup("portable_gdn_layer_decode", q.device, K=K)
    conv = Program(
        _conv_step_kernel,
        B * (D // block),
        ((*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]), conv_state.stride()),
        (
            S, H * K, K, V, D, W, activation is not None, pdl, triton.next_power_of_2(S), block,
        ),
        (("num_warps", 1),),
    )  # fmt: skip
    gated = Program(
        _gated_step_kernel,
        B * HV,
        (
            (z.stride(0), z.stride(2), a.stride(0), b.stride(0), state.stride(0)), K**-0.5,
            float(eps),
        ),
        (
            H, HV, K, V, 2.0 if allow_neg_eigval else 1.0, gate_activation != "sigmoid", pdl,
            triton.next_power_of_2(K), triton.next_power_of_2(V),
            config["RELOAD"],
        ),
        (("num_warps", config["num_warps"]),) + ((("launch_pdl", True),) if pdl else ()),
    )  # fmt: skip
    return conv, gated


_programs: Dict[tuple, Tuple[Program, Program]] = {}


def gdn_layer_decode(
    q: torch.Tensor,  # [B, 1, H, K], last dimension dense
    k: torch.Tensor,  # [B, 1, H, K]
    v: torch.Tensor,  # [B, 1, HV, V]
    z: torch.Tensor,  # [B, 1, HV, V]
    a: torch.Tensor,  # [B, 1, HV]
    b: torch.Tensor,  # [B, 1, HV]
    conv_state: torch.Tensor,  # [B, D, S], updated in place
    state: torch.Tensor,  # [B, HV, K, V], updated in place
    weight: torch.Tensor,  # [D, W]
    bias: Optional[torch.Tensor],  # [D]
    activation: Optional[str],
    A_log: torch.Tensor,  # [HV]
    dt_bias: Optional[torch.Tensor],  # [HV]
    norm_weight: torch.Tensor,  # [V]
    eps: float,
    gate_activation: str,
    allow_neg_eigval: bool,
) -> torch.Tensor:  # [B, 1, HV, V]
    """Two launches: the convolution, then rule and norm. Both states are updated in place."""
    y = torch.empty(v.shape, dtype=q.dtype, device=q.device)  # [B, 1, HV, V]
    # fp32: nothing is rounded between the two launches
    qkv = torch.empty((q.shape[0], weight.shape[0]), dtype=torch.float32, device=q.device)  # [B, D]
    tensors = (q, k, v, z, a, b, conv_state, state, weight)
    key = (
        *[x.shape for x in tensors], *[x.stride() for x in tensors], *[x.dtype for x in tensors],
        None if bias is None else bias.dtype, None if dt_bias is None else dt_bias.dtype,
        A_log.dtype, norm_weight.dtype, activation, eps, gate_activation, allow_neg_eigval,
        q.device,
    )  # fmt: skip
    programs = _programs.get(key)
    if programs is None:
        if len(_programs) >= 1024:
            _programs.clear()
        programs = _programs[key] = _both_programs(
            *tensors, activation, eps, gate_activation, allow_neg_eigval
        )
    if q.shape[0] == 0:
        return y
    with device.on(q.device):
        programs[0](q, k, v, conv_state, weight, bias, qkv)
        programs[1](qkv, z, a, b, A_log, dt_bias, state, norm_weight, y)
    return y
