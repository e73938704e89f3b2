"""Triton implementations for every chip."""
