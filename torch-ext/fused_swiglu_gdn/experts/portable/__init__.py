"""Kernels of the routed experts, in Triton for every GPU."""
