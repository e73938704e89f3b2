"""Decoding with CUDA graphs: in transformers' generate and by hand."""
