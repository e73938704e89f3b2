"""The kernels of latent attention of a few tokens, for every GPU.

    absorb   qa[h] = q_nope[h] W_UK[h]                           [C], as one or two HALVES
    attend   o[h] = softmax((qa[h] . c + q_rot[h] . r) scale + mask) c    in parts of the slots
    combine  the parts of a row to one o, fp32 (parts.py)        [C]
    finish   y[h] = W_UV[h] o[h]                                 [V]

Of one token with many heads, finish combines the parts itself.

The first of the HALVES is qa, rounded; the second is what rounding took from it. The error of one
rounding of qa is the same for all slots, and so does not average out.

Sizes: B rows, T tokens, M = B T, H heads, ROWS = T H rows of queries, S slots, C latent and R
rotary channels, N channels of a head without rotary embedding, V of a value head. The weight
[H, N + V, C] is W_UK [H, N, C] and W_UV [H, V, C].
"""

import triton
import triton.language as tl

from ...fp8.call import BLOCK
from ...fp8.portable.dequantise import weight_scale
from ...runtime.primitives import after_predecessor
from .latent_rope import load_pairs, store_pairs, turned
from .parts import parts_of

LOG2E = tl.constexpr(1.4426950408889634)
_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def scales_at(s_ptr, row, column, C: tl.constexpr):
    """The scales of a weight in FP8 at these rows and latent channels."""
    return weight_scale(s_ptr + row // _BLOCK * ((C + _BLOCK - 1) // _BLOCK) + column // _BLOCK)


@triton.jit
def absorbed(
    pid, q_ptr, w_ptr,
    s_ptr,  # of a weight in e4m3: [ceil(H (N + V) / 128), ceil(C / 128)]; None
    cos_ptr,  # as in latent_rope.py; None: q is turned
    sin_ptr, y_ptr, M, T,
    q_step, turn_steps,
    H: tl.constexpr, N: tl.constexpr, R: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    FROM_PAIRS: tl.constexpr, TO_PAIRS: tl.constexpr, HALVES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_C latent channels of one head's queries, or their rotary channels, turned.

    HALVES: 2: behind them, what rounding takes from the latent channels, rounded itself.

    PDL: the weight is read before the launch ahead has ended.
    """
    BLOCKS: tl.constexpr = C // BLOCK_C + 1
    block = pid % BLOCKS
    h = (pid // BLOCKS) % H
    m = (pid // (BLOCKS * H)) * BLOCK_M + tl.arange(0, BLOCK_M)
    start = m[:, None].to(tl.int64) * q_step + h * (N + R)
    rows, y_rows = q_ptr + start, (m[:, None] * H + h) * (HALVES * C + R)
    y = y_ptr + y_rows
    if block < C // BLOCK_C:
        n = tl.arange(0, BLOCK_K)
        ch = block * BLOCK_C + tl.arange(0, BLOCK_C)
        acc = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
        for k in tl.static_range(0, N, BLOCK_K):
            at = h.to(tl.int64) * (N + V) + k + n
            there = k + n < N
            w = tl.load(w_ptr + at[:, None] * C + ch[None, :], mask=there[:, None], other=0.0)
            if s_ptr is not None:
                scale = scales_at(s_ptr, h * (N + V) + k, block * BLOCK_C, C)
            if k == 0:
                after_predecessor(PDL)
            q = tl.load(rows + k + n[None, :], mask=(m < M)[:, None] & there[None, :], other=0.0)
            if s_ptr is None:
                acc = tl.dot(q, w, acc)
            else:  # BLOCK_K rows of a head share a scale
                acc += tl.dot(q, w.to(q.dtype)) * scale
        high = acc.to(y_ptr.dtype.element_ty)
        tl.store(y + ch[None, :], high, mask=(m < M)[:, None])
        if HALVES == 2:
            low = (acc - high.to(tl.float32)).to(high.dtype)
            tl.store(y + C + R + ch[None, :], low, mask=(m < M)[:, None])
    else:
        after_predecessor(PDL)
        if cos_ptr is None:
            e = tl.arange(0, R)[None, :]
            tl.store(y + C + e, tl.load(rows + N + e, mask=(m < M)[:, None]), mask=(m < M)[:, None])
        else:
            P: tl.constexpr = R // 2
            p = tl.arange(0, P)[None, :]
            inside = (m < M)[:, None] & (p < P)
            token = tl.minimum(m, M - 1)[:, None]
            angle = (token // T).to(tl.int64) * turn_steps[0] + (token % T) * turn_steps[1]
            first, second = load_pairs(q_ptr, start + N, inside, P, p, FROM_PAIRS)
            first, second = turned(
                first, second, cos_ptr, sin_ptr, angle, turn_steps[2], P, p,
                0 if FROM_PAIRS else P,
            )  # fmt: skip
            store_pairs(y_ptr, y_rows + C, inside, first, second, P, p, TO_PAIRS)


@triton.jit(do_not_specialize=["M"])
def _absorb_kernel(
    q_ptr,  # [M, H, N + R]
    w_ptr,  # [H, N + V, C]
    s_ptr,  # as in `absorbed`
    y_ptr,  # [M, H, C + R], or of two HALVES C + R + C
    M,
    q_step,  # of M
    H: tl.constexpr, N: tl.constexpr, R: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    HALVES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    after_predecessor(PDL)
    absorbed(
        tl.program_id(0), q_ptr, w_ptr, s_ptr, None, None, y_ptr, M, 1, q_step, (0, 0, 0), H, N, R,
        V, C, False, False, HALVES, BLOCK_M, BLOCK_C, BLOCK_K, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["B", "S", "SPLITS"])
def _attend_kernel(
    q_ptr,  # [B, ROWS, C + R], or of two HALVES C + R + C: the last C are added to the first
    c_ptr,  # [B, S, C]
    r_ptr,  # [B, S, R]
    len_ptr,  # [B], [] or None: all slots are filled
    mask_ptr,  # [B or 1, T or 1, S] or None: each token attends to the slots up to its own
    parts_ptr,  # fp32 [B, ROWS, SPLITS, C] and [2, B, ROWS, SPLITS]: maxima, to base 2, and sums
    c_step,  # of B
    r_step,
    mask_steps,  # of B, T, S
    len_step,
    B, S, SPLITS,
    scale2,  # times log2(e)
    H: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BLOCK_R: tl.constexpr,
    NEW: tl.constexpr, HALVES: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_R rows of queries over one part of the slots, with online softmax.

    P enters the product with the latents as a high and a low half, so that it is not rounded.
    """
    TILES: tl.constexpr = (ROWS + BLOCK_R - 1) // BLOCK_R
    pid = tl.program_id(0)
    split = (pid // TILES) % SPLITS
    row = (pid % TILES) * BLOCK_R + tl.arange(0, BLOCK_R)
    b = (pid // (TILES * SPLITS)).to(tl.int64)
    ch = tl.arange(0, C)
    e = tl.arange(0, R)
    n = tl.arange(0, BLOCK_N)
    length, size = parts_of(len_ptr, b, len_step, S, SPLITS, BLOCK_N, NEW)
    start = split * size
    stop = tl.minimum(start + size, length)
    real = row < ROWS
    token = row // H
    after_predecessor(PDL)
    q_rows = q_ptr + (b * ROWS + row) * (HALVES * C + R)
    q = tl.load(q_rows[:, None] + ch[None, :], mask=real[:, None], other=0.0)
    qr = tl.load(q_rows[:, None] + C + e[None, :], mask=real[:, None], other=0.0)
    if HALVES == 2:
        low = tl.load(q_rows[:, None] + C + R + ch[None, :], mask=real[:, None], other=0.0)
    top = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_R,), tl.float32)
    acc = tl.zeros((BLOCK_R, C), tl.float32)
    for at in tl.range(start, stop, BLOCK_N, num_stages=STAGES):
        here = at + n < stop
        slot = (at + n).to(tl.int64)
        c = tl.load(
            c_ptr + b * c_step + slot[:, None] * C + ch[None, :], mask=here[:, None], other=0.0
        )
        k = tl.load(
            r_ptr + b * r_step + slot[:, None] * R + e[None, :], mask=here[:, None], other=0.0
        )
        s = tl.dot(q, tl.trans(c))  # [BLOCK_R, BLOCK_N]
        if HALVES == 2:
            s = tl.dot(low, tl.trans(c), s)
        s = tl.dot(qr, tl.trans(k), s) * scale2
        if mask_ptr is None:
            seen = (at + n)[None, :] < tl.minimum(stop, length - (ROWS // H - 1) + token)[:, None]
        else:
            seen = here[None, :] & real[:, None]
            m = tl.load(
                mask_ptr + b * mask_steps[0] + token[:, None] * mask_steps[1]
                + slot[None, :] * mask_steps[2],
                mask=seen, other=0,
            )  # fmt: skip
            if mask_ptr.dtype.element_ty == tl.int1:
                seen &= m != 0
            else:
                s += m.to(tl.float32) * LOG2E
        s = tl.where(seen, s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        base = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        high = p.to(c.dtype)
        acc = tl.dot(high, c, acc)
        acc = tl.dot((p - high.to(tl.float32)).to(c.dtype), c, acc)
        top = new
    place = (b * ROWS + row) * SPLITS + split
    rows = B.to(tl.int64) * (ROWS * SPLITS)
    tl.store(parts_ptr + rows * C + place, top, mask=real)
    tl.store(parts_ptr + rows * (C + 1) + place, total, mask=real)
    if start < stop:
        tl.store(parts_ptr + place[:, None] * C + ch[None, :], acc, mask=real[:, None])


@triton.jit(do_not_specialize=["M"])
def _finish_kernel(
    o_ptr,  # fp32 [M, H, C]
    w_ptr,  # [H, N + V, C]
    s_ptr,  # as in `absorbed`
    len_ptr,  # [], to which NEW is added, or None
    y_ptr,  # [M, H, V]
    M,
    H: tl.constexpr, N: tl.constexpr, V: tl.constexpr, C: tl.constexpr, NEW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_V channels of one head's values, of one token in fp32; of more, o enters the product as
    a high and a low half.

    The weight is read before the launches of this call have ended, none of which writes it; all
    older ones have.
    """
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    h = (pid // BLOCKS) % H
    m = (pid // (BLOCKS * H)) * BLOCK_M + tl.arange(0, BLOCK_M)
    v = (pid % BLOCKS) * BLOCK_V + tl.arange(0, BLOCK_V)
    ch = tl.arange(0, BLOCK_C)[None, :]
    rows = w_ptr + (h.to(tl.int64) * (N + V) + N + v[:, None]) * C
    o_rows = o_ptr + (m[:, None].to(tl.int64) * H + h) * C
    w = tl.load(rows + ch, mask=(v < V)[:, None], other=0.0)
    row = h * (N + V) + N + (pid % BLOCKS) * BLOCK_V  # those of a program share scales
    if s_ptr is not None:
        scale = scales_at(s_ptr, row, ch if BLOCK_M == 1 else 0, C)
    after_predecessor(PDL)
    if len_ptr is not None and pid == 0:
        tl.store(len_ptr, tl.load(len_ptr) + NEW)
    y = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    for first in tl.static_range(0, C, BLOCK_C):
        if first > 0:
            w = tl.load(rows + first + ch, mask=(v < V)[:, None], other=0.0)
            if s_ptr is not None:
                scale = scales_at(s_ptr, row, first + ch if BLOCK_M == 1 else first, C)
        o = tl.load(o_rows + first + ch, mask=(m < M)[:, None], other=0.0)
        if BLOCK_M == 1:
            y += tl.sum(w.to(tl.float32) * (o if s_ptr is None else o * scale), 1)[None, :]
        else:
            w = w.to(y_ptr.dtype.element_ty)
            high = o.to(w.dtype)
            low = (o - high.to(tl.float32)).to(w.dtype)
            if s_ptr is None:
                y = tl.dot(low, tl.trans(w), tl.dot(high, tl.trans(w), y))
            else:  # BLOCK_C channels share a scale
                y += tl.dot(low, tl.trans(w), tl.dot(high, tl.trans(w))) * scale
    inside = (m < M)[:, None] & (v < V)[None, :]
    at = (m[:, None].to(tl.int64) * H + h) * V + v[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "SPLITS"])
def _finish_parts_kernel(
    parts_ptr,  # as _attend_kernel has them
    w_ptr,  # [H, N + V, C]
    s_ptr,  # as in `absorbed`
    len_ptr,  # [], to which NEW is added, or None
    y_ptr,  # [M, H, V]
    M, SPLITS,
    H: tl.constexpr, N: tl.constexpr, V: tl.constexpr, C: tl.constexpr, NEW: tl.constexpr,
    PARTS: tl.constexpr,  # SPLITS, rounded up to a power of two
    BLOCK_P: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """combine_kernel and _finish_kernel of BLOCK_V channels of one head's values of one token.

    A part without slots is known by its maximum: its sums, which were not written, are loaded and
    left out. So the loads of AT_ONCE blocks of parts are on their way at once.
    """
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    row = (pid // BLOCKS).to(tl.int64)
    v = (pid % BLOCKS) * BLOCK_V + tl.arange(0, BLOCK_V)
    ch = tl.arange(0, C)[None, :]
    w_row = (row % H) * (N + V) + N + v
    w = tl.load(w_ptr + w_row[:, None] * C + ch, mask=(v < V)[:, None], other=0.0)
    rows = M.to(tl.int64) * (H * SPLITS)
    after_predecessor(PDL)
    if len_ptr is not None and pid == 0:
        tl.store(len_ptr, tl.load(len_ptr) + NEW)
    top = tl.full((BLOCK_P,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_P,), tl.float32)
    o = tl.zeros((BLOCK_P, C), tl.float32)
    for begin in tl.range(0, PARTS, BLOCK_P * AT_ONCE):
        for first in tl.static_range(0, BLOCK_P * AT_ONCE, BLOCK_P):
            part = begin + first + tl.arange(0, BLOCK_P)
            there = part < SPLITS
            place = row * SPLITS + part
            one = tl.load(parts_ptr + rows * C + place, mask=there, other=float("-inf"))
            its = tl.load(parts_ptr + rows * (C + 1) + place, mask=there, other=0.0)
            x = tl.load(parts_ptr + place[:, None] * C + ch, mask=there[:, None], other=0.0)
            new = tl.maximum(top, one)
            base = tl.where(new == float("-inf"), 0.0, new)
            shrink, share = tl.exp2(top - base), tl.exp2(one - base)
            total = total * shrink + share * its
            x = tl.where((one > float("-inf"))[:, None], share[:, None] * x, 0.0)
            o = o * shrink[:, None] + x
            top = new
    most = tl.max(top, 0)
    share = tl.exp2(top - tl.where(most == float("-inf"), 0.0, most))
    total = tl.sum(share * total, 0)
    o = tl.sum(share[:, None] * o, 0) / tl.where(total == 0.0, 1.0, total)
    x = w.to(tl.float32) * o[None, :]
    if s_ptr is not None:
        SHARED: tl.constexpr = min(C, _BLOCK)  # latent channels that share a scale
        group = tl.arange(0, C // SHARED) * SHARED
        scale = scales_at(s_ptr, tl.minimum(w_row, H * (N + V) - 1)[:, None], group[None, :], C)
        x = scale * tl.sum(x.reshape((BLOCK_V, C // SHARED, SHARED)), 2)
    y = tl.sum(x, 1)
    tl.store(y_ptr + row * V + v, y.to(y_ptr.dtype.element_ty), mask=v < V)
