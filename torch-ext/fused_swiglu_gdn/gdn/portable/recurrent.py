"""The gated delta rule token by token, for decoding.

    S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T        o_t = scale * S_t^T q_t

Sizes: B T H HV K V; N sequences; P rows of a state pool. Measurements: docs/gdn_decode.md.
"""

from typing import Optional, Tuple

import torch
import triton
import triton.language as tl

from ...runtime.launch import Launch
from ...runtime.primitives import sequence_bounds
from .delta import key_norms, load, read_step, store, write_step
from .gates import beta_max, log_decay, write_strength
from .recurrent_step import Step, is_dense, step_config, step_of

SERVED = (torch.float16, torch.bfloat16, torch.float32)


def supports_gdn_recurrent_fwd(
    q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, output_state_indices,
    cu_seqlens, scale, use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval, state_v_first,
    output_final_state, inplace, all_states,
) -> bool:  # fmt: skip
    if q.dtype not in SERVED or g.dtype not in SERVED or beta.dtype not in SERVED:
        return False
    if initial_state is None:
        return True
    written = inplace or state_indices is not None
    return initial_state.dtype in SERVED and (not written or is_dense(initial_state))


@triton.jit
def _load_token(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, strides, token, h, hv, offs_k, offs_v, mask_k, mask_v
):
    """q, k [BLOCK_K], v [BLOCK_V] in fp32 and the raw g and beta of a token and a value head."""
    q = load(q_ptr + token * strides[0] + h * strides[1] + offs_k, mask_k)
    k = load(k_ptr + token * strides[2] + h * strides[3] + offs_k, mask_k)
    v = load(v_ptr + token * strides[4] + hv * strides[5] + offs_v, mask_v)
    g = tl.load(g_ptr + token * strides[6] + hv)
    beta = tl.load(beta_ptr + token * strides[7] + hv)
    return q, k, v, g, beta


@triton.jit
def _gdn_recurrent_fwd_kernel(
    q_ptr,  # [B, T, H, K]
    k_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, HV, V]
    g_ptr,  # [B, T, HV]
    beta_ptr,  # [B, T, HV]
    A_log_ptr,  # [HV] or None
    dt_bias_ptr,  # [HV] or None
    initial_ptr,  # [N or P, HV, K, V] or None
    final_ptr,  # [N or P, HV, K, V], [B, T, HV, K, V] with ALL_STATES, or None
    o_ptr,  # [B, T, HV, V]
    read_ptr,  # [N] rows of initial_ptr, or None
    write_ptr,  # [N] rows of final_ptr, or None
    cu_ptr,  # [N + 1] or None
    strides,  # of a token and a head in q, k, v; a token in g, beta; a row of initial, final
    T,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    L2NORM: tl.constexpr,
    BETA_SCALE: tl.constexpr,
    V_FIRST: tl.constexpr,
    ALL_STATES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """A program runs BLOCK_V columns of one state of one sequence through all of its tokens."""
    K_AXIS: tl.constexpr = 1 if V_FIRST else 0
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    n = pid // (TILES * HV)
    hv = (pid // TILES) % HV
    h = hv // (HV // H)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = (pid % TILES) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_k = None if BLOCK_K == K else offs_k < K
    mask_v = None if V % BLOCK_V == 0 else offs_v < V
    EVEN: tl.constexpr = BLOCK_K == K and V % BLOCK_V == 0
    if EVEN:
        mask = None
    else:  # [BLOCK_V, BLOCK_K] or [BLOCK_K, BLOCK_V]
        mask = tl.expand_dims(offs_k < K, 1 - K_AXIS) & tl.expand_dims(offs_v < V, K_AXIS)
    if V_FIRST:
        offs_s = offs_v[:, None] * K + offs_k[None, :]
    else:
        offs_s = offs_k[:, None] * V + offs_v[None, :]
    offs_s += hv * (K * V)

    row = n.to(tl.int64)
    write_row = row
    alive = None
    if read_ptr is not None:
        row = tl.load(read_ptr + n).to(tl.int64)
        write_row = row
        alive = row >= 0
    writes = alive
    if write_ptr is not None:
        write_row = tl.load(write_ptr + n).to(tl.int64)
        writes = alive & (write_row >= 0)
    first = n.to(tl.int64) * T
    length = T
    if cu_ptr is not None:
        first, stop = sequence_bounds(cu_ptr, n, T)
        length = (stop - first).to(tl.int32)
    # every load is under way before the first reduction waits for one
    if initial_ptr is None:
        S = tl.zeros(offs_s.shape, tl.float32)
    else:
        S = load(initial_ptr + row * strides[8] + offs_s, mask, alive)
    last = first + length - 1
    token = tl.maximum(tl.minimum(first, last), 0)
    q, k, v, g, beta = _load_token(
        q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, strides, token, h, hv, offs_k, offs_v, mask_k,
        mask_v,
    )  # fmt: skip
    for t in range(0, length):
        token = first + t
        now_q, now_k, now_v = q, k, v
        now_g = log_decay(g, A_log_ptr, dt_bias_ptr, hv)
        now_beta = write_strength(beta, BETA_SCALE)
        q, k, v, g, beta = _load_token(
            q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, strides, tl.minimum(token + 1, last), h, hv,
            offs_k, offs_v, mask_k, mask_v,
        )  # fmt: skip
        rstd_k, scale_q, kq = key_norms(now_q, now_k, scale, L2NORM)
        delta, o = read_step(S, now_q, now_k, now_v, now_g, now_beta, rstd_k, scale_q, kq, K_AXIS)
        S = write_step(S, now_k, delta, now_g, K_AXIS)
        if alive is not None:
            o = tl.where(alive, o, 0.0)
        store(o_ptr + (token * HV + hv) * V + offs_v, o, mask_v)
        if ALL_STATES:
            store(final_ptr + token * strides[9] + offs_s, S, mask)
    if not ALL_STATES and final_ptr is not None:
        store(final_ptr + write_row * strides[9] + offs_s, S, mask, writes)


def _token_stride(x: torch.Tensor) -> Optional[int]:
    """The distance of one token of x [B, T, ...] from the next, across the batch too, or None."""
    B, T = x.shape[:2]
    if T <= 1:
        return x.stride(0)
    return x.stride(1) if B == 1 or x.stride(0) == T * x.stride(1) else None


def launch(
    q, k, v, g, beta, A_log, dt_bias, initial, final, o, read, write, cu_seqlens, scale, l2norm,
    beta_scale, state_v_first, all_states, config,
) -> None:  # fmt: skip
    """Runs the kernel of any number of tokens; all outputs are allocated, [B, T] is that of o."""
    (B, T, HV, V), (H, K) = o.shape, q.shape[2:]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    strides = (
        _token_stride(q), q.stride(2), _token_stride(k), k.stride(2), _token_stride(v), v.stride(2),
        _token_stride(g), _token_stride(beta), 0 if initial is None else initial.stride(0),
        0 if final is None else final.stride(-4),
    )  # fmt: skip
    block = (triton.next_power_of_2(K), config["BLOCK_V"])
    kernel = Launch(
        _gdn_recurrent_fwd_kernel,
        N * HV * triton.cdiv(V, config["BLOCK_V"]),
        q.device,
        numbers=(strides, T, scale),
        constexprs=(H, HV, K, V, l2norm, beta_scale, state_v_first, all_states, *block),
        options=(("num_warps", config["num_warps"]),),
    )
    kernel(q, k, v, g, beta, A_log, dt_bias, initial, final, o, read, write, cu_seqlens)


def plan_gdn_recurrent_fwd(
    q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, output_state_indices,
    cu_seqlens, scale, use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval, state_v_first,
    output_final_state, inplace, all_states,
) -> Optional[Step]:  # fmt: skip
    """What serves all calls like this one, from the tensors alone, if each sequence has a token."""
    if q.shape[0] == 0 or q.shape[1] != 1 or cu_seqlens is not None or all_states:
        return None
    return step_of(
        q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, output_state_indices,
        scale, use_qk_l2norm, beta_max(use_beta_sigmoid, allow_neg_eigval), state_v_first,
        output_final_state, inplace,
    )  # fmt: skip


def gdn_recurrent_fwd(
    q: torch.Tensor,  # [B, T, H, K]
    k: torch.Tensor,  # [B, T, H, K]
    v: torch.Tensor,  # [B, T, HV, V]
    g: torch.Tensor,  # [B, T, HV]
    beta: torch.Tensor,  # [B, T, HV]
    A_log: Optional[torch.Tensor],  # [HV]
    dt_bias: Optional[torch.Tensor],  # [HV]
    initial_state: Optional[torch.Tensor],  # [N or P, HV, K, V]
    state_indices: Optional[torch.Tensor],  # [N]
    output_state_indices: Optional[torch.Tensor],  # [N]
    cu_seqlens: Optional[torch.Tensor],  # [N + 1]
    scale: float,
    use_qk_l2norm: bool,
    use_beta_sigmoid: bool,
    allow_neg_eigval: bool,
    state_v_first: bool,
    output_final_state: bool,
    inplace: bool,
    all_states: bool,
) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """One launch: o, and the final state, the states after every token, the pool, or None."""
    tensors = (
        q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, output_state_indices,
        cu_seqlens,
    )  # fmt: skip
    step = plan_gdn_recurrent_fwd(
        *tensors, scale, use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval, state_v_first,
        output_final_state, inplace, all_states,
    )  # fmt: skip
    if step is not None:
        return step(*tensors)
    beta_scale = beta_max(use_beta_sigmoid, allow_neg_eigval)
    (B, T), (HV, V), K = q.shape[:2], v.shape[2:], k.shape[3]
    o = torch.empty((B, T, HV, V), dtype=q.dtype, device=q.device)  # [B, T, HV, V]
    final = None
    if inplace:
        final = initial_state
    elif output_final_state or all_states:
        N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        rows = (B, T) if all_states else (N,)
        dims = (HV, V, K) if state_v_first else (HV, K, V)
        final = torch.empty(rows + dims, dtype=torch.float32, device=q.device)  # [N, HV, K, V]
    if initial_state is not None and not inplace and not is_dense(initial_state):
        initial_state = initial_state.contiguous()
    if T == 0:  # the kernel reads a token before it knows that there is none
        q, k, v, g, beta = (x.new_zeros(B, 1, *x.shape[2:]) for x in (q, k, v, g, beta))
    q, k, v, g, beta = (
        x if _token_stride(x) is not None else x.contiguous() for x in (q, k, v, g, beta)
    )
    launch(
        q, k, v, g, beta, A_log, dt_bias, initial_state, final, o, state_indices,
        output_state_indices, cu_seqlens, scale, use_qk_l2norm, beta_scale, state_v_first,
        all_states, step_config(q.device, K, 4, state_v_first),
    )  # fmt: skip
    return o, final
