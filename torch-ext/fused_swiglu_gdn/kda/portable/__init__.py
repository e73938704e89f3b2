"""Plain Triton, for NVIDIA GPUs from compute capability 8.0 and for AMD."""
