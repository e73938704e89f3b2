"""The gradient of Gated DeltaNet prefill on Hopper: common/gdn_backward.py, whose kernels of the
queries and of the keys are one here (gdn_gradient.py).

Sizes: B batch, T tokens, H query/key heads, HV value heads, K = V = 128, C = 64 tokens a chunk,
rows of chunks as in docs/gdn.md.
"""

import torch

from ..common import gdn_backward as common
from ..common.launch import specialized_on, steps
from ..device import multiprocessor_count
from ..facts import facts, keep
from .gdn_gradient import gdn_gradient_kernel
from .gdn_plan import HEAD_DIM, has_wgmma, reads_by_tma, token_map
from .gluon_compat import box
from .tiles import Tiles, tiled

# of the keys' warps, and of those that load or have little to do; the queries' get as many as the
# keys', of 12 x 168
KEY_REGISTERS, FEW_REGISTERS, CAP = 232, 40, 168


def supports_gdn_chunk_bwd(q, k, v, *_) -> bool:
    """Half precision, K = V = 128; layouts are the launcher's to mend."""
    return (
        has_wgmma(q.device)
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.dtype == k.dtype == v.dtype
        and q.shape[3] == v.shape[3] == HEAD_DIM
        and 0 < q.shape[0] * q.shape[1] < 2**30
    )


def gdn_chunk_bwd(*args):
    """As common's."""
    return common.gdn_chunk_bwd(*args, chunks=_query_and_key)


_plans: dict = {}


def _query_and_key(
    q, k, g, A_log, dt_bias, cu_seqlens, f, do, h, dh, vt, dv, scale, use_qk_l2norm, config
):
    """As common's query_and_key; config is not used."""
    q, k, do = (x if reads_by_tma(x) else x.clone(memory_format=torch.contiguous_format)
                for x in (q, k, do))  # fmt: skip
    inputs = (q, k, g, A_log, dt_bias, cu_seqlens)
    key = (facts(*inputs, f, do), scale, use_qk_l2norm, tuple(map(specialized_on, inputs[2:])))
    plan = _plans.get(key)
    if plan is None:
        plan = keep(_plans, key, _Plan(*inputs, f, do, scale, use_qk_l2norm))
    return plan(*inputs, f, do, h, dh, vt, dv)


class _Plan:
    """The launch, for calls of one kind."""

    __slots__ = ("tiles", "numbers", "grid", "kernel")

    def __init__(self, q, k, g, A_log, dt_bias, cu_seqlens, f, do, scale, use_qk_l2norm):
        (B, T, H, K), (rows, HV) = q.shape, f.shape[:2]
        packed = cu_seqlens is not None
        made = (T * HV * K, HV * K, K, 1)  # strides of vt and dv
        states = ((rows * HV * K, K), (K, 1), *box(q.dtype, K, 64))
        self.tiles = Tiles(
            *(token_map(x.shape, x.stride(), x.dtype, K, packed) for x in (q, k)),
            token_map(do.shape, do.stride(), do.dtype, 64, packed),
            *(token_map(do.shape, made, do.dtype, 64, packed) for _ in range(2)),
            states, states,
        )  # fmt: skip
        count = rows * H
        self.grid = (min(multiprocessor_count(q.device.index), count), 1, 1)
        N = cu_seqlens.shape[0] - 1 if packed else B
        self.numbers = (steps(g), T, N, -(-T // 64), scale, count)
        constexprs = (H, HV // H, use_qk_l2norm, KEY_REGISTERS, FEW_REGISTERS)
        options = (("num_warps", 4), ("maxnreg", CAP))
        given = map(specialized_on, (g, A_log, dt_bias, cu_seqlens))
        kind = (q.device, q.dtype, *given, steps(g))
        self.kernel = tiled(gdn_gradient_kernel, constexprs, options, *kind)

    def __call__(self, q, k, g, A_log, dt_bias, cu_seqlens, f, do, h, dh, vt, dv):
        rows, HV = f.shape[:2]
        dq, dk = q.new_empty(q.shape), k.new_empty(k.shape)
        cumulative, ends = f.new_empty(rows, HV, 64), f.new_empty(rows, HV, 1)
        by_query, by_key = f.new_empty(rows, HV, 1, 8, 64), f.new_empty(rows, HV, 1, 8, 64)
        tensors = (q, k, do, vt, dv, h, dh)
        pointers = (g, A_log, dt_bias, cu_seqlens, f, dq, dk, cumulative, by_query, by_key, ends)
        self.kernel.launch(self.grid, self.tiles, tensors, pointers, *self.numbers)
        return dq, dk, cumulative, by_query, by_key, ends
