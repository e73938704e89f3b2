"""Every ValueError and TypeError that a caller can meet. Called by functional/ alone."""
