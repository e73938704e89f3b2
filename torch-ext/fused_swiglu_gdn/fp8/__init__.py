"""FP8 with a scale for each 128 columns of a token and each 128 x 128 values of a weight."""
