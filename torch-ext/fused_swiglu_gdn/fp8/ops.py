"""Dispatch of quantisation and products in FP8. Forward only, in eager mode only: no operator of
torch."""

from typing import Callable, Optional

from ..runtime import dispatch
from . import reference

QUANTISE = ("fp8.quantise", "quantise_fwd")
NORM = ("fp8.norm", "norm_quantise_fwd")
GATE = ("fp8.quantise", "silu_mul_quantise_fwd")
MULTIPLY = ("fp8.multiply", "multiply_fwd")
FEW = ("fp8.few", "few_fwd")
FEW_MLP = ("fp8.few", "few_mlp_fwd")


def chosen(family: str, operation: str, *tensors) -> Optional[Callable]:
    """Returns the implementation of an operation on these tensors; None if the module should be
    called.

    The product is chosen by its weight and scale, before anything is launched.
    """
    launch = dispatch.choose(family, operation, False, tensors)
    if launch is None and dispatch.forced == "reference":
        return getattr(reference, operation)
    return launch


def plan(family: str, operation: str, *args) -> Optional[Callable]:
    """A plan of all calls like this one, from their tensors, or None."""
    return dispatch.plan(family, operation, False, args)


def planned(family: str, operation: str, *tensors) -> Optional[Callable]:
    """Returns the launcher of all calls like this one, which takes their tensors, or None."""
    found = plan(family, operation, *tensors)
    return chosen(family, operation, *tensors) if found is None else found
