"""Kernels of SwiGLU, experts, Gated DeltaNet, Kimi Delta Attention, norms, attention and losses.

For models, and by themselves. With this package as `kernel`, three calls:

    >>> report = kernel.kernelize(model)  # a model of transformers; print(report) says what it has
    >>> y = kernel.fused_swiglu(x, w_gate, w_up)  # silu(x @ w_gate.T) * (x @ w_up.T)
    >>> o, state = kernel.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)

`kernel.restore(model)` undoes the first. `__all__` is the API of this version; help(kernel.<name>)
has the formula, shapes, errors and an example of each name. On a CPU, and where no kernel supports
a call, plain torch computes the same.
"""

from . import layers
from .attention.api import (
    attention_with_kvcache,
    fused_latent_norm_rope,
    fused_qk_norm_rope,
    latent_attention_with_kvcache,
    sigmoid_gate,
)
from .experts.api import fused_experts
from .experts.api_topk import fused_topk
from .gdn.api import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from .gdn.api_aiter import chunk_gated_delta_rule_opt, chunk_gated_delta_rule_opt_vk
from .gdn.api_replay import advance_ring, make_ring, materialise_ring, replay_gated_delta_rule
from .gdn_layer.api import causal_conv1d_fn, causal_conv1d_update, gated_delta_gate, rms_norm_gated
from .kda.api import chunk_kda, fused_recurrent_kda
from .loss.api import linear_cross_entropy, token_log_probs
from .models import (
    decorate,
    graphed_step,
    kernelize,
    layer_mapping,
    load_mtp,
    register_experts,
    restore,
)
from .norm.api import rms_norm
from .parallel.api import build_cp_context, shard_batch
from .runtime.implementation import implementation_of, use_reference
from .runtime.verify import verify
from .swiglu.api import fused_swiglu, fused_swiglu_mlp, silu_mul
from .swiglu.module import FusedSwiGLU

__version__ = "1"  # of the API, as build.toml has it

__all__ = [
    "FusedSwiGLU",
    "advance_ring",
    "attention_with_kvcache",
    "build_cp_context",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_opt",
    "chunk_gated_delta_rule_opt_vk",
    "chunk_kda",
    "decorate",
    "fused_experts",
    "fused_latent_norm_rope",
    "fused_qk_norm_rope",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_kda",
    "fused_swiglu",
    "fused_swiglu_mlp",
    "fused_topk",
    "gated_delta_gate",
    "graphed_step",
    "implementation_of",
    "kernelize",
    "latent_attention_with_kvcache",
    "layer_mapping",
    "layers",
    "linear_cross_entropy",
    "load_mtp",
    "make_ring",
    "materialise_ring",
    "register_experts",
    "replay_gated_delta_rule",
    "restore",
    "rms_norm",
    "rms_norm_gated",
    "shard_batch",
    "sigmoid_gate",
    "silu_mul",
    "token_log_probs",
    "use_reference",
    "verify",
]


def __dir__():
    """The public names: the modules behind them may change."""
    return [*__all__, "__all__", "__doc__", "__file__", "__name__", "__version__"]
