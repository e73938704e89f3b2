"""What a module is, told by its parts, and whether one of our layers computes the same.

A module is served only if that is certain: MLPs, norms, attention and decoder layers are a known
form by their source and by a trial; a GDN layer has the parts of a known family and transformers'
own forward.
"""

from typing import Callable, NamedTuple, Optional, Union

from torch import nn

from .. import layers
from ..layers import attention, decoder, norm, swiglu
from .attention_trial import attention_form, is_attention
from .gated_delta_net import gated_delta_net
from .layer_trial import is_decoder_layer, layer_form
from .mlp import gated_mlp
from .norm_trial import is_norm, norm_form
from .serving import is_served, own_class, why_replaced
from .sharded import why_partitioned

Form = Union[swiglu.Form, norm.NormForm, attention.AttentionForm, decoder.LayerForm]
# what kernelize can be asked for: `only` and `skip`
KINDS = ("mlp", "gdn", "norm", "attention", "layer", "experts")
# by kind: whether a module may be one, its form or why it has none, and the name of ours
_BY_TRIAL = (
    ("norm", is_norm, norm_form, "RMSNorm"),
    ("attention", is_attention, attention_form, "Attention"),
    ("layer", is_decoder_layer, layer_form, "DecoderLayer"),
)
_FORWARDS = {
    "mlp": swiglu.forward_of, "norm": norm.forward_of, "attention": attention.forward_of,
    "layer": decoder.forward_of,
}  # fmt: skip


class Finding(NamedTuple):
    kind: str  # of KINDS
    layer: str  # the name of our layer, or what the module resembles
    reason: Optional[str] = None  # why it is left alone; None if it is served
    form: Optional[Form] = None  # which of its attributes are what; not of a GDN layer

    @property
    def forward(self) -> Callable:
        """Ours, for the module."""
        if self.kind == "gdn":
            return getattr(layers, self.layer).forward
        return _FORWARDS[self.kind](self.form)


def recognise(module: nn.Module) -> Optional[Finding]:
    """What our layers can do for a module; None if it is nothing like what they replace."""
    finding = _found(module)
    if finding is None or is_served(module):
        return finding
    reason = why_replaced(module) or why_partitioned(module)
    return finding if reason is None else finding._replace(reason=reason)


def _found(module: nn.Module) -> Optional[Finding]:
    try:
        mlp = gated_mlp(module)
    except Exception as error:  # a module of a kind never seen must not stop the others
        return Finding("mlp", "SwiGLUMLP", f"its probe raises {type(error).__name__}")
    if mlp is not None:
        return Finding("mlp", *mlp)
    if "conv1d" in module._modules and "A_log" in module._parameters:
        return Finding("gdn", *gated_delta_net(module))
    for kind, may_be, form_of, layer in _BY_TRIAL:
        if may_be(module):
            try:
                form = form_of(module)
            except Exception as error:  # a module of a kind never seen must not stop the others
                form = f"its trial raises {type(error).__name__}"
            if isinstance(form, str):
                return Finding(kind, layer, form)
            return Finding(kind, layer, None, form)
    return None


def remember(module: nn.Module, finding: Finding) -> None:
    """Lets others know the form of a served module: forwards that `kernels` binds, and attention
    modules and layers, which read the weights of their norms."""
    if finding.kind == "mlp":
        swiglu.FORMS[type(module)] = finding.form
    elif finding.kind == "norm":
        norm.FORMS[type(module)] = finding.form
    elif finding.kind in ("attention", "layer"):
        for part in filter(is_norm, module._modules.values()):
            form = norm_form(part)
            if not isinstance(form, str):
                norm.FORMS[own_class(part)] = form
