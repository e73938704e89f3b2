"""Layers that `kernels` and transformers look up by name; they contain forwards alone.

layer_mapping() of the package maps the names that modules of models carry to these layers.

Example:
    >>> layers.SwiGLUMLP.has_backward, layers.SwiGLUMLP.can_torch_compile
    (True, True)
    >>> "Qwen3_5GatedDeltaNet" in layers.__all__
    True

The files by what they are for:

- forwards: swiglu, norm, attention, latent_attention, decoder, gdn and kda (with delta, replay),
  lora, fp8/; what they share: forward, projections, few_tokens, activations, tensor_parallel
- under the names of others: functions, hub
- whether a module is still what was recognised: plain, pinned, pins, own_code, own_classes
"""

from .delta import FusedRMSNormGated
from .functions import (
    causal_conv1d_fn,
    causal_conv1d_update,
    chunk_gated_delta_rule,
    chunk_kimi_delta_attention,
    recurrent_gated_delta_rule,
    recurrent_kimi_delta_attention,
)
from .gdn import OlmoHybridGatedDeltaNet, Qwen3_5GatedDeltaNet, Qwen3NextGatedDeltaNet
from .hub import (
    ForCausalLMLoss,
    RMSNorm,
    RMSNormZeroCentered,
    SoftmaxTopKRouter,
    rotary_pos_emb,
)
from .swiglu import SwiGLUGateUp, SwiGLUGateUpLayout, SwiGLUMLP

__all__ = [
    "ForCausalLMLoss",
    "FusedRMSNormGated",
    "OlmoHybridGatedDeltaNet",
    "Qwen3NextGatedDeltaNet",
    "Qwen3_5GatedDeltaNet",
    "RMSNorm",
    "RMSNormZeroCentered",
    "SoftmaxTopKRouter",
    "SwiGLUGateUp",
    "SwiGLUGateUpLayout",
    "SwiGLUMLP",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "chunk_kimi_delta_attention",
    "recurrent_gated_delta_rule",
    "recurrent_kimi_delta_attention",
    "rotary_pos_emb",
]


def __dir__():
    """The names that kernels and transformers look up; the modules behind them may change."""
    return [*__all__, "__all__", "__doc__", "__file__", "__name__"]
