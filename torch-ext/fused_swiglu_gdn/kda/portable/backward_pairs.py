"""The gradient of P and of the products of keys, chunk by chunk (docs/kda.md).

    dP = lower(dO vt^T)        N = -strictly_lower(dV vt^T)

as symmetric matrices without diagonals, which backward_channels.py multiplies from either side; the
diagonal of dP; and from that of dV vt^T

    dbeta = (dV . vt) / beta^2        with beta rounded as on the diagonal of Tb

Transposes are products of their own: Triton below 3.7.1 miscompiles a dot of a transposed
accumulator on Hopper (flash-linear-attention#640).

Sizes: B T H HV K V; N sequences; C = 64 tokens a chunk; rows = chunk rows of the call. K and V are
powers of two.
"""

import triton
import triton.language as tl

from ...gdn.portable.backward_query import tile
from ...gdn.portable.gates import dbeta_of
from ...gdn.portable.primitives import chunk_numbers, locate, precision
from ...runtime.launch import Launch, steps
from ..call import KdaCall


@triton.jit(do_not_specialize=["T", "N", "NT"])
def _pairs_bwd_kernel(
    beta_ptr,  # [B, T, HV]
    cu_ptr,  # [N + 1] int32 | int64, or None
    do_ptr,  # [B, T, HV, V]
    vt_ptr,  # [B, T, HV, V]
    dv_ptr,  # [B, T, HV, V]
    gates_ptr,  # [rows, HV, GATES, C] fp32: the diagonal of dP goes to row 2
    pairs_ptr,  # [rows, HV, 2, C, C]: dP and N
    dbeta_ptr,  # [B, T, HV]
    beta_strides, do_strides,
    T, N,
    NT,  # ceil(T / C), equal length
    HV: tl.constexpr, V: tl.constexpr, GATES: tl.constexpr,
    BETA_MAX: tl.constexpr,  # 0: beta as given
    BLOCK_V: tl.constexpr, STAGES: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dP and N of one chunk and value head; dbeta."""
    row = tl.program_id(0) // HV
    hv = (tl.program_id(0) % HV).to(tl.int64)
    n, c, start, length = locate(row, cu_ptr, T, N, NT, 64)
    if c * 64 >= length:
        return
    b = n.to(tl.int64) if cu_ptr is None else start * 0
    t = tl.arange(0, 64)
    i = t[:, None]
    j = t[None, :]
    first = start + c * 64
    ok = t < length - c * 64
    do_ptr += b * do_strides[0] + first * do_strides[1] + hv * do_strides[2]
    vt_ptr += ((b * T + first) * HV + hv) * V
    dv_ptr += ((b * T + first) * HV + hv) * V
    unit = row.to(tl.int64) * HV + hv
    dp = tl.zeros((64, 64), tl.float32)
    pd = tl.zeros((64, 64), tl.float32)  # transposed
    dn = tl.zeros((64, 64), tl.float32)
    nd = tl.zeros((64, 64), tl.float32)
    for v0 in tl.range(0, V, BLOCK_V, num_stages=STAGES):
        e = v0 + tl.arange(0, BLOCK_V)
        do = tile(do_ptr, t, do_strides[1], e, ok)  # [C, BLOCK_V]
        vt = tile(vt_ptr, t, HV * V, e, ok)
        dv = tile(dv_ptr, t, HV * V, e, ok)
        dp = tl.dot(do, tl.trans(vt), dp, input_precision=PREC)
        pd = tl.dot(vt, tl.trans(do), pd, input_precision=PREC)
        dn = tl.dot(dv, tl.trans(vt), dn, input_precision=PREC)
        nd = tl.dot(vt, tl.trans(dv), nd, input_precision=PREC)
    tl.store(gates_ptr + unit * (64 * GATES) + 128 + t, tl.sum(tl.where(i == j, dp, 0.0), 1))
    dots = tl.sum(tl.where(i == j, dn, 0.0), 1)
    dp = tl.where(i == j, 0.0, tl.where(i > j, dp, pd))
    dn = tl.where(i == j, 0.0, tl.where(i > j, -dn, -nd))
    low = pairs_ptr.dtype.element_ty
    pairs_ptr += unit * 8192 + i * 64 + j
    tl.store(pairs_ptr, dp.to(low))
    tl.store(pairs_ptr + 4096, dn.to(low))
    tok = first + t
    beta_at = beta_ptr + b * beta_strides[0] + tok * beta_strides[1] + hv * beta_strides[2]
    dbeta = dbeta_of(dots, tl.load(beta_at, mask=ok, other=1.0), BETA_MAX, low)
    dbeta_at = dbeta_ptr + (b * T + tok) * HV + hv
    tl.store(dbeta_at, dbeta.to(dbeta_ptr.dtype.element_ty), mask=ok)


def kda_backward_pairs(call: KdaCall, gates, do, vt, dv, config: dict) -> tuple:
    """dP and N [rows, HV, 2, C, C], dbeta; the diagonal of dP to gates[:, :, 2]."""
    rows, HV = gates.shape[:2]
    pairs = vt.new_empty((rows, HV, 2, 64, 64))
    dbeta = call.beta.new_empty(call.beta.shape)
    block = min(call.V, config["BLOCK_V"])
    kernel = Launch(
        _pairs_bwd_kernel, rows * HV, vt.device,
        numbers=(steps(call.beta), steps(do), *chunk_numbers(call)),
        constexprs=(
            HV, call.V, gates.shape[2], call.options.beta_max, block, config["STAGES"],
            precision(vt.dtype),
        ),
        options=(("num_warps", config["num_warps"]),),
    )  # fmt: skip
    kernel(call.beta, call.cu_seqlens, do, vt, dv, gates, pairs, dbeta)
    return pairs, dbeta
