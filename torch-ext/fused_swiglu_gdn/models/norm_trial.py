"""The equivalence check of norms: which variant of RMSNorm a class computes.

The variants differ in their roundings alone, so the check compares bits in bf16 and fp16.
"""

from typing import Iterator, Optional

import torch
from torch import nn

from ..layers.norm import FORMS, NormForm
from ..layers.plain import told
from ..norm import reference
from .code import Refused
from .facts import read
from .gradients import same_gradients
from .serving import is_served, own_class
from .stand_ins import mixed, probe_of, random, result_of
from .trial import ANOTHER, form_key, inputs_of, refuse_odd_module, remembered, why_another

D = 48
VARIANTS = (("llama", 0.0), ("gemma", 0.0), ("gemma", 1.0))
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROUNDINGS = {FP32: 16, BF16: 0, FP16: 0}
# leading sizes, dtypes of x and weight, the size of the values, and eps: with small ones it counts
CASES = (
    ((3,), FP32, FP32, 1.0, 0.3), ((5,), FP32, FP32, 1e-4, 1e-6),
    ((2, 3), BF16, BF16, 1.0, 1e-6), ((2, 3), BF16, BF16, 1.0, 0.3),
    ((2, 3, 4), BF16, BF16, 1e-3, 1e-6), ((2, 2), BF16, FP32, 1.0, 0.3),
    ((2, 2), FP16, FP16, 30.0, 1e-6), ((2, 2), FP16, FP16, 1.0, 0.3),
)  # fmt: skip


def norm_in(part: Optional[nn.Module]) -> Optional[NormForm]:
    """The form of a part that is an RMS norm; None of any other part."""
    if part is None or part._modules or len(part._parameters) > 1:
        return None
    form = FORMS.get(type(part)) if is_served(part) else None
    if form is not None and form.pinned.unchanged(part, form.guards):
        return form  # as it was found, but for eps and the weight, which every call reads
    try:
        return norm_form(part)
    except Refused:
        return None


def norm_form(module: nn.Module) -> NormForm:
    """The form of a norm module; raises Refused with the reason why it is not rms_norm."""
    kind = own_class(module)
    if module._modules or {*map(type, module._buffers.values())} - {type(None)}:
        raise Refused("it has parts or buffers")
    shapes = {}
    for name, parameter in module._parameters.items():
        if parameter is not None:
            shapes[name] = told(parameter, "shape")
    if list(map(len, shapes.values())) not in ([], [1]):
        raise Refused(f"it has parameters {', '.join(shapes)}")
    facts, weight = read(kind, module), next(iter(shapes), None)
    values = facts.values
    eps, kept = _eps_among(module, values), dict(values)
    kept.pop(eps, None)
    key = (weight, facts.named and shapes.get(weight), *form_key(module, kind, facts, kept))
    form = remembered(_find, key, module, kind, facts, weight, values, eps)
    FORMS[kind] = form  # attention modules and layers read the weights of their norms
    return form


def _eps_among(module: nn.Module, values: dict) -> Optional[str]:
    """The attribute that is eps: the only number that the forward reads, or the one with that
    name."""
    floats = [n for n, v in values.items() if type(v) is float and n in module.__dict__]
    found = [name for name in floats if "eps" in name] or floats
    return found[0] if len(found) == 1 else None


def _find(module, kind, facts, weight, values, eps) -> NormForm:
    argument = facts.only_argument()
    if eps is None:
        raise Refused("it has no eps")
    # layers and attention modules read a norm's weight in place of calling it
    names = (*values, *filter(None, [weight]))
    refuse_odd_module(module, kind, facts, names, "__call__")
    guards = tuple((n, v) for n, v in values.items() if n != eps)
    variants = [("llama", 0.0)] if weight is None else VARIANTS
    for variant in variants:
        if _computes(module, kind, facts, weight, eps, variant):
            known = kind, facts.pinned, guards, argument
            return NormForm(*known, weight, eps, *variant)
    raise Refused(ANOTHER)


def _computes(module, kind, facts, weight: Optional[str], eps_name: str, variant: tuple) -> bool:
    """True if the forward gives this variant's bits in bf16 and fp16, and its numbers in fp32."""

    def ours(x: torch.Tensor, w: Optional[torch.Tensor] = None, eps: float = 0.3) -> tuple:
        return reference.rms_norm_fwd(x, w, None, eps, *variant, False)[:1]

    def probe(w: Optional[torch.Tensor], eps: float, training: bool) -> nn.Module:
        own = {} if w is None else {weight: w}
        return probe_of(module, kind, None, own, **{eps_name: eps, "training": training})

    def theirs(x: torch.Tensor, w: Optional[torch.Tensor] = None) -> tuple:
        return (result_of(facts.forward, probe(w, 0.3, True), x),)

    for x, dtype, eps in _inputs(module, facts, weight):
        w = None if weight is None else random(x.shape[-1], seed=3).mul(0.3).to(dtype)
        (expected,) = ours(x, w, eps)
        for training in facts.modes:
            made = probe(w, eps, training)
            if why_another(facts.forward, made, x, expected, ROUNDINGS[x.dtype]):
                return False
    given = [mixed(7, D, seed=5, dtype=FP32).div(1e2)]
    given += [] if weight is None else [random(D, seed=3).float()]
    return same_gradients(facts, given, ours, theirs)


def _inputs(module, facts, weight: Optional[str]) -> Iterator[tuple]:
    """Returns inputs, the dtype of the weight, and eps."""
    for shape, dtype, weight_dtype, scale, eps in CASES:
        yield (random(*shape, D, seed=5) * scale).to(dtype), weight_dtype, eps
    widths = [D]
    if facts.named and weight is not None:  # with its own width, too
        widths += told(module._parameters[weight], "shape")
    for width in widths:
        for x in inputs_of(facts, (FP32, BF16, FP16), width, (2, 3, 4)):
            yield x, x.dtype, 1e-6
