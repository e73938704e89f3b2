"""Low-rank adapters (LoRA) of projections that share their input, in few launches."""
