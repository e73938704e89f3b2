"""Layers that `kernels` and transformers look up by name; they contain forwards alone.

layer_mapping() of the package maps the names that modules of models carry to these layers.

Example:
    >>> layers.SwiGLUMLP.has_backward, layers.SwiGLUMLP.can_torch_compile
    (True, True)
    >>> "Qwen3_5GatedDeltaNet" in layers.__all__
    True

kernelize gives a module a forward of ours by a *form*, a NamedTuple of what was recognised: the
class, its pins, guards, and the names of its parts. Each call of that forward asks

1. whether the module is as it was: no function, class or global that its class's forward consists
   of was patched (pins make pinned.Pinned), attributes have their values (guards), and torch itself
   is unpatched (plain.torch_unpatched);
2. of each part, whether calling it is no more than reading its weights: parameters_of in plain,
   parameters_of_norm in norm, weights_of in fp8/, parts_of in lora, shards in tensor_parallel.

Where 1 fails, the class's own forward runs; where 2 fails, the part is called, and what is around
it is ours. The files:

- forwards: swiglu, norm, attention, latent_attention, decoder, gdn and kda (with delta, replay),
  lora, fp8/; what they share: forward, projections, few_tokens, activations, tensor_parallel
- under the names that transformers asks for: functions, hub
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
