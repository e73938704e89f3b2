"""What Hopper GPUs (compute capability 9.0) alone have: torch's product of FP8 blocks."""
