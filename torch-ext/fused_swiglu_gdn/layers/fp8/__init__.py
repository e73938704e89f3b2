"""Layers of FP8 checkpoints: transformers' FP8Linear, and MLPs and output projections of them."""
