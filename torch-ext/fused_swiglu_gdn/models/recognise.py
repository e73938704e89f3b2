"""Recognises a module by its parts, and finds the layer of ours that computes the same.

A module is served only if that is certain: MLPs, norms, attention and decoder layers are a known
form by their source and by a trial; so are GDN and KDA layers, whose rules are transformers' own.
"""

import functools
from types import ModuleType
from typing import Callable, NamedTuple, Optional, Tuple

from torch import nn

from ..attention.ops import FAMILY as ATTENTION
from ..fp8.ops import MULTIPLY
from ..layers import attention, decoder, gdn, kda, latent_attention, lora, norm, swiglu
from ..layers.fp8 import linear as fp8
from ..layers.plain import why_patched
from ..lora.ops import FAMILY as LORA
from ..norm.api import FAMILY as NORM
from . import moe_blocks
from .attention_trial import attention_form, is_attention
from .code import Refused
from .formats import format_of
from .fp8 import fp8_linear, is_fp8_linear
from .gated_delta_net import gated_delta_net
from .kimi_delta_attention import kimi_delta_attention
from .latent_trial import is_latent, latent_form
from .layer_trial import is_decoder_layer, layer_form
from .lora import is_lora, lora_linear
from .mlp import gated_mlp
from .moe_blocks import router_or_block
from .norm_trial import norm_form
from .serving import is_of_transformers, is_served, own_class, serve, why_partitioned, why_replaced


class Kind(NamedTuple):
    """A kind of modules whose forwards are replaced."""

    name: str
    layer: str  # the name of ours
    find: Callable  # (module) -> None, or its layer, reason why it is left alone or None, and form
    home: ModuleType  # has the forward of a form, forward_of(form)
    operation: Optional[Tuple[str, str]] = None  # whose kernels it needs, if find has not asked
    may_be: Optional[Callable] = None  # of a class: some module may be one; None: those with parts
    by_torch: bool = False  # ours is the faster one in plain torch, too


class Finding(NamedTuple):
    kind: str  # of KINDS
    layer: str  # the name of our layer, or what the module resembles
    reason: Optional[str] = None  # why it is left alone; None if it is served
    form: Optional[tuple] = None  # which of its attributes are what
    unknown: bool = False  # the reason is what transformers has made its class


def recognise(module: nn.Module) -> Optional[Finding]:
    """Returns what our layers can do for a module; None if it is nothing like what they replace."""
    own = own_class(module)
    quantised = format_of(own)
    if quantised is not None:
        return Finding(quantised.kind, quantised.layer, quantised.reason)
    for kind, layer, find, *_ in _kinds_of(own, bool(module._modules)):
        try:
            found = find(module)
            if found is None:
                continue
            reason = None
            if not is_served(module):
                reason = why_patched() or why_replaced(module, kind == "linear")
                reason = reason or why_partitioned(module)
        except Exception as error:  # a module of a kind never seen must not stop the others
            found, reason = (layer, f"looking at it raises {type(error).__name__}", None), None
        layer, why, form = found
        unknown = reason is None and why is not None and form is None
        return Finding(kind, layer, reason or why, form, unknown and is_of_transformers(module))
    return None


@functools.lru_cache(maxsize=4096)
def is_nothing(kind: type, with_parts: bool) -> bool:
    """True if no module of the class is replaced or has a row in the report."""
    served = len(kind.__bases__) > 1
    return not served and format_of(kind) is None and not _kinds_of(kind, with_parts)


@functools.lru_cache(maxsize=1024)
def _kinds_of(kind: type, with_parts: bool) -> Tuple[Kind, ...]:
    """The kinds that modules of a class may be of, with parts or without."""
    every = OF_MODULES.values()
    return tuple([k for k in every if (k.may_be(kind) if k.may_be else with_parts)])


def _is_norm(kind: type) -> bool:
    name = kind.__name__.lower()
    return "norm" in name and not ("rmsnorm" in name and "gated" in name)


def _is_not_torchs(kind: type) -> bool:
    return not kind.__module__.startswith("torch.")


def _by_trial(layer: str, form_of: Callable, may_be: Optional[Callable] = None) -> Callable:
    """Finds modules by a function that gives a form, or raises Refused with the reason why not."""

    def find(module: nn.Module) -> Optional[tuple]:
        if may_be is not None and not may_be(module):
            return None
        try:
            return layer, None, form_of(module)
        except Refused as why:
            told = may_be is not None or "rmsnorm" in own_class(module).__name__.lower()
            return (layer, str(why), None) if told else None

    return find


_PLAIN = _by_trial("Attention", attention_form, is_attention)
_LATENT = _by_trial("LatentAttention", latent_form, is_latent)


def _attention(module: nn.Module) -> Optional[tuple]:
    """Attention, and multi-head latent attention."""
    latent = _LATENT(module)
    if latent is not None and latent[2] is not None:
        return latent
    plain = _PLAIN(module)
    return plain if latent is None or plain is not None and plain[2] is not None else latent


_LAYER = _by_trial("DecoderLayer", layer_form, is_decoder_layer)
_NORM = _by_trial("RMSNorm", norm_form)
_SWIGLU, _RMS_NORM = swiglu.SWIGLU, (NORM, "rms_norm_fwd")
_KDA, _GDN = ("kda.chunk", "kda_chunk_fwd"), ("gdn.chunk", "gdn_chunk_fwd")
_ROPE = ATTENTION, "qk_norm_rope_fwd"
OF_MODULES = {
    kind.name: kind
    for kind in (
        Kind("mlp", "SwiGLUMLP", gated_mlp, swiglu, _SWIGLU),
        # before gdn, whose layers have the parts of one that has its gate inside
        Kind("kda", "KimiDeltaAttention", kimi_delta_attention, kda, _KDA),
        Kind("gdn", "GatedDeltaNet", gated_delta_net, gdn, _GDN, by_torch=True),
        Kind("norm", "RMSNorm", _NORM, norm, _RMS_NORM, _is_norm),
        Kind("attention", "Attention", _attention, attention, _ROPE),
        Kind("layer", "DecoderLayer", _LAYER, decoder, _RMS_NORM),
        Kind("linear", "FP8Linear", fp8_linear, fp8, MULTIPLY, is_fp8_linear),
        Kind("lora", lora.LAYER, lora_linear, lora, (LORA, "lora_fwd"), is_lora),
        Kind("experts", "fused_topk", router_or_block, moe_blocks, None, _is_not_torchs),
    )
}
KINDS = (*OF_MODULES, "loss")  # what kernelize can be asked for: `only` and `skip`


def replace(module: nn.Module, finding: Finding, replay: int) -> None:
    """Gives a module the forward of ours that was found for it.

    The form is noted by the module's new class for forwards that `kernels` binds, and for attention
    modules and layers, which read weights of their parts.
    """
    latent = type(finding.form) is latent_attention.LatentForm
    home = latent_attention if latent else OF_MODULES[finding.kind].home
    serve(module, finding.layer, home.forward_of(finding.form), replay)
    if finding.kind in ("mlp", "norm", "linear"):
        home.FORMS[type(module)] = finding.form
