"""Kernels that need tensor descriptors, wgmma or TMA, for Hopper and later GPUs."""
