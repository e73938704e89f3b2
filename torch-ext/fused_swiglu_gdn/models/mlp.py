"""Gated MLPs, down(act(gate(x)) * up(x)): recognises them and decides which can be replaced.

The forward of a module's class is run on stub parts. Each product of a stub has
numbers of its own and the activation is no function of torch, so that a forward with other parts,
or another order, gives other numbers; the roles gate, up and down follow from agreement. A module
is replaced if nothing in its class or on the instance stands between the forward and its parts, and
if the kernels can read these. Everything that can change later is checked at every call.
"""

import functools
import itertools
from typing import Dict, Iterator, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import nn

from ..layers import swiglu
from ..layers.activations import activation_of
from ..layers.plain import told, why_not_linear, why_patched
from ..layers.swiglu import DROPOUTS, Form, Roles
from ..swiglu.reference import ACTIVATIONS
from .code import Refused, why_odd_class
from .facts import BY_DTYPE, Facts, read
from .gradients import same_gradients
from .serving import own_class
from .stand_ins import (
    Raises,
    features,
    has_form_of,
    mixed,
    quiet,
    random,
    result_of,
    twin_of,
)
from .trial import (
    MOST_NUMBERS,
    form_key,
    modes_of,
    only_argument,
    remembered,
    sizes_of,
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
# leading sizes of x, model width, hidden width, and the size of the values
CASES = (((2,), 5, 3, 1.0), ((1, 7), 16, 24, 100.0), ((3, 1, 2), 8, 40, 1e-3), ((65,), 96, 64, 1.0))
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MARK = torch.selu  # a stub's activation: no forward may call it, and it is neither odd nor even
ROUNDINGS = 4  # the same operations in the same order; a library may yet sum in another one

_found: Dict[tuple, Union[Tuple[str, Roles], str]] = {}


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
    key += (tuple([(n, _sort(part)) for n, part in module._modules.items()]), why_patched())
    if facts.named:  # it is tried with its own widths
        key += tuple([features(part) for part in module._modules.values()])
    found = remembered(_found, key, _find, module, kind, facts)
    for name in facts.rates:
        if not isinstance(module.__dict__.get(name), (int, float)):
            raise Refused(f"{name} is no number")
    return Form(kind, facts.pinned, tuple(values.items()), *found)


def _read_directly(module: nn.Module, facts: Facts) -> set:
    """Products whose weights the forward reads: it may compute with them itself."""
    return {name for name in facts.direct if features(module._modules[name])}


def _sort(part: nn.Module) -> str:
    if features(part):
        return "product"
    return "dropout" if type(part) in DROPOUTS else "other"


def _find(module: nn.Module, kind: type, facts: Facts) -> Tuple[str, Roles]:
    """The argument's name and the roles of the parts; raises Refused if they are uncertain."""
    reason = why_patched()
    names = (*facts.parts, *facts.rates, "training")
    reason = reason or why_odd_class(kind, names, "__call__")
    reason = reason or _why_no_modules(module, facts)
    if reason is not None:
        raise Refused(reason)
    argument, reasons = only_argument(facts), []
    for roles in _candidates(module, facts):
        reason = _why_another_formula(module, kind, facts, roles)
        if reason is None:
            return argument, roles
        reasons.append(reason)
    told = [reason for reason in reasons if reason != ANOTHER]
    raise Refused(told[-1] if told else ANOTHER)


def _why_no_modules(module: nn.Module, facts: Facts) -> Optional[str]:
    for name in facts.parts:
        if name in module.__dict__ and features(module._modules.get(name)):
            return f"{name} is no module of its own"
    return None


ANOTHER = "its forward is another formula"


def _candidates(module: nn.Module, facts: Facts) -> Iterator[Roles]:
    parts = module._modules
    direct = _read_directly(module, facts)
    products = [n for n in facts.parts | direct if features(parts.get(n))]
    dropouts = tuple(name for name in sorted(facts.parts) if type(parts.get(name)) in DROPOUTS)
    acts = [name for name in facts.parts if name not in (*products, *dropouts)]
    acts = [name for name in acts if name in parts or name in module.__dict__]
    if len(acts) > 1:  # a part that wraps a product need not say its sizes
        unknown = [name for name in acts if name in parts]
        products += [name for name in unknown if activation_of(parts[name]) is None]
        acts = [name for name in acts if name not in products]
    if len(acts) > 1:
        return
    more = {"dropouts": dropouts, "rates": tuple(sorted(facts.rates))}
    more["casts"] = BY_DTYPE in facts.names or bool(direct)
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
    direct, modes = _read_directly(module, facts), modes_of(module, facts)
    if BY_DTYPE in facts.names:
        runs = list(itertools.product(DTYPES, CASES))
    else:  # each dtype and size, with another one each time
        runs = [
            (dtype, CASES[(d + i) % len(CASES)]) for i in (0, 2) for d, dtype in enumerate(DTYPES)
        ]
    for i, n in enumerate(sizes_of(module, facts)):
        dtypes = (torch.float64, *DTYPES[1:])[: 1 if n > 66 else None]
        for size in ((n,), (1, n)):
            runs.append((dtypes[i % len(dtypes)], (size, 6, 4, (None, "+", "-")[i % 3])))
    runs += [(torch.float64, ((n, 2), 4, 4, None)) for n in (9, 300)]
    if facts.named:
        K, N = features(module._modules[roles.gate])
        N = N if roles.up is not None else N // 2
        for n in sizes_of(module, facts, max(K, N)) if K * N <= MOST_NUMBERS else ():
            runs += [(torch.float64, (size, K, N, None)) for size in ((n,), (1, n))]
    with quiet():
        for learns in (False, True):
            with torch.set_grad_enabled(learns):
                for dtype, case in runs[learns::2]:
                    reason = _why_not(module, kind, facts, roles, direct, dtype, case, modes)
                    if reason is not None:
                        return reason
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):  # results have its dtype
            twin, x, expected = _problem(module, kind, roles, direct, torch.float32, CASES[0])
            reason = _why_not_equal(facts.forward, twin, x, expected)
            if reason is not None:
                return reason

    def run(ours: bool) -> tuple:
        twin, x, _ = _problem(module, kind, roles, direct, torch.float64, ((7,), 6, 4, None))
        twin.__dict__["training"] = True
        x.requires_grad_()
        y = _formula(twin, roles, x) if ours else result_of(facts.forward, twin, x)
        return [x], [y.sin().sum()]

    return None if same_gradients(facts, run) else "its gradients are those of another formula"


def _why_not(module, kind, facts, roles, direct, dtype, case, modes) -> Optional[str]:
    """The same of one dtype and size; direct: parts whose weights the forward reads; modes: of
    training."""
    twin, x, expected = _problem(module, kind, roles, direct, dtype, case)
    if not torch.isfinite(expected).all():
        return None  # two orders of sums may differ there
    modes = list(itertools.product(modes, (0.0, 0.5)[: 1 + bool(roles.rates)]))
    for training, rate in modes:
        if training and rate:
            continue  # it drops values out, and is called
        twin.__dict__.update(dict.fromkeys(roles.rates, rate))
        twin.__dict__["training"] = training
        reason = _why_not_equal(facts.forward, twin, x, expected)
        if reason is not None:
            return reason
    return None


def _problem(module, kind, roles, direct, dtype, case) -> tuple:
    """A probe module, its input, and the formula's output."""
    sizes, K, N, scale = case
    joined = roles.up is None
    halves, products = (roles.gate, roles.gate if joined else roles.up), []
    for seed, (name, n, k) in enumerate(zip((*halves, roles.down), (N, N, K), (K, K, N))):
        weight = (random(n, k, seed=seed) * k**-0.5).to(dtype)
        biased = name not in direct or module._modules[name].bias is not None
        bias = random(n, seed=10 + seed).to(dtype) if biased else None
        products.append(_product(weight, bias))
    gate, up, down = products
    parts = {roles.down: down, **dict.fromkeys(roles.dropouts, _same)}
    if joined:
        first, second = (gate, up) if roles.gate_first else (up, gate)
        bias = None if gate.bias is None else torch.cat([first.bias, second.bias])
        parts[roles.gate] = _product(torch.cat([first.weight, second.weight]), bias)
    else:
        parts.update({roles.gate: gate, roles.up: up})
    twin = twin_of(module, kind, parts)
    if roles.act is not None:
        twin.__dict__[roles.act] = MARK
    twin.__dict__.update(dict.fromkeys(roles.rates, 0.0))
    if scale is None:
        x = mixed(*sizes, K, seed=20, dtype=dtype)
    elif scale in SIGNS:
        size = SIGNS[scale] / (1e3 if dtype is torch.float16 else 1)
        x = random(*sizes, K, seed=20).abs().mul(size).to(dtype)
    else:
        x = (random(*sizes, K, seed=20) * scale).to(dtype)
    return twin, x, _formula(twin, roles, x)


SIGNS = {"+": 1e3, "-": -1e3}


def _formula(twin: nn.Module, roles: Roles, x: torch.Tensor) -> torch.Tensor:
    parts, joined = twin._modules, roles.up is None
    act = MARK if roles.act is not None else ACTIVATIONS[roles.function]
    if joined:  # the same product as the forward's: the bits may depend on its size
        g, u = parts[roles.gate](x).chunk(2, dim=-1)
        g, u = (g, u) if roles.gate_first else (u, g)
    else:
        g, u = parts[roles.gate](x), parts[roles.up](x)
    return parts[roles.down](act(g) * u)


def _why_not_equal(forward, twin, x: torch.Tensor, expected: torch.Tensor) -> Optional[str]:
    """Reason if a forward gives anything else, on stubs, or None."""
    try:
        got = result_of(forward, twin, x)
    except Raises as why:  # sizes that do not fit: the parts are other ones
        return ANOTHER if isinstance(why.error, RuntimeError) else str(why)
    except Refused as why:
        return str(why)
    if not has_form_of(got, expected.dtype, expected.shape):
        return ANOTHER
    limit = ROUNDINGS * torch.finfo(expected.dtype).eps * expected.abs().max().item()
    return None if torch.allclose(got, expected, rtol=0.0, atol=limit) else ANOTHER


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
    exact = name in ("GELU", "GELUActivation", "gelu") and _exact(function)
    return f"{name}, by erf" if exact else name


def _exact(gelu: object) -> bool:
    return getattr(gelu, "approximate", "none") == "none"
