"""causal_conv1d_fn with a cp_context: converts arguments for the operator, and results back."""

import operator
from typing import Optional, Tuple

import torch
from torch import Tensor

from ..parallel import checks
from ..parallel.context import CpContext
from ..parallel.exchange import agreed
from ..runtime.ops import needs_grad, unsigned
from .call import Convolution
from .checks import causal_conv1d_fn
from .ops_context import prepare_causal_conv1d


def lengths_alone(tensors: tuple, cp: object) -> Optional[Tensor]:
    """cu_seqlens of the equivalent ordinary call, or None if there is none."""
    x, _, _, seq_idx, cu_seqlens, _ = tensors
    if seq_idx is not None or cu_seqlens is not None or not isinstance(cp, CpContext):
        return None
    return cp.lengths_alone(x, 2)


@torch.compiler.disable
def convolve_with_context(
    tensors: tuple, options: tuple, cp: object
) -> Tuple[Tensor, Optional[Tensor]]:
    """y and the last inputs of each local segment.

    tensors, options: those of the ordinary call, checked before the first collective.
    """
    checks.is_context(cp)

    def make() -> Convolution:
        x, weight, bias, seq_idx, cu_seqlens, initial_states = tensors
        checks.lengths_are_its_own(cp, cu_seqlens)
        checks.is_absent("seq_idx", seq_idx)
        if isinstance(x, Tensor) and x.ndim == 3:
            checks.holds_tokens(cp, "x", x.shape[0], x.shape[2])
            if x.shape[0] > 1:  # the rows one after another
                x = x.transpose(1, 2).flatten(0, 1).unsqueeze(0).transpose(1, 2)
            cu_seqlens = cp.lengths_on(x.device)
        given = (x, weight, bias, None, cu_seqlens, initial_states)
        return causal_conv1d_fn(Convolution(*given, options))

    def facts(call: Convolution) -> str:
        x, weight, *_ = call
        grad = needs_grad(call)
        return f"channels {x.shape[1]}, taps {weight.shape[1]}, {x.dtype}, gradients {grad}"

    call = agreed(make, facts, cp.group, "causal_conv1d_fn")
    run, (B, D, T) = prepare_causal_conv1d(call, cp), tensors[0].shape
    given = unsigned(call.tensors)
    if B == 1 and tensors[4] is None and all(map(operator.is_, given, call.tensors)):
        cp.keep(tensors, options, run)
    y, final = run(*given)
    if B > 1:
        y = y.transpose(1, 2).view(B, T, D).transpose(1, 2)
    return y, final
