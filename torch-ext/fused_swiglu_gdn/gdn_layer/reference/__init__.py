"""The rest of the layer in plain torch: its meaning, and what runs where no kernel does."""
