"""What Hopper has: Gluon kernels with wgmma and TMA."""
