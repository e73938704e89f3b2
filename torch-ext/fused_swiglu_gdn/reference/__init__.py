"""Plain torch: the meaning of every operation, and what runs where no kernel does (CPU, MPS)."""
