"""The gated delta rule in plain torch: its meaning, and what runs where no kernel does."""
