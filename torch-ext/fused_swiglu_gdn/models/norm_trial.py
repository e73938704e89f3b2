"""The equivalence check of norms: which variant of RMSNorm a class computes.

The variants differ in their roundings alone, so the check compares bits in bf16 and fp16.
"""

from typing import Dict, Optional, Union

import torch
from torch import nn

from ..layers.norm import FORMS, NormForm
from ..layers.plain import told
from ..norm import reference
from .code import BY_WORDS, Refused
from .reader import read
from .serving import is_served, own_class
from .stand_ins import has_form_of, quiet, random, result_of, twin_of
from .trial import form_key, only_argument, plain_values, refuse_odd_module, remembered

D = 48
VARIANTS = (("llama", 0.0), ("gemma", 0.0), ("gemma", 1.0))
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# leading sizes, dtypes of x and weight, the size of the values, and eps: with small ones it counts
CASES = (
    ((3,), FP32, FP32, 1.0, 0.3), ((5,), FP32, FP32, 1e-4, 1e-6),
    ((2, 3), BF16, BF16, 1.0, 1e-6), ((2, 3), BF16, BF16, 1.0, 0.3),
    ((2, 3, 4), BF16, BF16, 1e-3, 1e-6), ((2, 2), BF16, FP32, 1.0, 0.3),
    ((2, 2), FP16, FP16, 30.0, 1e-6), ((2, 2), FP16, FP16, 1.0, 0.3),
)  # fmt: skip

_forms: Dict[tuple, Union[NormForm, str]] = {}


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
    source, weight = read(kind, module, BY_WORDS), next(iter(shapes), None)
    values = plain_values(module, source.reads)
    eps, kept = _eps_among(module, values), dict(values)
    kept.pop(eps, None)
    key = (weight, *form_key(module, kind, source, kept))
    form = remembered(_forms, key, _find, module, kind, source, weight, values, eps)
    FORMS[kind] = form  # attention modules and layers read the weights of their norms
    return form


def _eps_among(module: nn.Module, values: dict) -> Optional[str]:
    """The attribute that is eps: the only number that the forward reads, or the one with that
    name."""
    floats, named = [], []
    for name, value in values.items():
        if isinstance(value, float) and name in module.__dict__:
            floats.append(name)
            if "eps" in name:
                named.append(name)
    found = named or floats
    return found[0] if len(found) == 1 else None


def _find(module, kind, source, weight, values, eps) -> NormForm:
    argument = only_argument(source)
    if eps is None:
        raise Refused("it has no eps")
    # layers and attention modules read a norm's weight in place of calling it
    names = (*values, *filter(None, [weight]))
    refuse_odd_module(module, kind, source, names, "__call__")
    guards = tuple((n, v) for n, v in values.items() if n != eps)
    variants = [("llama", 0.0)] if weight is None else VARIANTS
    for variant in variants:
        if _computes(module, kind, source.forward, weight, eps, variant):
            facts = kind, source.pinned, guards, source.checks, argument
            return NormForm(*facts, weight, eps, *variant)
    raise Refused("its forward is another formula")


def _computes(module, kind, forward, weight: Optional[str], eps_name: str, variant: tuple) -> bool:
    """True if the forward gives this variant's bits in bf16 and fp16, and its numbers in fp32."""
    with quiet():
        for shape, dtype, weight_dtype, scale, eps in CASES:
            w = None if weight is None else random(D, seed=3).mul(0.3).to(weight_dtype)
            twin = twin_of(module, kind, parameters={} if w is None else {weight: w.clone()})
            twin.__dict__[eps_name] = eps
            x = (random(*shape, D, seed=5) * scale).to(dtype)
            got = result_of(forward, twin, x)
            y = reference.rms_norm_fwd(x, w, None, eps, *variant, False)[0]
            if not has_form_of(got, y.dtype, y.shape):
                return False
            close = dtype is FP32 and torch.allclose(got, y, rtol=2e-6, atol=2e-6 * scale)
            if not (close or torch.equal(got, y)):
                return False
    return True
