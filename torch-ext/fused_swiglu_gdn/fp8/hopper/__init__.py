"""Kernels for Hopper GPUs (compute capability 9.0) alone: torch's product of FP8 blocks."""
