"""The chain of the maps of segments that ranks have sent (call.GdnChain), in one launch."""

from typing import Callable, Optional

import torch
import triton
import triton.language as tl

from ...runtime.launch import Launch
from ...runtime.sizes import next_power_of_2
from ..call import GdnChain
from .primitives import EXACT_FP32, kv_strides

BLOCK_V = 16


@triton.jit(do_not_specialize=["HV", "WIDTH"])
def _chain_kernel(
    gathered_ptr,  # [slots of all ranks, HV, ROWS, K] fp32
    links_ptr,  # [pieces, WIDTH] int32
    given_ptr,  # [pieces, HV, K, V] or None
    out_ptr,  # [pieces, HV, K, V] fp32
    given_strides,  # of pieces, HV, K, V
    HV, WIDTH,
    K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, BACKWARD: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """BLOCK_V columns of the state of one value head, transposed: S^T <- N^T + S^T M^T."""
    NV: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    hv = ((pid // NV) % HV).to(tl.int64)
    n = (pid // (NV * HV)).to(tl.int64)
    d = tl.arange(0, BLOCK_K)
    e = (pid % NV) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_state = (e < V)[:, None] & (d < K)[None, :]
    is_m = (d < K)[:, None] & (d < K)[None, :]
    links_ptr += n * WIDTH
    count = tl.load(links_ptr)
    s = tl.zeros((BLOCK_V, BLOCK_K), tl.float32)  # [V, K]
    own_at = d[None, :] * V + e[:, None] if BACKWARD else e[:, None] * K + d[None, :]
    m_at = d[None, :] * K + d[:, None] if BACKWARD else d[:, None] * K + d[None, :]
    if count > 0:
        slot = tl.load(links_ptr + 1).to(tl.int64)
        s = tl.load(gathered_ptr + (slot * HV + hv) * (ROWS * K) + own_at, mask=is_state, other=0.0)
    for i in range(1, count):
        slot = tl.load(links_ptr + 1 + i).to(tl.int64)
        at = gathered_ptr + (slot * HV + hv) * (ROWS * K)
        m = tl.load(at + V * K + m_at, mask=is_m, other=0.0)
        own = tl.load(at + own_at, mask=is_state, other=0.0)
        s = tl.dot(s, m, own, input_precision=PREC)
    if given_ptr is not None:
        taken = is_state if BACKWARD else is_state & (count == 0)
        at = n * given_strides[0] + hv * given_strides[1]
        at += e[:, None] * given_strides[3] + d[None, :] * given_strides[2]
        s += tl.load(given_ptr + at, mask=taken, other=0.0).to(tl.float32)
    tl.store(out_ptr + (n * HV + hv) * (K * V) + d[None, :] * V + e[:, None], s, mask=is_state)


def prepare_gdn_chain_fwd(call: GdnChain) -> Optional[Callable]:
    """The call's tensors -> the states [pieces, HV, K, V]. For fp32 and K of up to 128."""
    gathered, given, (V, backward) = call.gathered, call.given, call.options
    P, slots, HV, ROWS, K = gathered.shape
    dtypes = {x.dtype for x in (gathered, given) if x is not None}
    if dtypes != {torch.float32} or K > 128 or not gathered.is_contiguous():
        return None
    shape = (len(call.links), HV, K, V)
    launch = Launch(
        _chain_kernel, shape[0] * HV * -(-V // BLOCK_V), call.device,
        numbers=(kv_strides(given, False), HV, call.links.shape[1]),
        constexprs=(
            K, V, ROWS, next_power_of_2(max(K, 16)), BLOCK_V, backward, EXACT_FP32
        ),
        options=(("num_warps", 8), ("num_stages", 1)), guarded=True,
    )  # fmt: skip

    def run(gathered, links, _, given):
        out = gathered.new_empty(shape)
        launch(gathered, links, given, out)
        return out

    return run
