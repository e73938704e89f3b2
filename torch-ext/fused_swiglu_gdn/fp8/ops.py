"""Quantisation and products in FP8 as operations of layers; not part of the API."""

from typing import Callable, Optional, Sequence

import torch
from torch import Tensor

from ..projection.call import MAX_WEIGHTS
from ..runtime import dispatch
from ..runtime.cache import fast_path_ok
from ..runtime.operation import Operation
from ..runtime.ops import transformed
from . import call as calls
from . import reference


class EagerOperation(Operation):
    """An operation for layers, which call it in eager mode and where no gradient is needed.

    There is no operator of torch. A call gives None where the module should be called instead; if
    the reference is forced, that computes it.
    together: several kernels compute a call, and no other operation reads what they write; a first
    call compiles them in threads. A prepared function may have an attribute of this name instead.
    """

    def __init__(
        self, family: str, name: str, call: type, reference, together: bool = False, **more
    ):
        super().__init__(family, name, call, reference, schema=None, **more)
        self.together = together

    def __call__(self, tensors: tuple, options: tuple = ()):
        run = self.find(tensors, options, True)
        if run is None and self.sizes is not None:
            run = self._resized(tensors, options)
        if run is None:
            run = self.serving(tensors, options)
            together = self.together or getattr(run, "together", False)
            if run is not None and together and tensors[0].is_cuda:
                from ..runtime.ahead import compiled_together  # not where there is no Triton

                with compiled_together():
                    return run(*tensors)
        return None if run is None else run(*tensors)

    def serving(self, tensors: tuple, options: tuple = ()) -> Optional[Callable]:
        """A function of the tensors, or None where the module should be called."""
        run = super().serving(tensors, options)
        if run is not None and self.sizes is not None and fast_path_ok():
            self.sizes.keep(tensors, options, getattr(run, "resized", None))
        if run is None and dispatch.forced == "reference":
            function = getattr(self.module, self.name)
            return lambda *given: function(*given, *options)
        if run is None and tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
            self.refused.cache_clear()  # what cannot be tried while a graph is captured may serve
        return run

    def _by_kernels(self, call) -> Optional[Callable]:
        # kernels see no sign that torch keeps aside
        if transformed() or any([x is not None and x.is_neg() for x in call.tensors]):
            return None
        launch = self._prepared(call)
        return launch and self.noticed(launch, call.tensors)


MULTIPLY = ("fp8.multiply", "multiply_fwd")
QUANTISE = EagerOperation("fp8.quantise", "quantise_fwd", calls.Quantise, reference)
SILU_MUL_QUANTISE = EagerOperation(
    "fp8.quantise", "silu_mul_quantise_fwd", calls.SiluMulQuantise, reference
)
NORM_QUANTISE = EagerOperation("fp8.norm", "norm_quantise_fwd", calls.NormQuantise, reference)
PRODUCT = EagerOperation(*MULTIPLY, calls.Product, reference)
DEQUANTISE = EagerOperation("fp8.dequantise", "dequantise_fwd", calls.Dequantise, reference)
PRODUCTS = EagerOperation("fp8.products", "products_fwd", calls.Products, reference)
MLP = EagerOperation("fp8.products", "mlp_fwd", calls.Mlp, reference)
ABSENT = (None,) * MAX_WEIGHTS


def multiplies(weight: Tensor, scale: Tensor, M: int) -> bool:
    """True if products() computes M tokens by a weight that begins at a multiple of 16 bytes."""
    if M > calls.MOST or dispatch.forced is not None:
        return PRODUCT.serving((weight, scale)) is not None
    if weight.dtype is not torch.float8_e4m3fn or weight.device != scale.device:
        return False
    fits = scale.shape == (calls.blocks_of(weight.shape[0]), calls.blocks_of(weight.shape[1]))
    return fits and weight.is_contiguous() and scale.is_contiguous()


def products(
    lead: tuple,
    weights: tuple,
    scales: tuple,
    x: Optional[Tensor] = None,
    codes: Optional[calls.Quantised] = None,
    plain: tuple = (),
) -> Optional[Sequence[Tensor]]:
    """The products of tokens of the shape `lead` with each of the weights, [*lead, N_i] bf16, and
    behind them those of x with weights in bf16. codes: x in FP8, if that is known. None where
    nothing computes it. All weights begin at multiples of 16 bytes."""
    absent, missing = ABSENT[len(weights) :], (None,) * (calls.MAX_PLAIN - len(plain))
    if len(weights) > MAX_WEIGHTS or len(plain) > calls.MAX_PLAIN:
        return None
    given = (x, None, None) if codes is None else (x if plain else None, *codes)
    return PRODUCTS((*weights, *absent, *scales, *absent, *given, *plain, *missing), (lead,))
