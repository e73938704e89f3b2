"""The gated delta rule in plain torch: the definition, and the fallback."""
