"""chunk_gated_delta_rule and chunk_kda with a cp_context: converts arguments for the operator, and
results back."""

import operator
from typing import Callable, Optional, Tuple

import torch
from torch import Tensor

from ..parallel import checks
from ..parallel.context import CpContext
from ..parallel.exchange import agreed
from ..runtime.ops import needs_grad, unsigned
from .call import GdnCall
from .ops_context import prepare_chunk


@torch.compiler.disable
def chunk_with_context(
    call: GdnCall,
    cp: object,
    check: Callable,
    options: tuple,
    function: str,
    cast: Optional[Callable] = None,
) -> Tuple[Tensor, Optional[Tensor]]:
    """o and the states after the local segments.

    check(tensors) checks an ordinary call with these options of the function and returns it;
    cast(*tensors): the tensors with A_log and dt_bias as it has them. All checks come before the
    first collective, so that no rank waits for one that raised.
    """
    checks.is_context(cp)
    made = _checked(call, cp, lambda x: check(x.tensors), function)
    run = _prepared(made, cp, call.v.shape)
    given = unsigned(call.tensors)
    tokens, gates = operator.itemgetter(0, 1, 2, 3, 4, 7, 8), operator.itemgetter(5, 6)
    if call.cu_seqlens is None and all(map(operator.is_, tokens(given), tokens(made))):
        if all(map(operator.is_, gates(given), gates(made))):
            cp.keep(call.tensors, options, run)
        elif cast is not None:
            cp.keep(call.tensors, options, lambda *tensors: run(*cast(*tensors)))
    return run(*unsigned(made.tensors))


def _checked(
    call: GdnCall, cp: CpContext, check: Callable[[GdnCall], GdnCall], function: str
) -> GdnCall:
    """The call in the operator's form; all ranks pass the checks or all raise."""

    def make() -> GdnCall:
        checks.lengths_are_its_own(cp, call.cu_seqlens)
        checks.is_absent("state_indices", call.state_indices)
        checks.is_absent("checkpoint_every", call.options.checkpoint_every)
        return check(_as_stream(call, cp))

    def facts(made: GdnCall) -> str:
        sizes = (made.H, made.HV, made.K, made.V)
        return f"heads and dims {sizes}, {made.q.dtype}, gradients {needs_grad(made.tensors)}"

    return agreed(make, facts, cp.group, function)


def _prepared(made: GdnCall, cp: CpContext, shape: torch.Size) -> Callable:
    """The tensors of checked calls like this one -> o, of this shape, and the states."""
    options, compute = made.options, prepare_chunk(cp, made)
    v_first, wide = options.state_v_first, torch.promote_types(made.v.dtype, torch.float32)
    dtype = options.state_dtype or wide

    def run(q, k, v, g, beta, A_log, dt_bias, initial, *_):
        if initial is not None:
            initial = (initial.mT if v_first else initial).to(wide)
        o, states = compute(q, k, v, g, beta, A_log, dt_bias, initial)
        o = o if o.shape == shape else o.view(shape)
        if not options.output_final_state:
            return o, None
        states = states.mT.contiguous() if v_first else states
        return o, states.to(dtype)

    return run


def lengths_alone(call: GdnCall, cp: object) -> Optional[Tensor]:
    """cu_seqlens of the equivalent ordinary call, or None if there is none."""
    others = (call.cu_seqlens, call.state_indices, call.options.checkpoint_every or None)
    if others != (None, None, None) or not isinstance(cp, CpContext):
        return None
    return cp.lengths_alone(call.q, 1)


def _as_stream(call: GdnCall, cp: CpContext) -> GdnCall:
    """The rows of a batch concatenated, with the local segments as sequences."""
    five = (call.q, call.k, call.v, call.g, call.beta)
    if isinstance(call.q, Tensor) and call.q.ndim == 4:
        checks.holds_tokens(cp, "q", call.B, call.T)
    if all(isinstance(x, Tensor) and x.ndim > 2 and x.shape[0] > 1 for x in five):
        five = tuple(x.flatten(0, 1).unsqueeze(0) for x in five)
    q, k, v, g, beta = five
    return call._replace(
        q=q, k=k, v=v, g=g, beta=beta, cu_seqlens=cp.lengths_on(call.q.device)
    )  # fmt: skip
