"""Gluon kernels with wgmma, for Hopper."""
