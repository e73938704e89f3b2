"""Triton kernels that portable/ and hopper/ share, so that neither imports the other."""
