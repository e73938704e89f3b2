"""Names of activations: the ones that each function takes, and their aliases."""

SAME = {"swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # transformers' second names


def _spelled(*names: str) -> tuple:
    return (*names, *(alias for alias, name in SAME.items() if name in names))


BY_KERNELS = ("silu", "gelu_tanh", "relu")
BY_TORCH = ("gelu",)  # by erf, for which there is no kernel
OF_SWIGLU = _spelled(*BY_KERNELS, *BY_TORCH)
OF_EXPERTS = (*_spelled(*BY_KERNELS), "swigluoai")
OF_CONVOLUTION = (None, *_spelled("silu"))
OF_GATED_NORM = _spelled("silu", "sigmoid")
