"""The gated delta rule: prompts, training, one-token decoding."""
