"""What Hopper's kernels of the routed experts have: wgmma, TMA, warps that do one thing each."""
