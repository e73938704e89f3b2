"""What surrounds the rule in a Gated DeltaNet layer: convolution, gates, norm, projections."""
