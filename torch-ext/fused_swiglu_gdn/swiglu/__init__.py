"""SwiGLU: both projections and the gate, up to the whole MLP, forward and gradients."""
