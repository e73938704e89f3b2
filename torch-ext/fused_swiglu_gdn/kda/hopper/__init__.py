"""Gluon kernels with wgmma and TMA, for Hopper."""
