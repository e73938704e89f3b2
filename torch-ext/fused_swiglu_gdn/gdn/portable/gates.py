"""Helpers of the gated delta rule's gates that kernels of more than one kind share."""

import triton
import triton.language as tl


@triton.jit
def log1p(x):
    """log(1 + x) for x in [0, 1], accurate where 1 + x rounds (Kahan)."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * x / tl.where(u == 1.0, 1.0, u - 1.0))


@triton.jit
def log_decay(g, A_log_ptr, dt_bias_ptr, head):
    """The natural-log decay, fp32: g itself, or -exp(A_log) * softplus(g + dt_bias)."""
    g = g.to(tl.float32)
    if A_log_ptr is not None:
        if dt_bias_ptr is not None:
            g += tl.load(dt_bias_ptr + head).to(tl.float32)
        softplus = tl.maximum(g, 0.0) + log1p(tl.exp(-tl.abs(g)))
        g = -tl.exp(tl.load(A_log_ptr + head).to(tl.float32)) * softplus
    return g


@triton.jit
def write_strength(beta, BETA_SCALE: tl.constexpr):
    """beta itself, or BETA_SCALE * sigmoid(beta) where that is not 0; fp32."""
    beta = beta.to(tl.float32)
    if BETA_SCALE != 0:
        beta = BETA_SCALE / (1.0 + tl.exp(-beta))
    return beta
