"""The gradient of chunked Kimi Delta Attention (docs/kda.md).

Prepare; both passes over the states in one launch, which is that of the gated delta rule; then all
chunks in parallel: pairs of tokens with beta, channels with gates, norms, and dbeta for beta close
to zero. There are no atomics, so results are deterministic.
"""

import functools
from typing import Callable, Optional

import torch

from ...gdn.portable.backward import cut, fitted, near, padded
from ...gdn.portable.backward_beta import small_betas
from ...gdn.portable.backward_states import gdn_backward_states
from ...gdn.portable.padding import padding_launch
from ...gdn.portable.primitives import are_served
from ...runtime import device
from ...runtime.tuning import lookup
from ..call import KdaBackward, has_gradient
from .backward_channels import kda_backward_channels
from .backward_norms import kda_backward_norms
from .backward_pairs import kda_backward_pairs
from .prepare import Prepare
from .recurrent import on_dense_gates


def prepare_kda_chunk_bwd(
    call: KdaBackward,
    prepare_kind: Callable = lambda call: Prepare,
    states_kind: Callable = lambda call, do: gdn_backward_states,
    channels_kind: Callable = lambda call, do: kda_backward_channels,
) -> Optional[Callable]:
    """The call's tensors -> dq, dk, dv, dg, dbeta, dA_log, ddt_bias, d_initial_state; None for
    arguments that were not given. With values_only, only dv and d_initial_state.

    For the head dims and dtypes of has_gradient. prepare_kind(call): the class of the first launch;
    states_kind(call, do), channels_kind(call, do): the functions of the passes over the states, and
    of the channels.
    """
    if not are_served(call) or not has_gradient(call.K, call.V, call.q.dtype, call.q.device):
        return None

    def prepare(call: KdaBackward) -> Callable:
        options = call.options
        kinds = (prepare_kind, states_kind, channels_kind)
        return lambda *tensors: _gradients(KdaBackward(*tensors, options), *kinds)

    return on_dense_gates(prepare, call, "initial_state", "do", "d_final_state")


@functools.lru_cache(maxsize=256)
def configuration(units: int, K: int, V: int, size: int, where: torch.device) -> dict:
    """Launch configurations of the phases for `units` sequences and value heads."""
    name = "portable_kda_chunk_bwd_wide" if size > 2 else "portable_kda_chunk_bwd"
    return fitted(lookup(name, where, units=units), K, V, size, where)


def _of_powers_of_two(call: KdaBackward) -> KdaBackward:
    """A call of the same values whose head dims are filled up with zeros."""
    q, k, v = (near(padded(x, 0)) for x in (call.q, call.k, call.v))
    g, dt_bias, start = padded(call.g, 0), call.dt_bias, call.initial_state
    if dt_bias is not None:
        dt_bias = padded(dt_bias.reshape(call.HV, call.K), 0).reshape(-1)
    start = None if start is None else padded(start, 1)
    return call._replace(q=q, k=k, v=v, g=g, dt_bias=dt_bias, initial_state=start)


def _gates(call: KdaBackward, given: KdaBackward, dg, sums) -> tuple:
    """dg, dA_log and ddt_bias like the arguments; None for those that were not given."""
    dA_log = ddt_bias = None
    if call.A_log is not None:
        dA_log = sums[0].sum((0, 2)).to(call.A_log.dtype)
    if call.dt_bias is not None:
        ddt_bias = cut(sums[1].sum(0), given.K).reshape(given.dt_bias.shape).to(call.dt_bias.dtype)
    return cut(dg, given.K), dA_log, ddt_bias


def _gradients(
    call: KdaBackward, prepare_kind: Callable, states_kind: Callable, channels_kind: Callable
) -> tuple:
    given = call
    do, d_final = near(padded(call.do, 0)), call.d_final_state
    d_final = None if d_final is None else padded(d_final, 1)
    call = _of_powers_of_two(call)
    config = configuration(call.N * call.HV, call.K, call.V, call.q.element_size(), call.q.device)
    q, k, v, g, beta, A_log, dt_bias, _, cu_seqlens, *_ = call
    with device.on(q.device):
        prepare = prepare_kind(call)(call, keep=True)
        prepared = prepare(q, k, g, beta, A_log, dt_bias, cu_seqlens)
        tb, p, kd, qd, ke, gam, gates, kept, *_ = prepared
        decayed = call._replace(q=qd, k=kd)
        h, dh, vt, dv, d_initial = states_kind(call, do)(
            decayed, do, d_final, tb, p, gam, config["states"], ke
        )
        dq = dk = dg = dbeta = dA_log = ddt_bias = None
        if not call.options.values_only:
            pairs, dbeta = kda_backward_pairs(call, gates, do, vt, dv, config["pairs"])
            to_q, to_k, dg, sums = channels_kind(call, do)(
                call, gates, do, vt, dv, h, dh, pairs, config["channels"]
            )
            dq, dk = kda_backward_norms(call, to_q, to_k, config["norms"])
            betas = small_betas(decayed, do, config["beta"], kept.stride(1))
            betas(kd, v, beta, cu_seqlens, p, None, None, kept, ke, do, vt, dv, h, dh, dbeta)
            dq, dk = cut(dq, given.K), cut(dk, given.K)
            dg, dA_log, ddt_bias = _gates(call, given, dg, sums)
    if d_initial is not None:
        d_initial = cut(d_initial, *given.initial_state.shape[2:])
    found = dq, dk, cut(dv, given.V), dg, dbeta
    padding = padding_launch(given)
    if padding is not None:
        padding(cu_seqlens, *found)
    return (*found, dA_log, ddt_bias, d_initial)
