"""Kimi Delta Attention (arXiv:2510.26692), token by token: the definition.

S_t = (I - beta_t k_t k_t^T) Diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T
o_t = scale * S_t^T q_t
"""

from ...gdn.reference.recurrent import gdn_recurrent_fwd
from ..call import KdaStepCall
from .gates import activated


def kda_recurrent_fwd(call: KdaStepCall):
    """o [B, T, HV, V] and the final state fp32, all states [B, T, HV, K, V], the pool, or None."""
    return gdn_recurrent_fwd(activated(call))
