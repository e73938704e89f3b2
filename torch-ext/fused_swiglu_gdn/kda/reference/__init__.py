"""Kimi Delta Attention in plain torch: its meaning, and what runs where no kernel does."""
