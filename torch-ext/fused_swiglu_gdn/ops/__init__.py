"""Registered operators: schema, fake, autograd; and the way round them in eager mode."""
