"""Decoding with deferred state write-back: kernels of gdn/reference/replay.py.

    S = exp(c) S_0 + sum_j w_j u_j k_j^T    c = g_1 + .. + g_now    w_j = exp(g_{j+1} + .. + g_now)
    S k = exp(c) S_0 k + sum_j w_j (k_j . k) u_j                    S q likewise

so a token takes two dot products with each row of the ring, and the state need not be rebuilt. The
products of keys are the same for all rows of a state: a launch of its own computes them, so that
the programs that read states wait only for their loads.

Sizes: N sequences, T tokens of each, H and HV heads, K and V head dims, P rows of states and ring,
R rows of tokens in a ring, m of them in use from row `first` on, cyclically.
"""

from typing import Callable, Optional

import torch

from ...runtime import tuning
from ...runtime.copies import on_dense
from ...runtime.device import overlaps_launches
from ...runtime.dtypes import served
from ...runtime.launch import Launch
from ...runtime.sizes import cdiv, next_power_of_2
from ..call import ReplayCall, RingAdvance, RingMaterialise
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
    size, most = state.element_size(), next_power_of_2(K)
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
        blocks = tuple(map(next_power_of_2, (call.K, R)))
        self.factors = (N, HV, T, 2, R + T + 2)
        self.products = Launch(
            replay_products_kernel, N * HV, q.device, numbers=(strides, options.scale),
            constexprs=(
                H, HV, call.K, T, R, *facts, options.use_qk_l2norm, options.beta_max, pdl, *blocks,
            ),
            options=(("num_warps", 1),), guarded=True,
        )  # fmt: skip
        self.step = Launch(
            replay_kernel, N * HV * cdiv(call.V, config["BLOCK_V"]), q.device,
            numbers=(strides,),
            constexprs=(
                H, HV, call.K, call.V, T, R, *facts, pdl, *blocks, config["BLOCK_V"],
                config["K_PART"], config["EVICT"],
            ),
            options=(("num_warps", config["num_warps"]),), guarded=True, early=pdl,
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


def prepare_gdn_replay_fwd(call: ReplayCall) -> Optional[Callable]:
    """The call's tensors -> o: two launches; the ring, or the states, are written in place."""
    held = (call.initial_state, call.ring_k, call.ring_u, call.ring_g)
    if not (served(call.q, call.g, call.beta, *held) and _rows_are_dense(*held)):
        return None
    if call.T > MOST_TOKENS:
        return None
    return on_dense(Replay, call, "initial_state", "ring_k", "ring_u", "ring_g", "cursor", "out")


def prepare_gdn_ring_advance(call: RingAdvance) -> Callable:
    """The call's tensors -> None; the cursor is written in place."""
    return on_dense(_advance, call, "cursor", "ring_k", "ring_u", "ring_g")


def _advance(call: RingAdvance) -> Callable:
    (max_tokens, null_index), N = call.options, call.cursor.shape[0]
    kernel = Launch(
        advance_kernel, cdiv(N, ADVANCED), call.device, numbers=(N,),
        constexprs=(call.ring_g.shape[2], max_tokens, null_index + 1, ADVANCED), guarded=True,
    )  # fmt: skip
    return lambda cursor, accepted, force, rows, *ring: kernel(cursor, accepted, force, rows)


def prepare_gdn_ring_materialise(call: RingMaterialise) -> Optional[Callable]:
    """The call's tensors -> the states with all tokens of the ring."""
    held = call[:4]
    if not (served(*held) and _rows_are_dense(*held)):
        return None
    return on_dense(_materialise, call, "state", "ring_k", "ring_u", "ring_g", "cursor")


def _materialise(call: RingMaterialise) -> Callable:
    state, (_, null_index, inplace) = call.state, call.options
    (_, HV, V, K), (_, H, R, _), N = state.shape, call.ring_k.shape, call.cursor.shape[0]
    config = _tile(state.device, K, state)
    kernel = Launch(
        materialise_kernel, N * HV * cdiv(V, config["BLOCK_V"]), state.device,
        numbers=(tuple(x.stride(0) for x in call[:4]),),
        constexprs=(
            H, HV, K, V, R, null_index + 1, *map(next_power_of_2, (K, R)),
            config["BLOCK_V"], config["K_PART"],
        ),
        options=(("num_warps", config["num_warps"]),), guarded=True,
    )  # fmt: skip

    def run(state, *more):
        out = None if inplace else state.new_empty(N, HV, V, K, dtype=torch.float32)
        kernel(state, *more, out)
        return state if inplace else out

    return run
