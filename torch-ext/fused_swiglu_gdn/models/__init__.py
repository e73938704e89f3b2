"""Recognises modules of models and replaces their forwards: directly, or through `kernels`."""

from .apply import kernelize, restore
from .experts import register_experts
from .graphs import graphed_step
from .hub import decorate, layer_mapping

__all__ = ["decorate", "graphed_step", "kernelize", "layer_mapping", "register_experts", "restore"]
