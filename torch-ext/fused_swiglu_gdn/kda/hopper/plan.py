"""Calls of Kimi Delta Attention that the kernels of Hopper take, and the launch of prepare."""

from typing import Tuple, Union

import torch

from ...gdn.chunks import CHUNK
from ...gdn.hopper.plan import block_map, lies_for_tma, token_map
from ...runtime import device
from ...runtime.dtypes import HALF
from ...runtime.launch import Launch, steps
from ..call import KdaBackward, KdaCall
from .prepare import kda_prepare_fwd_kernel

HEAD_DIM = 128
PREPARE_CAP = 168  # registers of a thread of prepare: three programs a multiprocessor


class Prepare:
    """The launch of prepare for calls of one kind: shapes, strides, dtypes and options are
    known."""

    __slots__ = ("kernel", "rows", "shape", "keep", "cut")

    def __init__(
        self,
        call: Union[KdaCall, KdaBackward],
        keep: bool = False,
        cuts: Tuple[int, int, int] = (1, 1, 0),
    ):
        """keep: for the gradient; cuts: the most segments of a sequence that the scan computes, the
        fewest tokens of one, and how many chunks before each it looks at."""
        q, k, H, HV, options = call.q, call.k, call.H, call.HV, call.options
        self.rows, self.shape = call.rows, (call.B, call.T, HV, call.K)
        self.keep, self.cut = keep, cuts[0] > 1
        packed, block = call.cu_seqlens is not None, block_map(self.rows * HV, q.dtype)
        tokens = (token_map(x.shape, x.stride(), x.dtype, 32, packed) for x in (q, k, call.g))
        kept = block_map(self.rows * HV, torch.float16) if keep else None
        chunks = (call.T, call.N, -(-call.T // CHUNK))
        self.kernel = Launch(
            kda_prepare_fwd_kernel, self.rows * HV, q.device, maps=(*tokens, block, block, kept),
            numbers=(steps(call.beta), *chunks, *cuts, options.scale),
            constexprs=(HV, HV // H, options.beta_max, options.lower_bound),
            options=(("num_warps", 4), ("maxnreg", PREPARE_CAP)), guarded=True,
        )  # fmt: skip

    def __call__(self, q, k, g, beta, A_log, dt_bias, cu_seqlens) -> tuple:
        """Tb, P [rows, HV, C, C]; Kd, Qd, Ke [B, T, HV, K]; gam [rows, HV, K] fp32; with
        `keep` what the portable Prepare returns behind them; with cuts decay [rows, HV] fp32."""
        rows, (*_, HV, K) = self.rows, self.shape
        tb, p = q.new_empty((2, rows, HV, CHUNK, CHUNK)).unbind(0)
        kd, qd, ke = q.new_empty((3, *self.shape)).unbind(0)
        gam = g.new_empty((rows, HV, K), dtype=torch.float32)
        factors = kept = None
        decay = gam.new_empty((rows, HV)) if self.cut else None
        if self.keep:
            kept = tb.new_empty(tb.shape, dtype=torch.float16)
            factors = gam.new_empty((rows, HV, 3, CHUNK))
        inputs = (q, k, g, tb, p, kept, beta, A_log, dt_bias, cu_seqlens)
        self.kernel(*inputs, kd, qd, ke, gam, decay, factors)
        found = tb, p, kd, qd, ke, gam, factors, kept
        return (*found, decay) if self.cut else found


def computes(call: Union[KdaCall, KdaBackward]) -> bool:
    """True for calls whose prepare this kernel computes, if q, k and g begin at multiples of 16
    bytes: with keys of length 1, whose products fit fp16."""
    return (
        device.has_wgmma(call.device)
        and call.options.use_qk_l2norm
        and call.q.dtype in HALF
        and call.q.dtype == call.k.dtype == call.v.dtype
        and call.K == HEAD_DIM
        and 0 < call.B * call.T < 2**30
        and (call.cu_seqlens is None or call.N > 0)
        and all(map(lies_for_tma, (call.q, call.k, call.g)))
    )
