"""Recognises modules of models and replaces their forwards: directly, or through `kernels`.

`apply` has kernelize. For each module `recognise` asks every kind of modules whether it is one of
theirs, and `serving` gives it our forward. It is one if a trial of its class's forward agrees with
ours. The files by what they are for:

- what a forward may read: trust, facts, code
- trials: trial (what is tried and compared), stand_ins, opaque and handed (stubs), gradients
- kinds of modules: mlp; norm_trial; attention_trial, attention_learning; latent_trial; layer_trial;
  gated_delta_net, kimi_delta_attention, delta_layers, delta_trial, delta_copies; moe_blocks,
  router_trial, router_choice; experts, experts_trial, experts_before; fp8; lora;
  formats
- whole models: loss, fused_loss, mtp; context_attention, context_trial; training_graphs,
  layer_step, layer_call
- for people: report, releases, hub
"""

from ..decoding.graphed_step import graphed_step
from .apply import kernelize, restore
from .experts import register_experts
from .hub import decorate, layer_mapping
from .mtp import load_mtp

__all__ = [
    "decorate", "graphed_step", "kernelize", "layer_mapping", "load_mtp", "register_experts",
    "restore",
]  # fmt: skip
