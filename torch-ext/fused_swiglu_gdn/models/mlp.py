"""Gated MLPs, down(act(gate(x)) * up(x)): recognises them and decides which can be replaced.

The forward of a module's class is run on stub parts. Each product of a stub has
numbers of its own and the activation is no function of torch, so that a forward with other parts,
or another order, gives other numbers; the roles gate, up and down follow from agreement. A module
is replaced if nothing in its class or on the instance stands between the forward and its parts, and
if the kernels can read these. Everything that can change later is checked at every call.
"""

import functools
import itertools
from typing import Iterator, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from ..layers import swiglu
from ..layers.activations import activation_of
from ..layers.plain import told, why_not_linear
from ..layers.swiglu import DROPOUTS, Form, Roles
from ..swiglu.reference import ACTIVATIONS
from .code import Refused
from .facts import BY_DTYPE, Facts, read
from .gradients import same_gradients
from .serving import own_class
from .stand_ins import features, probe_of, random, result_of
from .trial import (
    ANOTHER,
    MOST_NUMBERS,
    form_key,
    inputs_of,
    refuse_odd_module,
    remembered,
    why_another,
)

# the parts by which a module that is left alone is known to be a gated MLP: the report names it
KNOWN_PARTS = (
    {"gate_proj", "up_proj", "down_proj"},
    {"gate_up_proj", "down_proj"},
    {"w1", "w2", "w3"},
    {"wi_0", "wi_1", "wo"},
    {"Wi", "Wo"},
    {"input_linear", "output_linear"},
)
NAMED = ("silu", "gelu_tanh", "relu")  # activations that a forward may call by their name
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MARK = torch.selu  # a stub's activation: no forward may call it, and it is neither odd nor even
ROUNDINGS = 4  # the same operations in the same order; a library may yet sum in another one


def gated_mlp(module: nn.Module) -> Optional[Tuple[str, Optional[str], Optional[Form]]]:
    """Our layer for a module, why it is left alone or None, and its form; None for a module that is
    no gated MLP."""
    parts = module._modules
    if len(parts) < 2:
        return None
    names = frozenset(parts)
    resembles = any(map(names.issuperset, KNOWN_PARTS))
    if not resembles and len(list(filter(features, parts.values()))) not in (2, 3):
        return None
    try:
        form = _form(module)
    except Refused as why:
        layer = "SwiGLUGateUp" if "gate_up_proj" in parts else "SwiGLUMLP"
        return (layer, str(why), None) if resembles else None
    layer = "SwiGLUGateUp" if form.roles.up is None else "SwiGLUMLP"
    reason = _why_not_parts(module, form.roles)
    if reason is None:
        swiglu.FORMS[form.kind] = form
    return layer, reason, form


def _form(module: nn.Module) -> Form:
    kind = own_class(module)
    facts = read(kind, module)
    values = facts.values_but(*facts.rates, "training")
    biased = [
        (n, module._modules[n].bias is not None) for n in sorted(_read_directly(module, facts))
    ]
    key = (*form_key(module, kind, facts, values), *biased)
    key += tuple([(n, _sort(part)) for n, part in module._modules.items()])
    if facts.named:  # it is tried with its own widths
        key += tuple([features(part) for part in module._modules.values()])
    found = remembered(_find, key, module, kind, facts)
    return Form(kind, facts.pinned, tuple(values.items()), *found)


def _read_directly(module: nn.Module, facts: Facts) -> set:
    """Products whose weights the forward reads: it may compute with them itself."""
    read, parts = facts.names.intersection(("weight", "bias")), module._modules
    names = facts.parts.intersection(parts) if read else ()
    return {n for n in names if features(parts[n]) and read.intersection(parts[n]._parameters)}


def _sort(part: nn.Module) -> str:
    if features(part):
        return "product"
    return "dropout" if type(part) in DROPOUTS else "other"


def _find(module: nn.Module, kind: type, facts: Facts) -> Tuple[str, Roles]:
    """The argument's name and the roles of the parts; raises Refused if they are uncertain."""
    refuse_odd_module(module, kind, facts, (*facts.parts, *facts.rates, "training"), "__call__")
    argument, reasons = facts.only_argument(), []
    for roles in _candidates(module, facts):
        reason = _why_another_formula(module, kind, facts, roles)
        if reason is None:
            return argument, roles
        reasons.append(reason)
    told = [reason for reason in reasons if reason != ANOTHER]
    raise Refused(told[-1] if told else ANOTHER)


def _candidates(module: nn.Module, facts: Facts) -> Iterator[Roles]:
    parts = module._modules
    products = [n for n in facts.parts if features(parts.get(n))]
    dropouts = tuple(name for name in sorted(facts.parts) if type(parts.get(name)) in DROPOUTS)
    acts = [name for name in facts.parts if name not in (*products, *dropouts)]
    if len(acts) > 1:  # a part that wraps a product need not say its sizes
        unknown = [name for name in acts if name in parts]
        products += [name for name in unknown if activation_of(parts[name]) is None]
        acts = [name for name in acts if name not in products]
    if len(acts) > 1:
        return
    more = {"dropouts": dropouts, "rates": tuple(sorted(facts.rates))}
    more["casts"] = BY_DTYPE in facts.names or bool(_read_directly(module, facts))
    functions = (None,) if acts else NAMED
    # usual orders come first: the last part as down, the first as gate
    products.sort(key=list(parts).index)
    for down in reversed(products):
        others = [name for name in products if name != down]
        for function in functions:
            act = acts[0] if acts else None
            if len(others) == 2:
                for gate, up in itertools.permutations(others):
                    yield Roles(gate, up, down, act, function, **more)
            elif len(others) == 1:
                for first in (True, False):
                    yield Roles(others[0], None, down, act, function, first, **more)


def _product(weight: torch.Tensor, bias: Optional[torch.Tensor]) -> functools.partial:
    """A stub of an nn.Linear."""
    made = functools.partial(F.linear, weight=weight, bias=bias)
    made.weight, made.bias = weight, bias
    return made


def _same(input: torch.Tensor) -> torch.Tensor:
    return input


def _why_another_formula(module, kind, facts: Facts, roles: Roles) -> Optional[str]:
    """Reason if the class's forward differs from the formula in some dtype, size, mode or kind of
    values, or None."""
    runs = list(_inputs(module, facts, roles))
    for learns in (False, True):
        with torch.set_grad_enabled(learns):
            for x, N in runs[learns::2]:
                reason = _why_not(module, kind, facts, roles, x, N)
                if reason is not None:
                    return reason
    x = runs[0][0].float()
    probe = _probe(module, kind, facts, roles, x, 4)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):  # results have its dtype
        reason = why_another(facts.forward, probe, x, _formula(probe, roles, x), ROUNDINGS)
        if reason is not None:
            return reason
    x = random(7, 6, seed=20)
    probe = _probe(module, kind, facts, roles, x, 4, training=True)
    given = (lambda x: [_formula(probe, roles, x)], lambda x: [result_of(facts.forward, probe, x)])
    same = same_gradients(facts, [x], *given)
    return None if same else "its gradients are those of another formula"


def _inputs(module, facts: Facts, roles: Roles) -> Iterator[Tuple[torch.Tensor, int]]:
    """Inputs, each with the hidden width of the MLP that gets it."""
    for x in inputs_of(facts, DTYPES, 6, (2, 3, 4)):
        yield x, 4
    K, N = features(module._modules[roles.gate]) or (0, 0)
    if facts.named and 0 < K * N <= MOST_NUMBERS:  # of its own widths, too
        for x in inputs_of(facts, DTYPES[:1], K, (2, 3)):
            yield x, N if roles.up is not None else N // 2


def _why_not(module, kind, facts, roles: Roles, x: torch.Tensor, N: int) -> Optional[str]:
    """The same of one input, in each mode."""
    probe = _probe(module, kind, facts, roles, x, N)
    expected = _formula(probe, roles, x)
    if not torch.isfinite(expected).all():
        return None  # two orders of sums may differ there
    rates = (0.0, 0.5) if roles.rates else (0.0,)
    for training, rate in itertools.product(facts.modes, rates):
        if training and rate:
            continue  # it drops values out, and is called
        probe.__dict__.update(dict.fromkeys(roles.rates, rate), training=training)
        reason = why_another(facts.forward, probe, x, expected, ROUNDINGS)
        if reason is not None:
            # sizes that do not fit: the parts are other ones
            return ANOTHER if "raises RuntimeError" in reason else reason
    return None


def _probe(module, kind, facts, roles: Roles, x: torch.Tensor, N: int, **more) -> nn.Module:
    """A probe module of this hidden width for an input."""
    K, direct, products = x.shape[-1], _read_directly(module, facts), []
    halves = (roles.gate, roles.gate if roles.up is None else roles.up)
    for seed, (name, n, k) in enumerate(zip((*halves, roles.down), (N, N, K), (K, K, N))):
        weight = (random(n, k, seed=seed) * k**-0.5).to(x.dtype)
        biased = name not in direct or module._modules[name].bias is not None
        products.append(_product(weight, random(n, seed=10 + seed).to(x.dtype) if biased else None))
    gate, up, down = products
    parts = {roles.down: down, **dict.fromkeys(roles.dropouts, _same)}
    if roles.up is None:
        both = (gate, up) if roles.gate_first else (up, gate)
        bias = None if gate.bias is None else torch.cat([part.bias for part in both])
        parts[roles.gate] = _product(torch.cat([part.weight for part in both]), bias)
    else:
        parts.update({roles.gate: gate, roles.up: up})
    more.update({} if roles.act is None else {roles.act: MARK})
    return probe_of(module, kind, parts, **dict.fromkeys(roles.rates, 0.0), **more)


def _formula(probe: nn.Module, roles: Roles, x: torch.Tensor) -> torch.Tensor:
    parts, joined = probe._modules, roles.up is None
    act = MARK if roles.act is not None else ACTIVATIONS[roles.function]
    if joined:  # the same product as the forward's: the bits may depend on its size
        g, u = parts[roles.gate](x).chunk(2, dim=-1)
        g, u = (g, u) if roles.gate_first else (u, g)
    else:
        g, u = parts[roles.gate](x), parts[roles.up](x)
    return parts[roles.down](act(g) * u)


def _why_not_parts(module: nn.Module, roles: Roles) -> Optional[str]:
    """Reason if the parts are not plain weights, or the kernels lack its activation; or None."""
    if swiglu.activation(module, roles) is None:
        act = module.__dict__.get(roles.act, module._modules.get(roles.act))
        return f"its activation is {_name_of(act)}"
    reasons = {n: why_not_linear(module._modules[n]) for n in (roles.gate, roles.up) if n}
    if any(reasons.values()) and swiglu.shards_of(module, roles) is not None:
        return None
    if swiglu.drops_out(module, roles):
        return "it drops values out: it has dropout and is in training"
    for name, reason in reasons.items():
        if reason is not None:  # then it is called
            weights = module._modules[name].parameters()
            nowhere = roles.casts or any(told(weight, "is_meta") for weight in weights)
            return f"{name} {reason}" if nowhere else None
    found = swiglu.projections(module, roles)
    if found is None or found[0].shape != found[1].shape or found[0].dtype != found[1].dtype:
        return "its weights are of several dtypes, or sizes"
    return None


def _name_of(function: object) -> str:
    kind = type(function) if isinstance(function, nn.Module) else function
    name = getattr(kind, "__name__", repr(kind))
    gelu = name in ("GELU", "GELUActivation", "gelu")
    exact = gelu and getattr(function, "approximate", "none") == "none"
    return f"{name}, by erf" if exact else name
