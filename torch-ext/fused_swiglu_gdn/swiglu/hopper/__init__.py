"""What Hopper and later GPUs have: tensor descriptors, wgmma, TMA."""
