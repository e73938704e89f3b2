"""Kimi Delta Attention token by token: the kernels of the gated delta rule, with a gate for every
channel of the keys (gdn/portable/delta.py)."""

from ...gdn.portable import recurrent
from ..call import KdaStepCall


def together(g) -> bool:
    """The gates of a token's heads lie side by side, as the kernels take them."""
    HV, K = g.shape[2:]
    return (K == 1 or g.stride(3) == 1) and (HV == 1 or g.stride(2) == K)


def supports_kda_recurrent_fwd(call: KdaStepCall) -> bool:
    """What gdn_recurrent_fwd serves, and gates whose heads lie side by side."""
    return together(call.g) and recurrent.supports_gdn_recurrent_fwd(call)


def plan_kda_recurrent_fwd(call: KdaStepCall):
    """What serves all calls like this one, from the tensors alone, if each sequence has a token."""
    return recurrent.plan_gdn_recurrent_fwd(call)


def kda_recurrent_fwd(call: KdaStepCall) -> tuple:
    """One launch: o, and the final state, the states after every token, the pool, or None."""
    return recurrent.gdn_recurrent_fwd(call)
