"""Kimi Delta Attention token by token: the kernels of the gated delta rule, with a gate for every
channel of the keys (gdn/portable/delta.py)."""

from ...gdn.portable import recurrent
from ..call import KdaStepCall


def together(g) -> bool:
    """The gates of a token's heads lie side by side, as the kernels take them."""
    HV, K = g.shape[2:]
    return (K == 1 or g.stride(3) == 1) and (HV == 1 or g.stride(2) == K)


def supports_kda_recurrent_fwd(call: KdaStepCall) -> bool:
    """True for calls that gdn_recurrent_fwd supports, with gates whose heads are contiguous."""
    return together(call.g) and recurrent.supports_gdn_recurrent_fwd(call)


def plan_kda_recurrent_fwd(call: KdaStepCall):
    """Returns a function of the tensors for calls that match, if each sequence has one token."""
    return recurrent.plan_gdn_recurrent_fwd(call)


def kda_recurrent_fwd(call: KdaStepCall) -> tuple:
    """One launch: o, and the final state, the states after every token, the pool, or None."""
    return recurrent.gdn_recurrent_fwd(call)
