"""One token of a Gated DeltaNet layer between its projections, in two launches.

    q, k, v = silu(conv([q, k, v]))        the convolution's state is shifted by a token
    S = exp(g) (I - beta k k^T) S + beta k v^T        o = scale * S^T q        k, q normalised
    y = weight * o / sqrt(mean(o^2) + eps) * act(z)

Sizes: B rows, H and HV heads, R = HV / H, K and V head dims, D = 2 H K + HV V channels, W taps, S
columns.
"""

import functools
from typing import Callable, Optional

import torch

from ...fp8.call import BLOCK, MOST, Quantised, padded
from ...fp8.portable.quantise import making
from ...gdn.portable.recurrent_step import is_dense, step_config
from ...runtime import device
from ...runtime.dtypes import served
from ...runtime.launch import Launch
from ...runtime.sizes import cdiv, next_power_of_2
from ..call import DecodeOptions, LayerDecode
from .decode_kernels import layer_finish_kernel, layer_step_kernel
from .prologue import channel_block


def _supports(call: LayerDecode) -> bool:
    """True for one token a row, contiguous last dimensions, head dims up to 256, contiguous
    parameters and state rows."""
    projected = (call.q, call.k, call.v, call.z, call.a, call.b)
    parameters = (call.weight, call.bias, call.A_log, call.dt_bias, call.norm_weight)
    K, V = call.q.shape[3], call.v.shape[-1]
    return (
        served(*projected, call.conv_state, call.state, call.weight, call.bias, call.norm_weight)
        and all(x.shape[1] == 1 and x.stride(-1) == 1 for x in projected)
        and (call.v.ndim == 4 or call.v.stride(3) == V)  # heads of a group side by side
        and channel_block(K, V) >= 16
        and max(K, V) <= 256
        and is_dense(call.state)
        and all(x is None or x.is_contiguous() for x in parameters)
    )


def _grouped(x: torch.Tensor, R: int, last: int) -> tuple:
    """Strides of a row, a group and a head in x, [B, 1, HV, ..] or [B, 1, H, R, ..]."""
    row, head = x.stride(0), x.stride(-1 - last)
    return (row, x.stride(2) if x.ndim == 4 + last else R * head, head)


def _step(call: LayerDecode, make: Callable, scales_of: Optional[Callable] = None) -> Callable:
    """A function of the tensors of all calls with the same shapes, strides, dtypes and options;
    make() gives what its result is written to: y, or codes, of which scales_of gives the scales."""
    q, k, v, z, a, b = call.q, call.k, call.v, call.z, call.a, call.b
    held, state, options, where = call.conv_state, call.state, call.options, call.device
    (B, _, H, K), (D, W), V = q.shape, call.weight.shape, v.shape[-1]
    HV, S, R = state.shape[1], held.shape[2], state.shape[1] // H
    pdl, config = device.overlaps_launches(where), step_config(where, K, 4, False)
    strides = (
        q.stride(0), q.stride(2), k.stride(0), k.stride(2), *_grouped(v, R, 1),
        *_grouped(a, R, 0)[:2], *_grouped(b, R, 0)[:2],
    )  # fmt: skip
    rule = Launch(
        layer_step_kernel,
        B * HV * cdiv(V, config["BLOCK_V"]),
        where,
        numbers=(strides, held.stride(), state.stride(0), K**-0.5),
        constexprs=(
            H, HV, K, V, S, W, options.activation is not None,
            2.0 if options.allow_neg_eigval else 1.0, pdl, next_power_of_2(K), config["BLOCK_V"],
        ),
        options=(("num_warps", config["num_warps"]),), guarded=True, early=pdl,
    )  # fmt: skip
    wide = v.shape[3:].numel()  # channels of v that lie side by side
    block = channel_block(K, wide)
    finish = Launch(
        layer_finish_kernel,
        B * HV + B * (D // block),
        where,
        numbers=(
            _grouped(z, R, 1), (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
            held.stride(), B * HV, padded(B), float(options.eps),
        ),
        constexprs=(
            H, HV, V, H * K, K, wide, D, S, options.gate_activation != "sigmoid", pdl,
            next_power_of_2(V), next_power_of_2(S), block,
        ),
        options=(("num_warps", 1),), guarded=True, early=pdl,
    )  # fmt: skip

    def run(q, k, v, z, a, b, held, state, weight, bias, A_log, dt_bias, norm_weight):
        o = torch.empty((B, HV, V), dtype=torch.float32, device=where)
        y = make()
        rule(q, k, v, a, b, held, weight, bias, A_log, dt_bias, state, o)
        if scales_of is None:
            finish(o, z, norm_weight, y, None, None, q, k, v, held)
            return y
        finish(o, z, norm_weight, None, y, scales_of(y), q, k, v, held)
        return Quantised(y, None)

    return run


def prepare_gdn_layer_decode(call: LayerDecode) -> Optional[Callable]:
    """The tensors of a call -> y [B, 1, HV, V]: convolution and rule, then norm and gate."""
    if not _supports(call):
        return None
    shape = (call.q.shape[0], 1, call.state.shape[1], call.v.shape[-1])
    make = functools.partial(torch.empty, shape, dtype=call.q.dtype, device=call.device)
    return _step(call, make)


def prepare_gdn_layer_decode_quantise(call: LayerDecode) -> Optional[Callable]:
    """The tensors of a call -> y in FP8 [P, HV V] for products of few tokens, of heads as wide as a
    block of scales; the rows behind those of the call are not written. None where it is served
    otherwise."""
    call = call._replace(options=DecodeOptions(*call.options))
    B, V = call.q.shape[0], call.v.shape[-1]
    if not 0 < B <= MOST or V != BLOCK or call.q.dtype is not torch.bfloat16:
        return None
    if not device.has_e4m3(call.device) or not _supports(call):
        return None
    return _step(call, *making(call.device, B, call.state.shape[1] * V))
