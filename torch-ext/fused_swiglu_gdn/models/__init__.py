"""Recognises modules of models and replaces their forwards: directly, or through `kernels`."""

from ..decoding.graphed_step import graphed_step
from .apply import kernelize, restore
from .experts import register_experts
from .hub import decorate, layer_mapping
from .mtp import load_mtp

__all__ = [
    "decorate", "graphed_step", "kernelize", "layer_mapping", "load_mtp", "register_experts",
    "restore",
]  # fmt: skip
