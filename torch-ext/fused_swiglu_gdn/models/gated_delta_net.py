"""Whether a module is a Gated DeltaNet layer that one of our layers computes the same.

That is certain only if its class's forward, with all that it calls, is transformers' own code, and
gives what our layer gives on a small twin: for a prompt with padding, for tokens after a cache, and
for packed sequences.
"""

import inspect
from types import FunctionType
from typing import Optional, Tuple

from torch import nn

from .. import layers
from ..gdn.checks import MAX_HEAD_DIM
from ..gdn_layer.checks import MAX_TAPS
from ..layers.gated_norm import is_gated_norm
from ..layers.own_code import NotOwn, own_code
from ..layers.plain import why_not_tensor
from .gdn_trial import why_not_same
from .serving import own_class

PARTS = {
    "Qwen3_5GatedDeltaNet": {
        "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d", "norm", "out_proj",
    },
    "Qwen3NextGatedDeltaNet": {"in_proj_qkvz", "in_proj_ba", "conv1d", "norm", "out_proj"},
    "OlmoHybridGatedDeltaNet": {
        "q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj", "o_proj", "o_norm", "conv1d",
    },
}  # fmt: skip


def gated_delta_net(module: nn.Module) -> Tuple[str, Optional[str]]:
    """Our layer for a module that has a convolution and A_log, and why it is left alone or None."""
    for name, parts in PARTS.items():
        if parts == set(module._modules):
            return name, why_not_gated_delta_net(module, name)
    return "GatedDeltaNet", "its parts are not those of a Gated DeltaNet layer known here"


def why_not_gated_delta_net(module: nn.Module, layer: str) -> Optional[str]:
    """The module has the parts of a family, but not its forward, sizes or plain weights."""
    try:
        found = own_code(own_class(module))
    except NotOwn as error:
        return f"its forward {error}"
    reason = _why_other_arguments(found.forward, layer) or _why_not_plain(module)
    is_gated_norm(getattr(module, "norm", None) or module.o_norm)  # while tracing it cannot look
    return reason or why_not_same(found, layer)


def _why_other_arguments(forward: FunctionType, layer: str) -> Optional[str]:
    """The forward of the class takes other arguments than our layer, which knows both names that
    transformers has for the cache."""
    ours = inspect.signature(getattr(layers, layer).forward).parameters
    theirs = inspect.signature(forward).parameters
    names = ["cache_params" if name == "cache" else name for name in theirs]
    defaults = [p.default for p in theirs.values()]
    if names != list(ours) or defaults != [p.default for p in ours.values()]:
        return "its forward takes other arguments"
    return None


def _why_not_plain(module: nn.Module) -> Optional[str]:
    conv = module.conv1d
    tensors = {
        "A_log": module.A_log,
        "dt_bias": module.dt_bias,
        "conv1d.weight": conv.weight,
        "conv1d.bias": conv.bias,
    }
    for name, x in tensors.items():
        reason = why_not_tensor(x)
        if reason is not None:
            return f"{name} {reason}"
    taps = module.conv_kernel_size
    if type(conv) is not nn.Conv1d or conv.weight.shape[1:] != (1, taps):
        return f"conv1d is not a depthwise nn.Conv1d of {taps} taps"
    if not 2 <= taps <= MAX_TAPS:
        return f"its convolution has {taps} taps"
    if module.num_v_heads % module.num_k_heads or len(module.A_log) != module.num_v_heads:
        return "its heads of q, k and v do not match"
    if max(module.head_k_dim, module.head_v_dim) > MAX_HEAD_DIM:
        return f"its head dims are above {MAX_HEAD_DIM}"
    return None
