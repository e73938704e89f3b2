"""The sequential half of the chunked gated delta rule, in portable Triton (docs/gdn.md).

Per chunk, with S [K, V] fp32 carried along and Tb, P, F made by common/gdn_prepare.py:

    X = V - F0 (K S)    vt = Tb X    O = F2 (Q S) + P vt    S = gam_C S + K^T (F1 vt)

Sizes: B T H HV K V; N sequences; C = 64 tokens a chunk; E tokens between checkpoints.
"""

from typing import Optional

import torch
import triton
import triton.language as tl

CHUNK = 64


@triton.jit
def _store_state(ptr, s, at, mask):
    tl.store(ptr + at, s.to(ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "E"])
def _scan_kernel(
    q_ptr,  # [B, T, H, K]
    k_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, HV, V]
    o_ptr,  # [B, T, HV, V]
    tb_ptr,  # [rows, HV, C, C]
    p_ptr,  # [rows, HV, C, C]
    f_ptr,  # [rows, HV, 4, C] fp32
    cu_ptr,  # [N + 1] int32 | int64 or None
    s0_ptr,  # [N | pool, HV, K, V] or None
    index_ptr,  # [N] int32 | int64 or None
    s1_ptr,  # [N | pool, HV, K, V] or None
    mid_ptr,  # [checkpoint rows, HV, K, V] or None
    q_strides,  # of B, T, H
    k_strides,
    v_strides,  # of B, T, HV
    s0_strides,  # of sequence or slot, HV, K, V
    s1_strides,
    T,
    E,
    H: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    V_FIRST: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    PREC: tl.constexpr,
):
    """BLOCK_V columns of one value head of one sequence, from its first token to its last."""
    HV: tl.constexpr = H * R
    NV: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    v0 = (pid % NV) * BLOCK_V
    hv = ((pid // NV) % HV).to(tl.int64)
    n = (pid // (NV * HV)).to(tl.int64)
    h = hv // R
    if cu_ptr is None:
        b = n
        start = n * 0
        length = T
        row0 = n * ((T + 63) // 64)
        mid_row = n * (T // E)
    else:
        b = n * 0
        start = tl.load(cu_ptr + n).to(tl.int64)
        length = (tl.load(cu_ptr + n + 1).to(tl.int64) - start).to(tl.int32)
        row0 = start // 64 + n
        mid_row = start // E
    slot = n
    if index_ptr is not None:
        slot = tl.load(index_ptr + n).to(tl.int64)

    t = tl.arange(0, 64)
    d = tl.arange(0, BLOCK_K)
    e = v0 + tl.arange(0, BLOCK_V)
    v_at = v_ptr + b * v_strides[0] + start * v_strides[1] + hv * v_strides[2]
    k_at = k_ptr + b * k_strides[0] + start * k_strides[1] + h * k_strides[2]
    q_at = q_ptr + b * q_strides[0] + start * q_strides[1] + h * q_strides[2]
    o_at = o_ptr + ((b * T + start) * HV + hv) * V
    NT = (length + 63) // 64
    if slot < 0:  # a padding row of the batch: nothing is read or written but zeros of o
        for c in range(NT):
            at = o_at + t[:, None] * (HV * V) + e[None, :]
            zero = tl.zeros((64, BLOCK_V), o_ptr.dtype.element_ty)
            tl.store(at, zero, mask=(t < length - c * 64)[:, None] & (e < V)[None, :])
            o_at += 64 * HV * V
        return

    in_state = (d < K)[:, None] & (e < V)[None, :]
    s = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)  # [K, V]
    if s0_ptr is not None:
        at = slot * s0_strides[0] + hv * s0_strides[1]
        at += d[:, None] * s0_strides[2] + e[None, :] * s0_strides[3]
        s = tl.load(s0_ptr + at, mask=in_state, other=0.0).to(tl.float32)

    tb_ptr += (row0 * HV + hv) * 4096
    p_ptr += (row0 * HV + hv) * 4096
    f_ptr += (row0 * HV + hv) * 256
    for c in tl.range(0, NT, num_stages=STAGES):
        left = length - c * 64
        in_k = (t < left)[:, None] & (d < K)[None, :]
        in_v = (t < left)[:, None] & (e < V)[None, :]
        go = n * 0 + c * 64
        # 64-bit offsets to the chunk, 32-bit ones inside it
        k_tile = k_at + go * k_strides[1] + t[:, None] * k_strides[1] + d[None, :]
        q_tile = q_at + go * q_strides[1] + t[:, None] * q_strides[1] + d[None, :]
        v_tile = v_at + go * v_strides[1] + t[:, None] * v_strides[1] + e[None, :]
        block = t[:, None] * 64 + t[None, :]
        k = tl.load(k_tile, mask=in_k, other=0.0)  # [C, K]
        q = tl.load(q_tile, mask=in_k, other=0.0)  # [C, K]
        v = tl.load(v_tile, mask=in_v, other=0.0)  # [C, V]
        tb = tl.load(tb_ptr + go * (HV * 64) + block)  # [C, C]
        p = tl.load(p_ptr + go * (HV * 64) + block)  # [C, C]
        f_at = f_ptr + go * (HV * 4)
        f0 = tl.load(f_at + t)
        f1 = tl.load(f_at + 64 + t)
        f2 = tl.load(f_at + 128 + t)
        decay = tl.load(f_at + 192)

        sk = s.to(k.dtype)  # [K, V]
        x = v.to(tl.float32) - f0[:, None] * tl.dot(k, sk, input_precision=PREC)  # [C, V] fp32
        o = tl.dot(q, sk, input_precision=PREC) * f2[:, None]  # [C, V] fp32
        vt = tl.dot(tb, x.to(k.dtype), input_precision=PREC)  # [C, V] fp32
        s = s * decay
        s = tl.dot(tl.trans(k), (vt * f1[:, None]).to(k.dtype), s, input_precision=PREC)
        o = tl.dot(p, vt.to(k.dtype), o, input_precision=PREC)
        o_tile = o_at + go * (HV * V) + t[:, None] * (HV * V) + e[None, :]
        tl.store(o_tile, o.to(o_ptr.dtype.element_ty), mask=in_v)
        if mid_ptr is not None:
            done = (c + 1) * 64
            if (done % E == 0) & (done <= length):
                at = ((mid_row + done // E - 1) * HV + hv) * (K * V)
                at += d[:, None] + e[None, :] * K if V_FIRST else d[:, None] * V + e[None, :]
                _store_state(mid_ptr, s, at, in_state)

    if s1_ptr is not None:
        at = slot * s1_strides[0] + hv * s1_strides[1]
        at += d[:, None] * s1_strides[2] + e[None, :] * s1_strides[3]
        _store_state(s1_ptr, s, at, in_state)


def _kv_strides(state: Optional[torch.Tensor], v_first: bool):
    """Strides of (sequence, head, K, V) for either layout of the state."""
    if state is None:
        return (0, 0, 0, 0)
    a, b, c, d = state.stride()
    return (a, b, d, c) if v_first else (a, b, c, d)


def gdn_scan(
    q: torch.Tensor,  # [B, T, H, K]
    k: torch.Tensor,  # [B, T, H, K]
    v: torch.Tensor,  # [B, T, HV, V]
    tb: torch.Tensor,  # [rows, HV, C, C]
    p: torch.Tensor,  # [rows, HV, C, C]
    f: torch.Tensor,  # [rows, HV, 4, C] fp32
    initial_state: Optional[torch.Tensor],  # [N | pool, HV, K, V] or [.., V, K]
    final_state: Optional[torch.Tensor],
    state_indices: Optional[torch.Tensor],  # [N]
    checkpoints: Optional[torch.Tensor],
    cu_seqlens: Optional[torch.Tensor],  # [N + 1]
    state_v_first: bool,
    checkpoint_every: int,
    config: dict,
) -> torch.Tensor:
    """o [B, T, HV, V]; the final state and the checkpoints are written into the tensors given."""
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    o = torch.empty((B, T, HV, V), dtype=v.dtype, device=v.device)
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if N * HV == 0:
        return o
    grid = (N * HV * triton.cdiv(V, config["BLOCK_V"]),)
    _scan_kernel[grid](
        q,
        k,
        v,
        o,
        tb,
        p,
        f,
        cu_seqlens,
        initial_state,
        state_indices,
        final_state,
        checkpoints,
        q.stride()[:3],
        k.stride()[:3],
        v.stride()[:3],
        _kv_strides(initial_state, state_v_first),
        _kv_strides(final_state, state_v_first),
        T,
        max(checkpoint_every, 64),
        H=H,
        R=HV // H,
        K=K,
        V=V,
        V_FIRST=state_v_first,
        BLOCK_K=triton.next_power_of_2(max(K, 16)),
        PREC="tf32x3" if q.dtype == torch.float32 else "tf32",
        **config,
    )
    return o
