"""One call of Kimi Delta Attention: a call of the gated delta rule whose gates are [B, T, HV, K].

Sizes as in gdn/call.py.
"""

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from ..gdn.call import GdnCall, RecurrentCall, of_beta, with_sizes
from ..runtime import device
from ..runtime.dtypes import SERVED


class KdaOptions(NamedTuple):
    """Options of the chunked form."""

    scale: float
    use_qk_l2norm: bool = False
    use_beta_sigmoid: bool = False
    allow_neg_eigval: bool = False
    state_v_first: bool = False
    output_final_state: bool = False
    state_dtype: Optional[torch.dtype] = None  # of the states that are returned; None: fp32
    checkpoint_every: int = 0  # tokens; 0: no checkpoints
    lower_bound: Optional[float] = None  # of gates that are raw; None: they have none

    beta_max = property(of_beta)


@with_sizes
class KdaCall(GdnCall):
    """A call of the chunked form: g is [B, T, HV, K] and dt_bias [HV * K]."""

    __slots__ = ()
    options: KdaOptions
    channels = True


@with_sizes
class KdaBackward(NamedTuple):
    """A call of the gradient of the chunked form."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor  # [B, T, HV, V]
    g: Tensor  # [B, T, HV, K]
    beta: Tensor  # [B, T, HV]
    A_log: Optional[Tensor]  # [HV]
    dt_bias: Optional[Tensor]  # [HV * K]
    initial_state: Optional[Tensor]  # [N, HV, K, V]
    cu_seqlens: Optional[Tensor]  # [N + 1]
    do: Tensor  # [B, T, HV, V]
    d_final_state: Optional[Tensor]  # [N, HV, K, V]
    options: KdaOptions

    channels = True
    state_indices = None  # through a pool there is no gradient


@with_sizes
class KdaStepCall(RecurrentCall):
    """A call of the form that goes token by token: g is [B, T, HV, K] and dt_bias [HV * K]."""

    __slots__ = ()
    channels = True


def has_gradient(K: int, V: int, dtype: torch.dtype, where: torch.device) -> bool:
    """True if the gradient's kernels take head dims and a dtype on a device: keys of up to 128,
    values of up to 256, and fp32 where a program may have more than 100 KB of shared memory."""
    fits = K <= 128 and V <= 256 and dtype in SERVED
    if dtype == torch.float32 and where.type == "cuda" and not device.is_amd(where):
        return fits and (device.has_wgmma(where) or device.has_tensor_memory(where))
    return fits
