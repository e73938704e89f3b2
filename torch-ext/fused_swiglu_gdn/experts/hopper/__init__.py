"""Warp-specialised kernels of the routed experts with wgmma and TMA, for Hopper."""
