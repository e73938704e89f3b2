"""One step of the gated delta rule on a tile of a state, for the decoding kernels.

Sizes: K and V head dims; a tile is [BLOCK_V, BLOCK_K] for states stored as [V, K], else transposed.
"""

import triton
import triton.language as tl

from .gates import channel_log_decay, log_decay

_AS_USUAL = tl.constexpr("")


@triton.jit
def load(ptrs, mask, alive=None):
    """Loads fp32; zeros where a mask is given and false."""
    if alive is not None:
        mask = alive if mask is None else mask & alive
    if mask is None:
        x = tl.load(ptrs)
    else:
        x = tl.load(ptrs, mask=mask, other=0.0)
    return x.to(tl.float32)


@triton.jit
def store(ptrs, x, mask, alive=None, EVICT: tl.constexpr = _AS_USUAL):
    if alive is not None:
        mask = alive if mask is None else mask & alive
    tl.store(ptrs, x.to(ptrs.dtype.element_ty), mask=mask, eviction_policy=EVICT)


@triton.jit
def state_tile(
    pid, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, HEAD: tl.constexpr = None,
    ROW: tl.constexpr = None,
):  # fmt: skip
    """(sequence, value head, rows and columns of its tile of the state, offsets) of a program.

    The offsets are within the states of the sequence. HEAD and ROW: their strides, if not
    contiguous.
    """
    PARTS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    n = (pid // (PARTS * HV)).to(tl.int64)
    hv = (pid // PARTS) % HV
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = (pid % PARTS) * BLOCK_V + tl.arange(0, BLOCK_V)
    HEAD_STEP: tl.constexpr = K * V if HEAD is None else HEAD
    if V_FIRST:
        offs_s = offs_v[:, None] * (K if ROW is None else ROW) + offs_k[None, :] + hv * HEAD_STEP
    else:
        offs_s = offs_k[:, None] * (V if ROW is None else ROW) + offs_v[None, :] + hv * HEAD_STEP
    return n, hv, offs_k, offs_v, offs_s


@triton.jit
def pool_rows(n, read_ptr, write_ptr):
    """The rows of a pool that a sequence reads and writes; a negative row is not accessed."""
    row = n if read_ptr is None else tl.load(read_ptr + n).to(tl.int64)
    write_row = row if write_ptr is None else tl.load(write_ptr + n).to(tl.int64)
    return row, write_row


@triton.jit
def add_pairs(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def key_norms(q, k, scale, L2NORM: tl.constexpr):
    """(1 / |k|, scale / |q|, q.k) of q, k [BLOCK_K] fp32; without L2NORM the norms count as 1."""
    kq, kk = tl.reduce((k * q, k * k), 0, add_pairs)
    rstd_k = 1.0
    if L2NORM:
        rstd_k = tl.rsqrt(kk + 1e-6)
        scale *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6)
    return rstd_k, scale, kq


@triton.jit
def read_step(
    S, q, k, v, g, beta, rstd_k, scale, kq, K_AXIS: tl.constexpr, CHANNELS: tl.constexpr = False
):
    """(delta, o) [BLOCK_V] of a step from S_{t-1} [BLOCK_V, BLOCK_K] (K_AXIS = 1) or transposed.

    S_t^T q = decay S_{t-1}^T q + (k.q) delta, so that every reduction starts from loaded values,
    and k and q are not normalised: their norms are factors of the sums. All fp32. CHANNELS: g is
    [BLOCK_K], and k and q are multiplied by its decays before the sums.
    """
    decay = tl.exp(g)
    if CHANNELS:
        k *= decay
        q *= decay
    wide_k = tl.expand_dims(k, 1 - K_AXIS)
    wide_q = tl.expand_dims(q, 1 - K_AXIS)
    seen, asked = tl.reduce((S * wide_k, S * wide_q), K_AXIS, add_pairs)  # [BLOCK_V] fp32
    if CHANNELS:
        delta = (beta * rstd_k) * (v - rstd_k * seen)
        o = scale * (asked + kq * delta)
    else:
        delta = (beta * rstd_k) * (v - (decay * rstd_k) * seen)  # [BLOCK_V] fp32
        o = scale * (decay * asked + kq * delta)
    return delta, o


@triton.jit
def write_step(S, k, delta, g, K_AXIS: tl.constexpr, CHANNELS: tl.constexpr = False):
    """S_t from S_{t-1} and delta."""
    decay = tl.exp(g)
    if CHANNELS:
        decay = tl.expand_dims(decay, 1 - K_AXIS)
    return decay * S + tl.expand_dims(k, 1 - K_AXIS) * tl.expand_dims(delta, K_AXIS)


@triton.jit
def load_gate(
    g_ptr, token_step, token, hv, offs_k, mask_k, K: tl.constexpr, CHANNELS: tl.constexpr
):
    """The raw g of a token and a head; CHANNELS: of each of its channels, [BLOCK_K]."""
    if CHANNELS:
        g = load(g_ptr + token * token_step + hv * K + offs_k, mask_k)
    else:
        g = tl.load(g_ptr + token * token_step + hv)
    return g


@triton.jit
def gate_of(
    g, A_log_ptr, dt_bias_ptr, hv, offs_k, mask_k, K: tl.constexpr, CHANNELS: tl.constexpr,
    LOWER: tl.constexpr,
):  # fmt: skip
    """The natural-log decay that load_gate's g stands for."""
    if CHANNELS:
        at = hv * K + offs_k
        g = channel_log_decay(g, A_log_ptr, dt_bias_ptr, hv, at, mask_k, LOWER)
    else:
        g = log_decay(g, A_log_ptr, dt_bias_ptr, hv)
    return g
