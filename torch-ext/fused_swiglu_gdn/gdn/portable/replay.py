"""Decoding with deferred state write-back: kernels of gdn/reference/replay.py.

    S = exp(c) S_0 + sum_j w_j u_j k_j^T    c = g_1 + .. + g_now    w_j = exp(g_{j+1} + .. + g_now)
    S k = exp(c) S_0 k + sum_j w_j (k_j . k) u_j                    S q likewise

so a token takes two dot products with each row of the ring, and the state need not be rebuilt. The
products of keys are the same for all rows of a state: a launch of its own computes them, so that
the programs that read states wait only for their loads.

Sizes: N sequences, T tokens of each, H and HV heads, K and V head dims, P rows of states and ring,
R rows of tokens in a ring, m of them in use from row `first` on, cyclically.
"""

from typing import Optional

import torch
import triton

from ...runtime import tuning
from ...runtime.cache import CallCache
from ...runtime.device import overlaps_launches
from ...runtime.dtypes import served
from ...runtime.launch import Launch
from ..call import ReplayCall
from .recurrent_step import is_dense
from .replay_kernels import (
    advance_kernel,
    materialise_kernel,
    replay_kernel,
    replay_products_kernel,
)

MOST_TOKENS = 8  # of a call: the kernel is unrolled over them
ADVANCED = 128  # sequences a program


def _rows_are_dense(*tensors: torch.Tensor) -> bool:
    """True if each row of the states, of the ring's k and u [P, .., .., ..] and of its g is
    contiguous."""
    *wide, g = tensors
    return all(map(is_dense, wide)) and is_dense(g.unsqueeze(2))


def _tile(device, K: int, state: torch.Tensor) -> dict:
    size, most = state.element_size(), triton.next_power_of_2(K)
    config = tuning.lookup("portable_gdn_replay_fwd", device, K=K, STATE_BYTES=size)
    return {**config, "K_PART": min(config["K_PART"], most)}


class Replay:
    """The launches of T tokens a sequence for all calls with the same shapes, strides, dtypes and
    options."""

    __slots__ = ("products", "step", "factors")

    def __init__(self, call: ReplayCall):
        q, k, v, g, beta, options = call.q, call.k, call.v, call.g, call.beta, call.options
        state, (N, H, HV, T, R) = call.initial_state, (call.N, call.H, call.HV, call.T, call.R)
        config, pdl = _tile(q.device, call.K, state), overlaps_launches(q.device)
        held = (state, call.ring_k, call.ring_u, call.ring_g)
        strides = (
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *g.stride()[:2], *beta.stride()[:2],
            *(x.stride(0) for x in held),
        )  # fmt: skip
        facts = (options.max_tokens, options.null_index + 1)
        blocks = tuple(map(triton.next_power_of_2, (call.K, R)))
        self.factors = (N, HV, T, 2, R + T + 2)
        self.products = Launch(
            replay_products_kernel, N * HV, q.device, numbers=(strides, options.scale),
            constexprs=(
                H, HV, call.K, T, R, *facts, options.use_qk_l2norm, options.beta_max, pdl, *blocks,
            ),
            options=(("num_warps", 1),), guarded=True,
        )  # fmt: skip
        self.step = Launch(
            replay_kernel, N * HV * triton.cdiv(call.V, config["BLOCK_V"]), q.device,
            numbers=(strides,),
            constexprs=(
                H, HV, call.K, call.V, T, R, *facts, pdl, *blocks, config["BLOCK_V"],
                config["K_PART"], config["EVICT"],
            ),
            options=(
                ("num_warps", config["num_warps"]), *((("launch_pdl", True),) if pdl else ()),
            ),
            guarded=True,
        )  # fmt: skip

    def __call__(
        self, q, k, v, g, beta, A_log, dt_bias, state, ring_k, ring_u, ring_g, cursor, force, rows,
        out,
    ) -> torch.Tensor:  # fmt: skip
        """o [N, T, HV, V]."""
        into = out is not None and out.is_contiguous()
        o = out if into else torch.empty(v.shape, dtype=v.dtype, device=v.device)
        factors = torch.empty(self.factors, dtype=torch.float32, device=v.device)
        place = (cursor, force, rows, factors)
        self.products(q, k, g, beta, A_log, dt_bias, ring_k, ring_g, *place)
        self.step(q, k, v, state, ring_k, ring_u, ring_g, *place, o)
        return o if out is None or into else out.copy_(o)


_replays = CallCache()


def supports_gdn_replay_fwd(call: ReplayCall) -> bool:
    """True for fp16, bf16 and fp32 in memory that the kernel can write; g of the ring is in
    fp32."""
    held = (call.initial_state, call.ring_k, call.ring_u, call.ring_g)
    dense = _rows_are_dense(*held)
    return served(call.q, call.g, call.beta, *held) and dense and call.T <= MOST_TOKENS


def plan_gdn_replay_fwd(call: ReplayCall) -> Replay:
    """Returns a function of the tensors for all calls that match this one."""
    key = (call.tensors, call.options)
    return _replays.find(*key) or _replays.keep(*key, Replay(call))


def gdn_replay_fwd(call: ReplayCall) -> torch.Tensor:
    """Two launches: o; the ring, or the states, are written in place."""
    return plan_gdn_replay_fwd(call)(*call.tensors)


def supports_gdn_ring_advance(
    cursor, accepted, force_flush, state_indices, R: int, max_tokens: int, null_index: int
) -> bool:  # fmt: skip
    return True


def plan_gdn_ring_advance(
    cursor, accepted, force_flush, state_indices, R: int, max_tokens: int, null_index: int
) -> Launch:  # fmt: skip
    """Returns a function of the tensors for all calls that match this one."""
    N = cursor.shape[0]
    return Launch(
        advance_kernel, triton.cdiv(N, ADVANCED), cursor.device, numbers=(N,),
        constexprs=(R, max_tokens, null_index + 1, ADVANCED),
    )  # fmt: skip


def gdn_ring_advance(
    cursor: torch.Tensor, accepted: Optional[torch.Tensor], force_flush: Optional[torch.Tensor],
    state_indices: Optional[torch.Tensor], R: int, max_tokens: int, null_index: int,
) -> torch.Tensor:  # fmt: skip
    """Updates the cursor in place and returns it."""
    tensors = (cursor, accepted, force_flush, state_indices)
    plan_gdn_ring_advance(*tensors, R, max_tokens, null_index)(*tensors)
    return cursor


def supports_gdn_ring_materialise(
    state, ring_k, ring_u, ring_g, cursor, state_indices, null_index: int, inplace: bool
) -> bool:  # fmt: skip
    held = (state, ring_k, ring_u, ring_g)
    return served(*held) and _rows_are_dense(*held)


def gdn_ring_materialise(
    state: torch.Tensor, ring_k: torch.Tensor, ring_u: torch.Tensor, ring_g: torch.Tensor,
    cursor: torch.Tensor, state_indices: Optional[torch.Tensor], null_index: int,
    inplace: bool,
) -> torch.Tensor:  # fmt: skip
    """The states with all tokens of the ring."""
    (_, HV, V, K), (_, H, R, _), N = state.shape, ring_k.shape, cursor.shape[0]
    config = _tile(state.device, K, state)
    out = None
    if not inplace:
        out = torch.empty(N, HV, V, K, dtype=torch.float32, device=state.device)
    kernel = Launch(
        materialise_kernel, N * HV * triton.cdiv(V, config["BLOCK_V"]), state.device,
        numbers=(tuple(x.stride(0) for x in (state, ring_k, ring_u, ring_g)),),
        constexprs=(
            H, HV, K, V, R, null_index + 1, *map(triton.next_power_of_2, (K, R)),
            config["BLOCK_V"], config["K_PART"],
        ),
        options=(("num_warps", config["num_warps"]),),
    )  # fmt: skip
    kernel(state, ring_k, ring_u, ring_g, cursor, state_indices, out)
    return state if inplace else out
