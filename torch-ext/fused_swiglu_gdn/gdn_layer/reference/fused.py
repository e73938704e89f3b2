"""The computations of the layer's fused kernels in plain torch.

Sizes: B T, H and HV heads, K and V head dims, D = 2 H K + HV V channels, W taps, S columns.
"""

import torch

from ...gdn.chunks import count_sequences
from ...gdn.reference.common import gated_delta_gate, l2norm, without_autocast
from ...gdn.reference.recurrent import step_in_place
from ...runtime.dtypes import at_least_fp32
from ..call import LayerDecode
from .layer import causal_conv1d_fwd, causal_conv1d_update, rms_norm_gated_fwd


def _channels(q, k, v):
    """[B, D, T] of q, k [B, T, H, K] and v [B, T, HV, V]."""
    return torch.cat([x.flatten(2) for x in (q, k, v)], -1).transpose(1, 2)


def gdn_layer_prologue(
    q, k, v, weight, bias, cu_seqlens, initial_states, activation, final_width
):  # fmt: skip
    """act(conv([q, k, v])) [B, T, D], and the last `final_width` inputs [N, D, S] or None."""
    x, W = _channels(q, k, v), weight.shape[1]
    N = count_sequences(x.shape[0], cu_seqlens)
    before = initial_states
    if before is None:
        before = x.new_zeros(N, x.shape[1], W - 1)
    y, _ = causal_conv1d_fwd(x, weight, bias, None, cu_seqlens, before, activation, False)
    y = y.transpose(1, 2).contiguous()
    if final_width == 0:
        return y, None
    wide = torch.nn.functional.pad(before, (max(final_width - W + 1, 0), 0)).to(x.dtype)
    bounds = [0, x.shape[2]] if cu_seqlens is None else cu_seqlens.tolist()
    rows = [x] if cu_seqlens is None else [x[..., a:b] for a, b in zip(bounds, bounds[1:])]
    history = [wide] if cu_seqlens is None else list(wide.split(1))
    final = [torch.cat(pair, -1)[..., -final_width:] for pair in zip(history, rows)]
    return y, torch.cat(final) if final else wide[..., -final_width:]


@without_autocast
def gdn_layer_decode(call: LayerDecode):
    """One token between the projections, y [B, 1, HV, V]; both states are updated in place."""
    q, k, v, options = call.q, call.k, call.v.flatten(2, -2), call.options
    z, a, b, state = call.z.flatten(2, -2), call.a.flatten(2), call.b.flatten(2), call.state
    (B, _, H, K), (HV, V) = q.shape, v.shape[2:]
    conv = (call.conv_state, call.weight, call.bias, None, None, None, options.activation, -1)
    x = causal_conv1d_update(_channels(q, k, v), *conv)
    qk, v = at_least_fp32(x).squeeze(-1).split([2 * H * K, HV * V], -1)
    qk = l2norm(qk.view(B, 2, H, K)).repeat_interleave(HV // H, 2)  # [B, 2, HV, K]
    q, k = (y.reshape(B * HV, 1, K) for y in qk.unbind(1))
    decay = gated_delta_gate(a, call.A_log, call.dt_bias).exp().view(-1, 1, 1)
    beta = at_least_fp32(b).sigmoid().view(-1, 1, 1)
    beta = beta * 2 if options.allow_neg_eigval else beta
    heads = state.to(v.dtype).reshape(B * HV, K, V)  # the state itself, if it can be
    o = step_in_place(q, k, v.reshape(B * HV, 1, V), decay, beta, heads).view(B, 1, HV, V)
    if state.dtype != v.dtype or not state.is_contiguous():
        state.copy_(heads.view(state.shape))
    y = rms_norm_gated_fwd(o * K**-0.5, z, call.norm_weight, options.eps, options.gate_activation)
    return y.to(z.dtype).contiguous()
