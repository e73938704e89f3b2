"""The choice of a token from logits; called by decoding/ alone."""
