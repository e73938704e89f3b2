"""The gradient of g and beta from the results of the query and key kernels for each chunk.

    dg_u = sum over i >= u of dG by rows + sum over i < u of dG by columns + gam_C <S, dS>
    dbeta = (dV . vt) / beta^2        with beta rounded as on the diagonal of Tb

then through the gate g = -exp(A_log) softplus(a + dt_bias) and the sigmoid (docs/gdn_backward.md).
The vectors [rows, HV, NV, 8, C] of each kernel, by its blocks of V, are

    0 rows, 1 columns of dP * QK^T     2 rows of F2 (dO S^T) * Q     3 rows' dV . vt
    4 rows, 5 columns of -N * KK^T     6 rows of F0 (dV S^T) * K     7 rows of F1 (vt dS^T) * K

Sizes: B T H HV; N sequences; C = 64 tokens; rows = chunk rows of the call; NQ, NK blocks of V.
"""

import torch
import triton
import triton.language as tl

from ...runtime.launch import Launch, steps
from ..call import GdnCall
from .gates import dbeta_of, log2_decay
from .primitives import chunk_numbers, locate


@triton.jit(do_not_specialize=["T", "N", "NT"])
def _gates_bwd_kernel(
    g_ptr,  # [B, T, HV]
    beta_ptr,  # [B, T, HV]
    A_log_ptr,  # [HV] or None
    dt_bias_ptr,  # [HV] or None
    cu_ptr,  # [N + 1] int32 | int64, or None
    f_ptr,  # [rows, HV, 4, C] fp32
    by_query_ptr,  # [rows, HV, NQ, 8, C] fp32: 0 to 2
    by_key_ptr,  # [rows, HV, NK, 8, C] fp32: 3 to 7
    ends_ptr,  # [rows, HV, NK] fp32
    dg_ptr,  # [B, T, HV]
    dbeta_ptr,  # [B, T, HV]
    sums_ptr,  # [2, rows, HV] fp32, or None: the chunk's share of dA_log and ddt_bias
    g_strides,  # of B, T, HV
    beta_strides,
    T, N,
    NT,  # ceil(T / C), equal length
    HV: tl.constexpr, NQ: tl.constexpr, NK: tl.constexpr,
    BETA_MAX: tl.constexpr,  # 0: beta as given
    LOW: tl.constexpr,  # of Tb
):  # fmt: skip
    """dg and dbeta of one chunk and value head."""
    pid = tl.program_id(0)
    row = pid // HV
    hv = (pid % HV).to(tl.int64)
    unit = pid.to(tl.int64)
    n, c, start, length = locate(row, cu_ptr, T, N, NT, 64)
    if c * 64 >= length:
        if sums_ptr is not None:  # a row that no chunk uses adds nothing
            tl.store(sums_ptr + unit, 0.0)
            tl.store(sums_ptr + tl.num_programs(0).to(tl.int64) + unit, 0.0)
        return
    b = n.to(tl.int64) if cu_ptr is None else start * 0
    t = tl.arange(0, 64)
    i = t[:, None]
    j = t[None, :]
    tok = start + c * 64 + t  # [C] int64
    ok = c * 64 + t < length
    by_row = tl.zeros((64,), tl.float32)
    by_col = tl.zeros((64,), tl.float32)
    dots = tl.zeros((64,), tl.float32)
    end = 0.0
    for step in tl.static_range(0, NQ):
        at = by_query_ptr + (unit * NQ + step) * 512 + t
        by_row += tl.load(at) - tl.load(at + 64) + tl.load(at + 128)
    for step in tl.static_range(0, NK):
        at = by_key_ptr + (unit * NK + step) * 512 + t
        by_row -= tl.load(at + 256) - tl.load(at + 320) + tl.load(at + 384)
        by_col += tl.load(at + 448)
        dots += tl.load(at + 192)
        end += tl.load(ends_ptr + unit * NK + step)
    dg = tl.sum(tl.where(i >= j, by_row[:, None], 0.0), 0)
    dg += tl.sum(tl.where(i < j, by_col[:, None], 0.0), 0)
    dg = tl.where(ok, dg + end * tl.load(f_ptr + unit * 256 + 192), 0.0)
    if A_log_ptr is not None:
        g_at = g_ptr + b * g_strides[0] + tok * g_strides[1] + hv * g_strides[2]
        g = tl.load(g_at, mask=ok, other=0.0).to(tl.float32)  # [C], raw
        g2 = log2_decay(g, A_log_ptr, dt_bias_ptr, hv)
        tl.store(sums_ptr + unit, tl.sum(dg * g2 * 0.6931471805599453))
        if dt_bias_ptr is not None:
            g += tl.load(dt_bias_ptr + hv).to(tl.float32)
        dg = dg * -tl.exp(tl.load(A_log_ptr + hv).to(tl.float32)) * tl.sigmoid(g)
        tl.store(sums_ptr + tl.num_programs(0).to(tl.int64) + unit, tl.sum(dg))
    out = (b * T + tok) * HV + hv
    tl.store(dg_ptr + out, dg.to(dg_ptr.dtype.element_ty), mask=ok)
    beta_at = beta_ptr + b * beta_strides[0] + tok * beta_strides[1] + hv * beta_strides[2]
    dbeta = dbeta_of(dots, tl.load(beta_at, mask=ok, other=1.0), BETA_MAX, LOW)
    tl.store(dbeta_ptr + out, dbeta.to(dbeta_ptr.dtype.element_ty), mask=ok)


class Gates:
    """The launch of the kernel above for all calls with the same facts.

    NQ, NK: blocks of V of by_query, by_key and ends.
    """

    __slots__ = ("kernel", "rows")

    def __init__(self, call: GdnCall, NQ: int, NK: int, config: dict):
        low = getattr(tl, str(call.q.dtype).split(".")[1])
        self.rows = call.rows
        self.kernel = Launch(
            _gates_bwd_kernel, self.rows * call.HV, call.device,
            numbers=(steps(call.g), steps(call.beta), *chunk_numbers(call)),
            constexprs=(call.HV, NQ, NK, call.options.beta_max, low),
            options=(("num_warps", config["num_warps"]),), guarded=True,
        )  # fmt: skip

    def __call__(self, g, beta, A_log, dt_bias, cu_seqlens, f, by_query, by_key, ends) -> tuple:
        """dg (of the raw gate with A_log), dbeta [B, T, HV]; dA_log, ddt_bias [HV] or None."""
        dg, dbeta, sums = g.new_empty(g.shape), beta.new_empty(beta.shape), None
        if A_log is not None:
            sums = g.new_empty((2, self.rows, g.shape[2]), dtype=torch.float32)
        inputs = (g, beta, A_log, dt_bias, cu_seqlens)
        self.kernel(*inputs, f, by_query, by_key, ends, dg, dbeta, sums)
        if sums is None:
            return dg, dbeta, None, None
        # two sums: the results of an operator may not share their memory
        dA_log = sums[0].sum(0).to(A_log.dtype)
        ddt_bias = None if dt_bias is None else sums[1].sum(0).to(dt_bias.dtype)
        return dg, dbeta, dA_log, ddt_bias
