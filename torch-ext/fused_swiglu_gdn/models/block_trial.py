"""The equivalence check of blocks with routed experts and a shared expert.

    routed = experts(x, ids, weights), with (_, weights, ids) = router(x)
    out = routed + sigmoid(gate(x)) * shared(x)

x are the tokens in one dimension. The forward of the class is read (reader.py) and run with a stub
for each part: the assignment of parts whose numbers agree with the formula is the right one.
"""

import itertools
from typing import Callable, Dict, List, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ..experts import reference
from .code import Refused
from .reader import Source
from .stand_ins import features, has_form_of, quiet, random, result_of, twin_of
from .trial import refuse_odd_module

# leading sizes of x, its dtype, and the roundings that two ways to the same numbers are apart
CASES = (
    ((1, 1), torch.float64, 8), ((2, 3), torch.float64, 8), ((3, 1), torch.float32, 8),
    ((2, 5), torch.bfloat16, 4), ((4, 2), torch.float16, 4),
)  # fmt: skip


class Parts(NamedTuple):
    """The names of a block's parts."""

    gate: str  # of the shared expert
    router: str
    experts: str
    shared: str


def with_shared(
    modules: dict, parts: Parts, x: torch.Tensor, w_gate: torch.Tensor, add_shared: Callable
) -> torch.Tensor:
    """The formula; x [B, T, H], w_gate [1, H]."""
    rows = x.reshape(-1, x.shape[-1])
    shared = modules[parts.shared](rows)
    _, weights, ids = modules[parts.router](rows)
    routed = modules[parts.experts](rows, ids, weights)
    return add_shared(routed, shared, rows, w_gate.view(-1)).reshape(x.shape)


def gates_among(module: nn.Module) -> List[str]:
    """The parts of a module of four or more that have one output, as gates of shared experts."""
    parts = module._modules
    if len(parts) < len(Parts._fields):
        return []
    return [name for name, part in parts.items() if features(part)[1:] == (1,)]


def sizes_of(module: nn.Module) -> tuple:
    return tuple((name, features(part)) for name, part in module._modules.items())


def find_parts(module: nn.Module, kind: type, source: Source, values: dict) -> Parts:
    """Finds the role of each part; raises Refused."""
    refuse_odd_module(module, kind, source, source.parts, "__call__")
    names = [name for name in source.parts if name in module._modules]
    for gate in gates_among(module):
        others = [name for name in names if name != gate]
        if gate in names and len(others) == len(source.parts) - 1 == 3:
            for order in itertools.permutations(others):
                parts = Parts(gate, *order)
                if _computes(module, kind, source, parts):
                    return parts
    raise Refused("its forward is another formula")


def _computes(module: nn.Module, kind: type, source: Source, parts: Parts) -> bool:
    H = features(module._modules[parts.gate])[0]
    modes = (False, True) if "training" in source.reads else (module.training,)
    with quiet():
        for (sizes, dtype, roundings), training in itertools.product(CASES, modes):
            x, w_gate = random(*sizes, H, seed=1).to(dtype), random(1, H).to(dtype)
            log: list = []
            stubs = _stubs(parts, H, dtype, log)
            expected, mine = with_shared(stubs, parts, x, w_gate, reference.shared_fwd), sorted(log)
            log.clear()
            stubs[parts.gate] = lambda x: F.linear(x, w_gate)  # noqa: B023
            twin = twin_of(module, kind, stubs)
            twin.__dict__["training"] = training
            try:
                found = result_of(source.forward, twin, x)
            except Refused:
                return False
            limit = roundings * torch.finfo(dtype).eps * expected.abs().max()
            if sorted(log) != mine or not has_form_of(found, dtype, x.shape):
                return False
            if not (found - expected).abs().max() <= limit:
                return False
    return True


def _stubs(parts: Parts, H: int, dtype: torch.dtype, log: list) -> Dict[str, Callable]:
    """Distinct functions of rows [T, H] for the parts; their calls are logged."""
    a, b, c = random(3, H, seed=2).to(dtype)

    def router(x, /):
        log.append((parts.router, x.ndim))
        return x.sum(-1, keepdim=True), torch.tanh(x * b), (x * c).argsort(-1)

    def experts(x, ids, weights, /):
        log.append((parts.experts, x.ndim))
        return torch.sin(x * b) * weights + torch.cos(ids.to(x.dtype))

    def shared(x, /):
        log.append((parts.shared, x.ndim))
        return torch.atan(x * a + b)  # not odd: a change of two signs is another function

    return {parts.router: router, parts.experts: experts, parts.shared: shared}
