"""Products of a few tokens with the weights of several projections, in one launch."""
