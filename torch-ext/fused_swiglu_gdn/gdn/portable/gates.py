"""The gates of the gated delta rule: one formula for prefill, decoding and gradients on every GPU.

All in fp32. `hv` is the value head of each element; `mask`, if given, is False for elements without
a head.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950216293335)
LOG2_E_REST = tl.constexpr(1.925963033500011e-08)


@triton.jit
def _log1p(x):
    """log(1 + x) for x in [0, 1], accurate where 1 + x rounds (Kahan)."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * x / tl.where(u == 1.0, 1.0, u - 1.0))


@triton.jit
def _of_head(ptr, hv, mask):
    if mask is None:
        x = tl.load(ptr + hv)
    else:
        x = tl.load(ptr + hv, mask=mask, other=0.0)
    return x.to(tl.float32)


@triton.jit
def log_decay(g, A_log_ptr, dt_bias_ptr, hv, mask=None):
    """The natural-log decay: g unchanged, or -exp(A_log) * softplus(g + dt_bias)."""
    g = g.to(tl.float32)
    if A_log_ptr is not None:
        if dt_bias_ptr is not None:
            g += _of_head(dt_bias_ptr, hv, mask)
        softplus = tl.maximum(g, 0.0) + _log1p(tl.exp(-tl.abs(g)))
        g = -tl.exp(_of_head(A_log_ptr, hv, mask)) * softplus
    return g


@triton.jit
def channel_log_decay(g, A_log_ptr, dt_bias_ptr, hv, at, mask, LOWER: tl.constexpr):
    """The natural-log decay of each channel of a head's keys: g itself, -exp(A_log) *
    softplus(g + dt_bias), or with LOWER LOWER * sigmoid(exp(A_log) * (g + dt_bias)).

    `at` is the offset of the channel in dt_bias [HV, K]; without A_log the exponential is 1.
    """
    g = g.to(tl.float32)
    if A_log_ptr is not None or LOWER is not None:
        if dt_bias_ptr is not None:
            g += _of_head(dt_bias_ptr, at, mask)
        rate = 1.0
        if A_log_ptr is not None:
            rate = tl.exp(tl.load(A_log_ptr + hv).to(tl.float32))
        if LOWER is not None:
            g = LOWER / (1.0 + tl.exp(-rate * g))
        else:
            g = -rate * (tl.maximum(g, 0.0) + _log1p(tl.exp(-tl.abs(g))))
    return g


@triton.jit
def at_least(x, LEAST: tl.constexpr):
    """max(x, LEAST); NaN stays NaN."""
    return tl.maximum(x, LEAST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def to_log2(g):
    """log2 of the decay whose natural logarithm is g, clamped at -200.

    2^-200 is 0 in fp32; without the clamp one reset would cost its chunk all precision.
    """
    # log2(e) in two parts: in fp32 it is off by 1.3e-8, which a state that decays for long shows
    return at_least(g * LOG2_E + g * LOG2_E_REST, -200.0)


@triton.jit
def log2_decay(g, A_log_ptr, dt_bias_ptr, hv, mask=None):
    """log2 of the decay, clamped at -200."""
    return to_log2(log_decay(g, A_log_ptr, dt_bias_ptr, hv, mask))


@triton.jit
def write_strength(beta, BETA_MAX: tl.constexpr):
    """beta unchanged, or BETA_MAX * sigmoid(beta) if BETA_MAX is not 0."""
    beta = beta.to(tl.float32)
    if BETA_MAX != 0:
        beta = BETA_MAX / (1.0 + tl.exp(-beta))
    return beta


@triton.jit
def dbeta_of(dots, beta, BETA_MAX: tl.constexpr, LOW: tl.constexpr):
    """dots / beta^2, the gradient of beta where dots is dV . vt [C] fp32, through its sigmoid.

    dV and vt went through Tb, whose diagonal is beta as rounded to LOW, so that it cancels. Where
    beta is next to nothing, backward_beta.py computes it in another way.
    """
    beta = beta.to(tl.float32)
    slope = tl.full(dots.shape, 1.0, tl.float32)
    if BETA_MAX > 0.0:
        slope = write_strength(beta, BETA_MAX) * tl.sigmoid(-beta)
    beta = write_strength(beta, BETA_MAX).to(LOW).to(tl.float32)
    return dots / beta / beta * slope
