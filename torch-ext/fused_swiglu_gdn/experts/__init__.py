"""The routed experts of a mixture of experts: SwiGLU, once for every token and chosen expert."""
