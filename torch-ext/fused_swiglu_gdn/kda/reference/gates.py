"""The gates of Kimi Delta Attention."""

from typing import Optional

import torch
import torch.nn.functional as F

from ...runtime.dtypes import at_least_fp32


def kda_gate(
    a: torch.Tensor,  # [..., HV, K]
    A_log: Optional[torch.Tensor],  # [HV]
    dt_bias: Optional[torch.Tensor],  # [HV * K]
    lower_bound: Optional[float],
) -> torch.Tensor:
    """g = -exp(A_log) * softplus(a + dt_bias), or lower_bound * sigmoid(exp(A_log) * (a +
    dt_bias)): the natural-log decay of every channel, [..., HV, K], at least in fp32."""
    a = at_least_fp32(a)
    if dt_bias is not None:
        a = a + at_least_fp32(dt_bias).view(a.shape[-2:])
    rate = 1.0 if A_log is None else at_least_fp32(A_log).exp().unsqueeze(-1)
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(rate * a)
    return -rate * F.softplus(a)


def activated(call):
    """A call whose gates are the natural-log decays."""
    if call.A_log is None and call.options.lower_bound is None:
        return call
    g = kda_gate(call.g, call.A_log, call.dt_bias, call.options.lower_bound)
    options = call.options._replace(lower_bound=None)
    return call._replace(g=g, A_log=None, dt_bias=None, options=options)
