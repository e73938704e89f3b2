"""The gated delta rule: prefill, training and decoding."""
