"""Reports the implementation that computes a call."""

from typing import Callable

from . import dispatch


def implementation_of(function: Callable, *args, **kwargs) -> str:
    """Runs function(*args, **kwargs), a function of this package, and names its implementation.

    Returns:
        "hopper": kernels for Hopper GPUs (compute capability 9.0);
        "tma": those of them that need no more than tensor descriptors, on later GPUs;
        "portable": kernels for all GPUs; "reference": plain torch.
        Several, joined by "+", if they shared the call.

    Raises:
        TypeError: function cannot be called; and whatever it raises itself.

    Example:
        >>> x, w = torch.randn(3, 8), torch.randn(16, 8)
        >>> implementation_of(fused_swiglu, x, w, w)  # tensors on a CPU
        'reference'
    """
    if not callable(function):
        raise TypeError(
            "function must be a function of this package, such as fused_swiglu, "
            f"got {type(function).__name__}"
        )
    with dispatch.served() as record:
        function(*args, **kwargs)
    names = sorted({name for names in record.values() for name in names})
    return "+".join(names) if names else "reference"
