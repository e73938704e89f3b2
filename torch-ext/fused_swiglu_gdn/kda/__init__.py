"""Kimi Delta Attention: the delta rule with a gate for every channel of the keys."""
