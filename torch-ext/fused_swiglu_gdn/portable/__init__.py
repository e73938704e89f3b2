"""Kernels in plain Triton for any NVIDIA GPU from compute capability 8.0, and for AMD."""
