"""One token of a Gated DeltaNet layer between its projections, in two launches.

    q, k, v = silu(conv([q, k, v]))        the convolution's state moves on by a token
    S = exp(g) (I - beta k k^T) S + beta k v^T        o = scale * S^T q        k, q normalised
    y = weight * o / sqrt(mean(o^2) + eps) * act(z)

Sizes: B rows, H and HV heads, R = HV / H, K and V head dims, D = 2 H K + HV V channels, W taps,
S columns.
"""

from typing import Dict, Optional

import torch
import triton
import triton.language as tl

from .. import device, tuning
from ..common.gates import log_decay, write_strength
from ..common.launch import Program
from ..facts import facts, keep
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
    K, V = q.shape[3], v.shape[-1]
    return (
        served(q, k, v, z, a, b, conv_state, state, weight, bias, norm_weight)
        and all(x.shape[1] == 1 and x.stride(-1) == 1 for x in (q, k, v, z, a, b))
        and (v.ndim == 4 or v.stride(3) == V)  # heads of a group side by side
        and channel_block(K, V) >= 16
        and max(K, V) <= 256
        and is_dense(state)
        and weight.is_contiguous()
    )


@triton.jit
def _conv_step_kernel(
    q_ptr,  # [B, H, K]
    k_ptr,  # [B, H, K]
    v_ptr,  # [B, H, R * V] or [B, HV, V]
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
    z_ptr,  # [B, H, R, V]
    a_ptr,  # [B, H, R]
    b_ptr,  # [B, H, R]
    A_log_ptr,  # [HV]
    dt_bias_ptr,  # [HV] or None
    state_ptr,  # [B, HV, K, V]
    norm_ptr,  # [V]
    y_ptr,  # [B, HV, V]
    strides,  # of a row, a group, a head in z; a row, a group in a and in b; a row of the states
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
    group = hv // (HV // H)
    member = hv % (HV // H)
    state_ptrs = state_ptr + row * strides[7] + hv * (K * V) + offs_k[:, None] * V + offs_v[None, :]
    mask = None
    if BLOCK_K != K or BLOCK_V != V:
        mask = mask_k[:, None] & mask_v[None, :]
    # the state, the gates and z were there before the convolution began
    S = load(state_ptrs, mask)  # [BLOCK_K, BLOCK_V] fp32
    z_row = z_ptr + row * strides[0] + group * strides[1] + member * strides[2]
    z = tl.load(z_row + offs_v, mask=mask_v, other=0.0)
    norm = tl.load(norm_ptr + offs_v, mask=mask_v, other=0.0).to(tl.float32)
    a = tl.load(a_ptr + row * strides[3] + group * strides[4] + member)
    g = log_decay(a, A_log_ptr, dt_bias_ptr, hv)
    b = tl.load(b_ptr + row * strides[5] + group * strides[6] + member)
    beta = write_strength(b, BETA_SCALE)
    if PDL:
        tl.extra.cuda.gdc_wait()
    D: tl.constexpr = 2 * H * K + HV * V
    q_at = qkv_ptr + row * D + group * K + offs_k
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


def _grouped(x: torch.Tensor, R: int, last: int) -> tuple:
    """Strides of a row, a group and a head in x, [B, 1, HV, ..] or [B, 1, H, R, ..] alike."""
    row, head = x.stride(0), x.stride(-1 - last)
    return (row, x.stride(2) if x.ndim == 4 + last else R * head, head)


class Step:
    """A token of a layer, for all calls of a kind: the facts of the arguments below."""

    __slots__ = ("conv", "gated", "device", "rows", "out")

    def __init__(
        self, q, k, v, z, a, b, conv_state, state, weight, activation, eps, gate_activation,
        allow_neg_eigval,
    ):  # fmt: skip
        (B, _, H, K), (D, W), V = q.shape, weight.shape, v.shape[-1]
        HV, S = state.shape[1], conv_state.shape[2]
        self.device, self.rows, self.out = q.device, (B, D), (B, 1, HV, V)
        wide = v.shape[3:].numel()  # channels of v that lie side by side
        block = channel_block(K, wide)
        pdl = device.overlaps_launches(q.device)
        config = tuning.lookup("portable_gdn_layer_decode", q.device, K=K)
        self.conv = Program(
            _conv_step_kernel,
            B * (D // block),
            ((*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]), conv_state.stride()),
            (
                S, H * K, K, wide, D, W, activation is not None, pdl, triton.next_power_of_2(S),
                block,
            ),
            (("num_warps", 1),),
            q.device,
        )  # fmt: skip
        R = HV // H
        strides = (
            *_grouped(z, R, 1), *_grouped(a, R, 0)[:2], *_grouped(b, R, 0)[:2], state.stride(0),
        )  # fmt: skip
        self.gated = Program(
            _gated_step_kernel,
            B * HV,
            (strides, K**-0.5, float(eps)),
            (
                H, HV, K, V, 2.0 if allow_neg_eigval else 1.0, gate_activation != "sigmoid", pdl,
                triton.next_power_of_2(K), triton.next_power_of_2(V), config["RELOAD"],
            ),
            (("num_warps", config["num_warps"]),) + ((("launch_pdl", True),) if pdl else ()),
            q.device,
        )  # fmt: skip

    def __call__(
        self, q, k, v, z, a, b, conv_state, state, weight, bias, A_log, dt_bias, norm_weight
    ) -> torch.Tensor:
        y = torch.empty(self.out, dtype=q.dtype, device=self.device)  # [B, 1, HV, V]
        # fp32: nothing is rounded between the two launches
        qkv = torch.empty(self.rows, dtype=torch.float32, device=self.device)  # [B, D]
        with device.on(self.device):
            self.conv(q, k, v, conv_state, weight, bias, qkv)
            self.gated(qkv, z, a, b, A_log, dt_bias, state, norm_weight, y)
        return y


_steps: Dict[tuple, Step] = {}


def plan_gdn_layer_decode(
    q, k, v, z, a, b, conv_state, state, weight, bias, activation, A_log, dt_bias, norm_weight, eps,
    gate_activation, allow_neg_eigval,
) -> Optional[Step]:  # fmt: skip
    """What serves all calls like this one, from the tensors alone, if there are any rows."""
    if q.shape[0] == 0:
        return None
    tensors = (q, k, v, z, a, b, conv_state, state, weight)
    options = (activation, eps, gate_activation, allow_neg_eigval)
    key = (facts(*tensors, bias, A_log, dt_bias, norm_weight), options)
    return _steps.get(key) or keep(_steps, key, Step(*tensors, *options))


def gdn_layer_decode(
    q: torch.Tensor,  # [B, 1, H, K], last dimension dense
    k: torch.Tensor,  # [B, 1, H, K]
    v: torch.Tensor,  # [B, 1, HV, V] or [B, 1, H, R, V], as z
    z: torch.Tensor,  # [B, 1, HV, V]
    a: torch.Tensor,  # [B, 1, HV] or [B, 1, H, R], as b
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
    tensors = (q, k, v, z, a, b, conv_state, state, weight, bias)
    vectors = (A_log, dt_bias, norm_weight)
    step = plan_gdn_layer_decode(
        *tensors, activation, *vectors, eps, gate_activation, allow_neg_eigval
    )
    if step is None:
        return q.new_empty(0, 1, state.shape[1], v.shape[-1])
    return step(*tensors, *vectors)
