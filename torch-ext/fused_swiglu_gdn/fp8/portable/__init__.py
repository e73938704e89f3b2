"""Plain Triton, for NVIDIA GPUs from compute capability 8.9."""
