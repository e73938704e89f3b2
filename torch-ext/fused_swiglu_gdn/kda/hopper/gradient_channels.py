"""The gradient of queries, keys and gates on Hopper: portable/backward_channels.py has the formula.

A CTA owns 32 channels of a chunk of a value head, and each of its four warps a block of 16 tokens
(channel_levels.py). All that it reads comes by TMA at once.
"""

from ...gdn.hopper.primitives import C, D, locate
from ...gdn.portable.gates import to_log2
from ...runtime.gluon import as_box, barrier, gl, gluon, mbarrier, tma_load
from .channel_levels import (
    CHANNEL,
    CHANNELS,
    FLAT,
    HALF,
    ROWS,
    across,
    as_left,
    by_block,
    channels_of,
    inside,
    keep,
    of_own,
    running,
    states_product,
    sum_before,
    sum_behind,
    summed,
    tokens_of,
)
from .gates import exp2_short, rate_of, raw_log_decay, sigmoid
from .levels import TILE

# of a state's rows [32, HALF]: eight columns a thread
STATES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def _bring(descs, smem, full, chunk, hv, h, unit, part):
    """Begins to load all that a program reads: q, k and g; states and what they are multiplied by;
    pairs. Each has a barrier."""
    q_desc, k_desc, g_desc, do_desc, dv_desc, vt_desc, h_desc, dh_desc, pairs_desc = descs
    q_smem, k_smem, g_smem, x_smem, s_smem, pairs_smem = smem
    WIDTH: gl.constexpr = g_desc.dtype.primitive_bitwidth
    batch, end, first = chunk
    for x in gl.static_range(3):
        mbarrier.init(full.index(x), count=1)
    mbarrier.expect(full.index(0), C * CHANNELS * (4 + WIDTH // 8))
    mbarrier.expect(full.index(1), 6 * C * HALF * 2 + 4 * CHANNELS * HALF * 2)
    mbarrier.expect(full.index(2), 2 * C * C * 2)
    at = [batch, end, first, hv, CHANNELS * part]
    tma_load(g_desc, at, full.index(0), as_box(g_smem, g_desc))
    at = [batch, end, first, h, CHANNELS * part]
    tma_load(k_desc, at, full.index(0), as_box(k_smem, k_desc))
    tma_load(q_desc, at, full.index(0), as_box(q_smem, q_desc))
    for v in gl.static_range(2):
        to = [(unit * D).to(gl.int32) + CHANNELS * part, HALF * v]
        tma_load(h_desc, to, full.index(1), s_smem.index(v))
        tma_load(dh_desc, to, full.index(1), s_smem.index(2 + v))
        at = [batch, end, first, hv, HALF * v]
        tma_load(do_desc, at, full.index(1), as_box(x_smem.index(v), do_desc))
        tma_load(dv_desc, at, full.index(1), as_box(x_smem.index(2 + v), dv_desc))
        tma_load(vt_desc, at, full.index(1), as_box(x_smem.index(4 + v), vt_desc))
    for v in gl.static_range(8):
        to = [((unit * 2 + v // 4) * C).to(gl.int32), v % 4 * 16]
        tma_load(pairs_desc, to, full.index(2), pairs_smem.index(v))
    barrier()  # ptxas would put the loads off until the next one


@gluon.jit
def _store_zeros(at):
    d = gl.arange(0, CHANNELS, layout=CHANNEL)
    gl.store(at + d, gl.zeros((CHANNELS,), gl.float32, CHANNEL))


@gluon.jit
def _through_gate(dg, a, rate, dt_bias_ptr, at, LOWER: gl.constexpr):
    """The gradient of raw gates a from that of the decays, and the terms of A_log's."""
    by_rate = dg
    if LOWER is None:
        by_rate = dg * raw_log_decay(a, rate, dt_bias_ptr, at, LOWER)
    if dt_bias_ptr is not None:
        a += gl.load(dt_bias_ptr + at).to(gl.float32)
    if LOWER is None:
        dg *= -rate * sigmoid(a)
    else:
        dg *= LOWER * rate * sigmoid(rate * a) * sigmoid(-rate * a)
        by_rate = dg * a
    return dg, by_rate


@gluon.jit
def _store_sum(at, smem):
    x0, x1, x2, x3 = by_block(smem)
    gl.store(at, x0 + x1 + x2 + x3)


@gluon.jit(do_not_specialize=["T", "N", "NT"])
def kda_channels_bwd_kernel(
    q_desc,  # [.., .., tokens, H, K] box [1, 1, C, 1, 32]
    k_desc,  # likewise
    g_desc,  # [.., .., tokens, HV, K] box [1, 1, C, 1, 32]
    do_desc,  # [.., .., tokens, HV, V] box [1, 1, C, 1, HALF]
    vt_desc,  # likewise
    dv_desc,  # likewise
    h_desc,  # [rows * HV * K, V] box [32, HALF]
    dh_desc,  # likewise
    pairs_desc,  # dP and N [rows * HV * 2 * C, C] box [C, 16]
    A_log_ptr,  # [HV] or None
    dt_bias_ptr,  # [HV, K] or None
    cu_ptr,  # [N + 1] or None
    gates_ptr,  # [rows, HV, GATES, C] fp32: factors of k and of q, the diagonal of dP
    dq_ptr,  # [B, T, HV, K] fp32, written: of q and k as they are in the rule
    dk_ptr,  # likewise
    dg_ptr,  # [B, T, HV, K], written
    sums_ptr,  # [2, rows, HV, K] fp32, or None: the chunk's share of dA_log and ddt_bias
    T, N,
    NT,  # ceil(T / C), equal length
    scale,
    HV: gl.constexpr, R: gl.constexpr,
    LOWER: gl.constexpr,  # of a bounded gate, or None
    GATES: gl.constexpr,
):  # fmt: skip
    """32 channels of one chunk and value head."""
    DTYPE: gl.constexpr = q_desc.dtype
    WIDTH: gl.constexpr = g_desc.dtype.primitive_bitwidth
    part, row = gl.program_id(0) % 4, gl.program_id(0) // (4 * HV)
    hv = gl.program_id(0) // 4 % HV
    batch, end, first, c, length = locate(row, cu_ptr, T, N, NT)
    unit = row.to(gl.int64) * HV + hv
    if c * C >= length:
        if sums_ptr is not None:  # a row that no chunk uses adds nothing
            at = sums_ptr + unit * D + part * CHANNELS
            _store_zeros(at)
            _store_zeros(at + gl.num_programs(0).to(gl.int64) * CHANNELS)
        return
    full = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    q_smem = gl.allocate_shared_memory(DTYPE, [C, CHANNELS], gl.NVMMASharedLayout(64, 16, 2))
    k_smem = gl.allocate_shared_memory(DTYPE, [C, CHANNELS], gl.NVMMASharedLayout(64, 16, 2))
    g_smem = gl.allocate_shared_memory(
        g_desc.dtype, [C, CHANNELS], gl.NVMMASharedLayout(4 * WIDTH, WIDTH, 2)
    )
    x_smem = gl.allocate_shared_memory(DTYPE, [6, C, HALF], gl.NVMMASharedLayout(128, 16, 2))
    s_smem = gl.allocate_shared_memory(DTYPE, [4, CHANNELS, HALF], gl.NVMMASharedLayout(128, 16, 2))
    pairs_smem = gl.allocate_shared_memory(DTYPE, [8, C, 16], gl.NVMMASharedLayout(32, 16, 2))
    totals = gl.allocate_shared_memory(gl.float32, [4, CHANNELS], ROWS)
    ends_smem = gl.allocate_shared_memory(gl.float32, [CHANNELS], FLAT)
    dg_totals = gl.allocate_shared_memory(gl.float32, [2, 4, CHANNELS], ROWS)
    descs = (q_desc, k_desc, g_desc, do_desc, dv_desc, vt_desc, h_desc, dh_desc, pairs_desc)
    smem = (q_smem, k_smem, g_smem, x_smem, s_smem, pairs_smem)
    _bring(descs, smem, full, (batch, end, first + c * C), hv, hv // R, unit, part)
    if cu_ptr is None:
        batch_of, start = end.to(gl.int64), (c * C).to(gl.int64)
    else:
        batch_of, start = row.to(gl.int64) * 0, (end - length + c * C).to(gl.int64)
    rest = length - c * C
    b = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, TILE)))
    b = gl.expand_dims(gl.expand_dims(b, 1), 2)
    token = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, TILE)))
    j = gl.expand_dims(gl.expand_dims(token, 0), 1)
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, TILE)))
    i = gl.expand_dims(gl.expand_dims(i, 0), 2)
    channel = gl.expand_dims(gl.expand_dims(gl.arange(0, CHANNELS, layout=CHANNEL), 0), 2)
    channel += CHANNELS * part
    t = 16 * b + j  # [4, 1, 16]
    gates_ptr += unit * (C * GATES)
    k_factor = gl.load(gates_ptr + t)
    q_factor = gl.load(gates_ptr + C + t)
    own = gl.load(gates_ptr + 2 * C + t) * scale
    rate = rate_of(A_log_ptr, hv)
    RAW: gl.constexpr = A_log_ptr is not None or LOWER is not None
    zero = gl.zeros((4, CHANNELS, 16), gl.float32, TILE)

    mbarrier.wait(full.index(0), 0)
    x = tokens_of(g_smem)
    if RAW:
        x = raw_log_decay(x, rate, dt_bias_ptr, hv * D + channel, LOWER)
        x = gl.where(t < rest, x, 0.0)
    x = to_log2(x)
    keep(totals, gl.sum(x, 2))
    high = x.to(gl.float16)
    low = as_left((x - high.to(gl.float32)).to(gl.float16))
    high = as_left(high)
    k, q = tokens_of(k_smem) * k_factor, tokens_of(q_smem) * q_factor

    mbarrier.wait(full.index(1), 0)
    q_row, k_row, k_col = zero, zero, zero
    ends = gl.zeros((CHANNELS,), gl.float32, gl.SliceLayout(1, STATES))
    for v in gl.static_range(2):
        s, ds = s_smem.index(v), s_smem.index(2 + v)
        q_row = states_product(s, x_smem.index(v), q_row)
        k_row = states_product(s, x_smem.index(2 + v), k_row)
        k_col = states_product(ds, x_smem.index(4 + v), k_col)
        ends += gl.sum(s.load(STATES).to(gl.float32) * ds.load(STATES).to(gl.float32), 1)
    ends_smem.store(ends)
    barrier()
    t0, t1, t2, t3 = by_block(totals)
    ends = channels_of(ends_smem) * exp2_short(t0 + t1 + t2 + t3)
    since, until = summed(high, low, j <= i, zero), summed(high, low, j > i, zero)
    e = exp2_short(since + sum_before(t0, t1, t2, b))
    dq, dk = e * (q_row * scale), e * -k_row
    dg = q * dq + k * dk
    k_col *= exp2_short(until + sum_behind(t1, t2, t3, b))
    dk += k_col
    later = k * k_col  # of a token: crosses those behind it
    dq += own * k
    dk += own * q

    mbarrier.wait(full.index(2), 0)
    e = gl.where(b >= 2, since, until)
    e = exp2_short(e + gl.where(b == 3, t2, gl.where(b == 0, t1, 0.0)))
    dq, dk, dg = across(x_smem.index(0), pairs_smem, e, q, k, b, scale, dq, dk, dg, 32)
    e = exp2_short(gl.where((b & 1) != 0, since, until))
    dq, dk, dg = across(x_smem.index(1), pairs_smem, e, q, k, b, scale, dq, dk, dg, 16)
    # till here the barriers have their memory to themselves: PTX allows no other use of it before
    for x in gl.static_range(3):
        mbarrier.invalidate(full.index(x))
    p, n = of_own(pairs_smem, 0, b), of_own(pairs_smem, 4, b)
    for s in gl.static_range(4):
        dq, dk, dg = inside(high, low, q, k, p, n, i, j, scale, zero, dq, dk, dg, 8 >> s)
    keep(dg_totals.index(0), gl.sum(dg, 2))
    keep(dg_totals.index(1), gl.sum(later, 2))
    dg = running(dg, j >= i, running(later, j < i, zero))
    out = ((batch_of * T + start) * HV + hv) * D + t * (HV * D) + channel
    ok = (t < rest) & (channel >= 0)
    gl.store(dq_ptr + out, dq, mask=ok)
    gl.store(dk_ptr + out, dk, mask=ok)
    barrier()
    _, t1, t2, t3 = by_block(dg_totals.index(0))
    dg += sum_behind(t1, t2, t3, b)
    t0, t1, t2, _ = by_block(dg_totals.index(1))
    dg += sum_before(t0, t1, t2, b) + ends
    by_rate = dg
    if RAW:
        dg, by_rate = _through_gate(
            dg, tokens_of(g_smem), rate, dt_bias_ptr, hv * D + channel, LOWER
        )
    gl.store(dg_ptr + out, dg.to(dg_ptr.dtype.element_ty), mask=ok)
    if sums_ptr is not None:
        barrier()  # the totals are read
        keep(dg_totals.index(0), gl.sum(gl.where(ok, by_rate, 0.0), 2))
        keep(dg_totals.index(1), gl.sum(gl.where(ok, dg, 0.0), 2))
        barrier()
        at = sums_ptr + unit * D + channel
        _store_sum(at, dg_totals.index(0))
        _store_sum(at + gl.num_programs(0).to(gl.int64) * CHANNELS, dg_totals.index(1))
