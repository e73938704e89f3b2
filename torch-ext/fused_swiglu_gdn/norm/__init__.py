"""RMSNorm as transformers' models round it, with the residual added."""
