"""The parts of a Gated DeltaNet layer around its rule: convolution, gates, norm."""
