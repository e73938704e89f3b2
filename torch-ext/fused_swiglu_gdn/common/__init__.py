"""Triton that portable and hopper share: device functions, and kernels that both put to use."""
