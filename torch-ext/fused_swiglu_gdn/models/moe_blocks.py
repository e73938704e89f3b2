"""Routers of transformers' mixtures, and blocks that add a shared expert to routed ones.

    routed = experts(x, ids, weights), with (_, weights, ids) = router(x)
    out = routed + sigmoid(gate(x)) * shared(x)

x are the tokens in one dimension. router_trial.py determines what a router computes. The forward of
a block is run with a stub for each part: the assignment of parts whose numbers agree with the
formula is the right one. The parts of a served block are still called as modules, so that hooks on
them, which record a router's logits or sum over ranks, see the same tensors.
"""

import functools
import itertools
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import nn

from ..experts import ops_shared, ops_topk, reference
from ..experts.ops_topk import TOPK
from ..layers.pinned import Pinned
from ..layers.plain import (
    PLAIN_TENSORS,
    parameters_of,
    torch_unpatched,
    why_not_tensor,
)
from ..runtime import dispatch
from ..runtime.dtypes import HALF
from .code import Refused
from .facts import Facts, read
from .router_choice import Choice
from .router_trial import DTYPES, arguments_of, find_choice, shapes_of, weight_among
from .serving import own_class, why_not_on
from .stand_ins import F64, features, probe_of, random
from .trial import ANOTHER, form_key, inputs_of, refuse_odd_module, remembered, why_another


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


class Form(NamedTuple):
    """A class of routers or of blocks, with certain values of its attributes."""

    kind: type
    pinned: Pinned
    guards: Tuple[Tuple[str, object], ...]
    arguments: Tuple[str, ...]
    needed: int  # of the arguments
    found: Union[Choice, Parts]


def router_or_block(module: nn.Module) -> Optional[Tuple[str, Optional[str], Optional[Form]]]:
    """Our layer for a router, or a block with a shared expert; why it is left alone or None; its
    form. None for other modules, also those of no known form whose class's name suggests none."""
    word, layer = ("moe", "add_shared") if module._modules else ("router", "fused_topk")
    try:
        form = form_of(module)
    except Exception as error:
        if word not in own_class(module).__name__.lower():
            return None
        if not isinstance(error, Refused):
            raise
        return layer, str(error), None
    if form is None:
        return None
    if isinstance(form.found, Choice):
        reason = _why_not_tensors(_tensors(module, form.found, form.arguments), form.found)
    else:
        reason = _why_not_block(module, form.found)
    return layer, reason, form


def form_of(module: nn.Module) -> Optional[Form]:
    """The form of a router, or of a block with a shared expert; None for any other module.

    Raises Refused if it has no known form.
    """
    kind = own_class(module)
    if kind.__module__.split(".")[0] == "torch":
        return None
    if weight_among(module) is not None:
        find, parts, names = find_choice, shapes_of(module), arguments_of
    elif gates_among(module):
        find, parts, names = find_parts, sizes_of(module), lambda facts: (facts.only_argument(),)
    else:
        return None
    facts = read(kind, module)
    arguments, values = names(facts), facts.values_but("training")
    for name in sorted(facts.reads):
        if name not in values and name != "training" and name not in dict(parts):
            raise Refused(f"its forward reads {name}, which is no number, word or flag")
    key = (parts, *form_key(module, kind, facts, values))
    found = remembered(find, key, module, kind, facts, values)
    needed = len(set(arguments).difference(facts.signature.defaults))
    return Form(kind, facts.pinned, tuple(values.items()), arguments, needed, found)


def _tensors(router: nn.Module, choice: Choice, arguments: tuple, bias=None) -> tuple:
    """weight, bias and added; None for each that is missing. bias: the forward's argument."""
    names = choice.weight, None if choice.bias in arguments else choice.bias, choice.added
    weight, own, added = [None if name is None else getattr(router, name) for name in names]
    return weight, bias if own is None else own, added


def _choose(
    router: nn.Module, choice: Choice, arguments: tuple, x: torch.Tensor, given=None
) -> Optional[tuple]:
    """logits [T, E], weights [T, K] and ids [T, K] in the order of the router.

    None if the class's own forward must run.
    """
    if (given is None) is (choice.bias in arguments):
        return None
    tensors = weight, bias, _ = _tensors(router, choice, arguments, given)
    if _why_not_tensors(tensors, choice) or x.ndim not in choice.dims:
        return None
    if x.dtype is not weight.dtype or x.dtype not in DTYPES or x.shape[-1] != choice.shape[1]:
        return None
    logits = choice.logits(x, tensors)
    try:
        weights, ids = TOPK((logits, bias), choice.options(x.dtype))
    except (TypeError, ValueError):  # what does not fit is its own forward's to take or refuse
        return None
    out, (first, second, third) = (logits, weights, ids), choice.order
    return out[first], out[second], out[third]


def _add_shared(
    block: nn.Module, parts: Parts, _: tuple, x: torch.Tensor
) -> Optional[torch.Tensor]:
    """A block's output, or None if the class's own forward must run."""
    w_gate, modules = _gate_of(block, parts), block._modules
    if w_gate is None or x.dtype is not w_gate.dtype or x.ndim != 3 or not x.is_contiguous():
        return None
    if None in tuple(map(modules.get, parts)):
        return None
    if not dispatch.serves(ops_shared.FAMILY, "shared_fwd", x):
        return None
    return with_shared(modules, parts, x, w_gate, ops_shared.add_shared)


_COMPUTE = {Choice: _choose, Parts: _add_shared}


@functools.lru_cache(maxsize=1024)
def forward_of(form: Form) -> Callable:
    """Returns a forward for the modules of a class: ours, or the class's own for other calls."""
    kind, pinned, guards, arguments, needed, found = form
    compute, most = _COMPUTE[type(found)], len(arguments)

    def forward(self, *args, **kwargs):
        given = args
        if kwargs:
            given = (*args, *[kwargs[name] for name in arguments[len(args) :] if name in kwargs])
        x = given[0] if given else None
        if (
            needed <= len(args) + len(kwargs) == len(given) <= most
            and type(x) in PLAIN_TENSORS
            and not torch.is_autocast_enabled(x.device.type)
            and not torch.compiler.is_dynamo_compiling()  # which cannot trace the next questions
            and torch_unpatched()
            and pinned.unchanged(self, guards)
        ):
            out = compute(self, found, arguments, *given)
            if out is not None:
                return out
        return kind.forward(self, *args, **kwargs)

    forward.__wrapped__ = kind.forward
    return forward


def _gate_of(block: nn.Module, parts: Parts) -> Optional[torch.Tensor]:
    """The weight [1, H] of a shared expert's gate, if calling the gate is only a product with
    it."""
    found = parameters_of(block._modules.get(parts.gate))
    if found is None:
        return None
    weight, bias = found[0]
    return weight if bias is None and weight.shape[0] == 1 else None


def _why_not_tensors(tensors: tuple, choice: Choice) -> Optional[str]:
    for name, tensor in zip(("its weight", "its bias", "its bias"), tensors):
        reason = why_not_tensor(tensor)
        if reason is not None:
            return f"{name} {reason}"
    if tensors[0].shape != choice.shape:
        return "its weight has another shape"
    return _why_not_dtype(tensors[0], ops_topk.FAMILY, "topk_fwd")


def _why_not_dtype(weight: torch.Tensor, family: str, operation: str) -> Optional[str]:
    reason = why_not_on(weight.device, family, operation)
    if reason is None and weight.dtype not in HALF:
        return f"its weight is {str(weight.dtype).replace('torch.', '')}, not bfloat16 or float16"
    return reason


def _why_not_block(block: nn.Module, parts: Parts) -> Optional[str]:
    w_gate = _gate_of(block, parts)
    if w_gate is None:
        return f"{parts.gate} is no plain product"
    reason = why_not_tensor(w_gate)
    if reason is not None:
        return f"{parts.gate} has a weight that {reason}"
    return _why_not_dtype(w_gate, ops_shared.FAMILY, "shared_fwd")


# -- the equivalence check of blocks

# the roundings that two ways to the same numbers are apart
ROUNDINGS = {F64: 8, torch.float32: 8, torch.bfloat16: 4, torch.float16: 4}


def gates_among(module: nn.Module) -> List[str]:
    """The parts of a module of four or more that have one output, as gates of shared experts."""
    parts = module._modules
    if len(parts) < len(Parts._fields):
        return []
    return [name for name, part in parts.items() if features(part)[1:] == (1,)]


def sizes_of(module: nn.Module) -> tuple:
    return tuple((name, features(part)) for name, part in module._modules.items())


def find_parts(module: nn.Module, kind: type, facts: Facts, values: dict) -> Parts:
    """Finds the role of each part; raises Refused."""
    refuse_odd_module(module, kind, facts, facts.parts, "__call__")
    names = [name for name in module._modules if name in facts.parts]
    for gate in gates_among(module):
        others = [name for name in names if name != gate]
        if gate in names and len(others) == len(facts.parts) - 1 == 3:
            for order in itertools.permutations(others):
                parts = Parts(gate, *order)
                if _computes(module, kind, facts, parts):
                    return parts
    raise Refused(ANOTHER)


def _computes(module: nn.Module, kind: type, facts: Facts, parts: Parts) -> bool:
    H = features(module._modules[parts.gate])[0]
    inputs = inputs_of(facts, tuple(ROUNDINGS), H, (3,))
    for x, training in itertools.product(inputs, facts.modes):
        log, w_gate = [], random(1, H).to(x.dtype)
        stubs = _stubs(parts, H, x.dtype, log)
        expected, mine = with_shared(stubs, parts, x, w_gate, reference.shared_fwd), sorted(log)
        log.clear()
        stubs[parts.gate] = functools.partial(F.linear, weight=w_gate)
        probe = probe_of(module, kind, stubs, training=training)
        reason = why_another(facts.forward, probe, x, expected, ROUNDINGS[x.dtype])
        if reason is not None or sorted(log) != mine:
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
