"""Recognises a module by its parts, and finds the layer of ours that computes the same.

A module is served only if that is certain: MLPs, norms, attention and decoder layers are a known
form by their source and by a trial; a GDN layer has the parts of a known family and transformers'
own forward.
"""

import functools
from typing import Callable, NamedTuple, Optional, Union

from torch import nn

from ..layers import attention, decoder, fp8, gdn, kda, norm, swiglu
from .attention_trial import attention_form, is_attention
from .code import Refused
from .formats import format_of
from .fp8_linear import fp8_form, is_fp8_linear, why_not_fp8
from .gated_delta_net import gated_delta_net, is_gated_delta_net
from .kimi_delta_attention import is_kimi_delta_attention, kimi_delta_attention
from .layer_trial import is_decoder_layer, layer_form
from .mlp import gated_mlp
from .norm_trial import norm_form
from .serving import is_of_transformers, is_served, own_class, why_replaced
from .sharded import why_partitioned

Form = Union[
    swiglu.Form, norm.NormForm, attention.AttentionForm, decoder.LayerForm, fp8.Fp8Form,
    gdn.GdnForm, kda.KdaForm,
]  # fmt: skip
# what kernelize can be asked for: `only` and `skip`
KINDS = ("mlp", "gdn", "kda", "norm", "attention", "layer", "linear", "experts", "loss")
_FORWARDS = {
    "mlp": swiglu.forward_of, "norm": norm.forward_of, "attention": attention.forward_of,
    "layer": decoder.forward_of, "linear": fp8.forward_of, "gdn": gdn.forward_of,
    "kda": kda.forward_of,
}  # fmt: skip


class Finding(NamedTuple):
    kind: str  # of KINDS
    layer: str  # the name of our layer, or what the module resembles
    reason: Optional[str] = None  # why it is left alone; None if it is served
    form: Optional[Form] = None  # which of its attributes are what
    unknown: bool = False  # the reason is what transformers has made its class

    @property
    def forward(self) -> Callable:
        """Ours, for the module."""
        return _FORWARDS[self.kind](self.form)


def recognise(module: nn.Module) -> Optional[Finding]:
    """Returns what our layers can do for a module; None if it is nothing like what they replace."""
    own = own_class(module)
    found = format_of(own)
    if found is not None:
        return Finding(found.kind, found.layer, found.reason)
    for find, kind, layer in _finders_of(own, bool(module._modules)):
        try:
            finding = find(module)
            if finding is None:
                continue
            reason = None
            if not is_served(module):
                reason = why_replaced(module, kind == "linear") or why_partitioned(module)
        except Exception as error:  # a module of a kind never seen must not stop the others
            finding = Finding(kind, layer, f"looking at it raises {type(error).__name__}")
            reason = None
        if reason is not None:
            return finding._replace(reason=reason)
        if finding.reason is None or finding.form is not None:
            return finding
        return finding._replace(unknown=is_of_transformers(module))
    return None


@functools.lru_cache(maxsize=4096)
def is_nothing(kind: type, with_parts: bool) -> bool:
    """True if no module of the class is replaced or has a row in the report."""
    served = len(kind.__bases__) > 1
    return not served and format_of(kind) is None and not _finders_of(kind, with_parts)


@functools.lru_cache(maxsize=1024)
def _finders_of(kind: type, with_parts: bool) -> tuple:
    """The rows of _FINDERS for modules of a class, with parts or without."""
    name = kind.__name__.lower()
    gated = "rmsnorm" in name and "gated" in name
    fits = {"norm": "norm" in name and not gated, "linear": is_fp8_linear(kind)}
    return tuple([row for row in _FINDERS if fits.get(row[1], with_parts)])


def _mlp(module: nn.Module) -> Optional[Finding]:
    found = gated_mlp(module)
    return None if found is None else Finding("mlp", *found)


def _gdn(module: nn.Module) -> Optional[Finding]:
    if is_gated_delta_net(module):
        return Finding("gdn", *gated_delta_net(module))
    return None


def _kda(module: nn.Module) -> Optional[Finding]:
    if is_kimi_delta_attention(module):
        return Finding("kda", *kimi_delta_attention(module))
    return None


def _linear(module: nn.Module) -> Finding:
    form = fp8_form(own_class(module))
    if isinstance(form, str):
        return Finding("linear", "FP8Linear", form)
    return Finding("linear", "FP8Linear", why_not_fp8(module), form)


def _by_trial(
    kind: str, layer: str, form_of: Callable, may_be: Optional[Callable] = None
) -> Callable:
    def find(module: nn.Module) -> Optional[Finding]:
        if may_be is not None and not may_be(module):
            return None
        try:
            return Finding(kind, layer, None, form_of(module))
        except Refused as why:
            told = may_be is not None or "rmsnorm" in own_class(module).__name__.lower()
            return Finding(kind, layer, str(why)) if told else None

    return find


# how a kind of module is found; the kind, and the name of ours
_FINDERS = (
    (_mlp, "mlp", "SwiGLUMLP"),
    (_gdn, "gdn", "GatedDeltaNet"),
    (_kda, "kda", "KimiDeltaAttention"),
    (_by_trial("norm", "RMSNorm", norm_form), "norm", "RMSNorm"),
    (_by_trial("attention", "Attention", attention_form, is_attention), "attention", "Attention"),
    (_by_trial("layer", "DecoderLayer", layer_form, is_decoder_layer), "layer", "DecoderLayer"),
    (_linear, "linear", "FP8Linear"),
)


def remember(module: nn.Module, finding: Finding) -> None:
    """Lets others know the form of a served module: forwards that `kernels` binds, and attention
    modules and layers, which read weights of their parts."""
    if finding.kind == "mlp":
        swiglu.FORMS[type(module)] = finding.form
    elif finding.kind == "norm":
        norm.FORMS[type(module)] = finding.form
    elif finding.kind == "linear":
        fp8.FORMS[type(module)] = finding.form
