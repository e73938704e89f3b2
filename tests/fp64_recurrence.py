"""The gated delta rule and Kimi Delta Attention token by token in fp64 on a GPU, for fuzzing and
benchmarks."""

from typing import Optional

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["HV"])
def _recurrence_kernel(
    q_ptr,  # [T, HV, D] fp64, scaled
    k_ptr,  # [T, HV, D] fp64
    v_ptr,  # [T, HV, D] fp64
    a_ptr,  # [T, HV] fp64, or [T, HV, D] with CHANNELS
    beta_ptr,  # [T, HV] fp64
    cu_ptr,  # [N + 1]
    s_ptr,  # [N, HV, D, D] fp64, overwritten
    o_ptr,  # [T, HV, D] fp64
    kept_ptr,  # [T // 64, HV, D, D] fp64 or None
    HV,
    D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The recurrence token by token, BLOCK_V columns of one head of one sequence a program."""
    NV: tl.constexpr = (D + BLOCK_V - 1) // BLOCK_V
    hv = (tl.program_id(0) // NV) % HV
    n = tl.program_id(0) // (NV * HV)
    start = tl.load(cu_ptr + n).to(tl.int64)
    d = tl.arange(0, BLOCK_K)
    e = (tl.program_id(0) % NV) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (d < D)[:, None] & (e < D)[None, :]
    state = d[:, None] * D + e[None, :]
    s = tl.load(s_ptr + (n * HV + hv) * (D * D) + state, mask=inside, other=0.0)
    for t in range(start, tl.load(cu_ptr + n + 1)):
        at = t * HV + hv
        k = tl.load(k_ptr + at * D + d, mask=d < D, other=0.0)[:, None]
        q = tl.load(q_ptr + at * D + d, mask=d < D, other=0.0)[:, None]
        v = tl.load(v_ptr + at * D + e, mask=e < D, other=0.0)
        if CHANNELS:
            s *= tl.load(a_ptr + at * D + d, mask=d < D, other=0.0)[:, None]
        else:
            s *= tl.load(a_ptr + at)
        s += k * (tl.load(beta_ptr + at) * (v - tl.sum(k * s, 0)))[None, :]
        tl.store(o_ptr + at * D + e, tl.sum(q * s, 0), mask=e < D)
        done = t + 1 - start
        if kept_ptr is not None:
            if done % 64 == 0:
                row = start // 64 + done // 64 - 1
                tl.store(kept_ptr + (row * HV + hv) * (D * D) + state, s, mask=inside)
    tl.store(s_ptr + (n * HV + hv) * (D * D) + state, s, mask=inside)


def recurrence(
    q: torch.Tensor,  # [B, T, H, D] or [tokens, H, D], as all here
    k: torch.Tensor,  # [B, T, H, D]
    v: torch.Tensor,  # [B, T, HV, D]
    g: torch.Tensor,  # [B, T, HV] or [B, T, HV, D], natural logarithm
    beta: torch.Tensor,  # [B, T, HV]
    cu_seqlens: torch.Tensor,  # [N + 1], also for equal lengths
    scale: float,
    l2norm: bool,
    states: Optional[torch.Tensor] = None,  # [N, HV, D, D]
    keep: bool = False,
):
    """In fp64: o [tokens, HV, D], the final states [N, HV, D, D], and with `keep` the states
    [tokens // 64, HV, D, D] after 64, 128, .. tokens: row start // 64 + j of a sequence that begins
    at token `start`."""
    q, k, v = (x.reshape(-1, *x.shape[-2:]).double().contiguous() for x in (q, k, v))
    beta = beta.reshape(-1, beta.shape[-1]).double().contiguous()
    channels = g.numel() > beta.numel()
    g = g.reshape(*beta.shape, *g.shape[-1:] * channels).double().contiguous()
    if l2norm:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    (tokens, HV, D), N = v.shape, len(cu_seqlens) - 1
    q, k = (x.repeat_interleave(HV // x.shape[1], 1) for x in (q * scale, k))
    S = v.new_zeros(N, HV, D, D)
    if states is not None:
        S.copy_(states)
    o = torch.empty_like(v)
    kept = v.new_zeros(tokens // 64, HV, D, D) if keep else None
    _recurrence_kernel[(N * HV * triton.cdiv(D, 16),)](
        q, k, v, g.exp(), beta, cu_seqlens, S, o, kept, HV, D, triton.next_power_of_2(D), 16,
        channels,
    )  # fmt: skip
    return o, S, kept
