"""Triton kernels for NVIDIA GPUs from compute capability 8.0 on and for AMD GPUs."""
