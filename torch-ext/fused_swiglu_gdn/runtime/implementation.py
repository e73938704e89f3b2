"""Reports the implementation that computes a call, and replaces it by plain torch."""

import contextlib
from typing import Callable, Iterator

from . import dispatch


def implementation_of(function: Callable, *args, **kwargs) -> str:
    """Runs function(*args, **kwargs), a function of this package, and names its implementation.

    Args:
        function: one of this package, such as fused_swiglu.
        args, kwargs: its arguments.

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


@contextlib.contextmanager
def use_reference() -> Iterator[None]:
    """Has the reference implementations, in plain torch, compute all calls inside, on any device.

    With it, `kernelize` and the model that it serves can be tried without a GPU: the report lists
    the modules that kernels would serve on one, and their forwards compute the same formulas. It is
    for trying and comparing: the references are written to be read, not to be fast. It applies to
    all threads of the process, but not to what `torch.compile` has compiled. After it, modules
    that were served inside compute as they do on their device: on a CPU by their own forwards.

    Returns:
        A context manager.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=48,
        ...                      num_hidden_layers=2, num_attention_heads=2)
        >>> model = LlamaForCausalLM(config).eval()
        >>> ids = torch.tensor([[3, 1, 4, 1, 5]])
        >>> before = model(ids).logits
        >>> with use_reference():
        ...     report = kernelize(model)
        ...     after = model(ids).logits
        >>> len(report.served), len(report.left)
        (12, 0)
        >>> torch.allclose(before, after, atol=1e-5)
        True
    """
    with dispatch.force("reference"):
        yield
