"""Calls of Kimi Delta Attention: calls of the gated delta rule whose gates are [B, T, HV, K].

Sizes as in gdn/call.py.
"""

import torch

from ..gdn.call import GdnBackward, GdnCall, RecurrentCall, with_sizes
from ..runtime import device
from ..runtime.dtypes import SERVED


@with_sizes
class KdaCall(GdnCall):
    """A call of the chunked form: g is [B, T, HV, K] and dt_bias [HV * K]."""

    __slots__ = ()
    channels = True


@with_sizes
class KdaBackward(GdnBackward):
    """A call of the gradient of the chunked form; its tb, p and f are None."""

    __slots__ = ()
    channels = True


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
