"""Norm, rotary embedding and gate around attention, and attention of one token over a static
cache."""
