"""Kimi Delta Attention token by token: the kernels of the gated delta rule, with a gate for every
channel of the keys (gdn/portable/delta.py)."""

from typing import Callable, Optional

from ...gdn.portable.primitives import far_tokens
from ...gdn.portable.recurrent import prepare_gdn_recurrent_fwd
from ...runtime.copies import on_contiguous, on_dense
from ..call import KdaStepCall


def on_dense_gates(prepare: Callable, call, *apart: str) -> Optional[Callable]:
    """on_dense(prepare, call, *apart), where the kernels need contiguous gates of a token's
    heads, and those of chunks tokens that are not FAR from one another."""
    HV, K = call.g.shape[2:]
    dense = (K == 1 or call.g.stride(3) == 1) and (HV == 1 or call.g.stride(2) == K)
    places = set() if dense else {3}
    if not isinstance(call, KdaStepCall):
        places.update(far_tokens(call))
    return on_contiguous(lambda call: on_dense(prepare, call, *apart), call, places)


def prepare_kda_recurrent_fwd(call: KdaStepCall) -> Optional[Callable]:
    """The call's tensors -> o, and the final state, every state, the pool, or None: one launch."""
    return on_dense_gates(prepare_gdn_recurrent_fwd, call, "initial_state", "out")
