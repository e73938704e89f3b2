"""Checks of RMSNorm."""

from ..runtime.checks import (
    agrees,
    are_flags,
    has_form,
    has_last,
    has_shape_of,
    is_floating,
    is_number,
    is_one_of,
)
from ..runtime.ops import needs_grad
from .call import RmsNorm, RmsNormOptions

CASTING_MODES = ("llama", "gemma")


def rms_norm(call: RmsNorm) -> RmsNorm:
    x, weight, residual, (eps, casting_mode, offset, after) = call
    has_last("x", x, "D")
    is_floating("x", x)
    if weight is not None:
        has_form("weight", weight, "D", {"D": x.shape[-1]}, "x", x)
    if residual is not None:
        has_shape_of("residual", residual, "x", x)
        agrees("residual", residual, "x", x)
    is_number("eps", eps, "non-negative")
    is_one_of("casting_mode", casting_mode, CASTING_MODES)
    is_number("offset", offset, "non-negative")
    if offset and casting_mode == "llama":
        raise ValueError(f'offset must be 0 with casting_mode "llama", got {offset}')
    are_flags(after=after)
    if after and residual is None:
        raise ValueError("residual must be given with after=True, got None")
    options = RmsNormOptions(float(eps), casting_mode, float(offset), bool(after), needs_grad(call))
    return RmsNorm(x, weight, residual, options)
