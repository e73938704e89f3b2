"""What a module is, told by its parts, and whether one of our layers computes the same.

A module is served only if that is certain: an MLP is the formula by its source and by a trial
(gated_mlp.py); a GDN layer has the parts of a known family and transformers' own forward.
"""

from typing import NamedTuple, Optional

from torch import nn

from .. import layers
from ..layers.swiglu import Form
from .gated_delta_net import gated_delta_net
from .gated_mlp import gated_mlp
from .serving import is_served, why_replaced
from .sharded import why_partitioned


class Finding(NamedTuple):
    layer: str  # the name of our layer, or what the module resembles
    reason: Optional[str] = None  # why it is left alone; None if it is served
    form: Optional[Form] = None  # of an MLP: which of its attributes are what


def recognise(module: nn.Module) -> Optional[Finding]:
    """What our layers can do for a module; None if it is nothing like what they replace."""
    if is_served(module):
        layer = type(module).served_as
        return Finding(layer) if layer in layers.__all__ else None
    parts = set(module._modules)
    mlp = gated_mlp(module)
    if mlp is not None:
        finding = Finding(*mlp)
    elif "conv1d" in parts and "A_log" in module._parameters:
        finding = Finding(*gated_delta_net(module))
    else:
        return None
    reason = why_replaced(module) or why_partitioned(module)
    return finding if reason is None else Finding(finding.layer, reason)
