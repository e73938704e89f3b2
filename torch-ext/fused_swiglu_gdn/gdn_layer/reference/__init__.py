"""The parts of the layer around its rule in plain torch: the definition, and the fallback."""
