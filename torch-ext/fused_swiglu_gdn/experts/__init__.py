"""Routed experts of a mixture of experts: a SwiGLU for every token and chosen expert."""
