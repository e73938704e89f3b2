"""What a layer does round and with the gated delta rule, as its fused kernels have it.

Sizes: B T, H and HV heads, K and V head dims, D = 2 H K + HV V channels, W taps, S columns.
"""

import torch

from ...gdn.reference.recurrent import gdn_recurrent_fwd
from .layer import causal_conv1d_fwd, causal_conv1d_update, rms_norm_gated_fwd


def _channels(q, k, v):
    """[B, D, T] of q, k [B, T, H, K] and v [B, T, HV, V]."""
    return torch.cat([x.flatten(2) for x in (q, k, v)], -1).transpose(1, 2)


def gdn_layer_prologue(
    q, k, v, weight, bias, activation, cu_seqlens, initial_states, final_width
):  # fmt: skip
    """act(conv([q, k, v])) [B, T, D], and the last `final_width` inputs [N, D, S] or None."""
    x, W = _channels(q, k, v), weight.shape[1]
    N = x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    before = initial_states
    if before is None:
        before = x.new_zeros(N, x.shape[1], W - 1)
    y, _ = causal_conv1d_fwd(x, weight, bias, activation, None, cu_seqlens, before, False)
    y = y.transpose(1, 2).contiguous()
    if final_width == 0:
        return y, None
    wide = torch.nn.functional.pad(before, (max(final_width - W + 1, 0), 0)).to(x.dtype)
    bounds = [0, x.shape[2]] if cu_seqlens is None else cu_seqlens.tolist()
    rows = [x] if cu_seqlens is None else [x[..., a:b] for a, b in zip(bounds, bounds[1:])]
    history = [wide] if cu_seqlens is None else list(wide.split(1))
    final = [torch.cat(pair, -1)[..., -final_width:] for pair in zip(history, rows)]
    return y, torch.cat(final) if final else wide[..., -final_width:]


def gdn_layer_decode(
    q, k, v, z, a, b, conv_state, state, weight, bias, activation, A_log, dt_bias, norm_weight, eps,
    gate_activation, allow_neg_eigval,
):  # fmt: skip
    """One token between the projections, y [B, 1, HV, V]; both states are updated in place.

    v, z [B, 1, HV, V] and a, b [B, 1, HV], or with the heads as [H, HV / H].
    """
    v, z, a, b = v.flatten(2, -2), z.flatten(2, -2), a.flatten(2), b.flatten(2)
    (H, K), (HV, V) = q.shape[2:], v.shape[2:]
    x = causal_conv1d_update(_channels(q, k, v), conv_state, weight, bias, activation)
    q, k, v = x.transpose(1, 2).split([H * K, H * K, HV * V], -1)
    q, k, v = q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V))
    o, _ = gdn_recurrent_fwd(
        q, k, v, a, b, A_log, dt_bias, state, None, None, None, K**-0.5, True, True,
        allow_neg_eigval, False, True, True, False,
    )  # fmt: skip
    return rms_norm_gated_fwd(o, z, norm_weight, eps, gate_activation)
