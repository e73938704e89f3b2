"""RMSNorm with the rounding of transformers' models, and with the residual added."""
