"""Kernels that use what Hopper and later GPUs have: tensor descriptors, wgmma, TMA."""
