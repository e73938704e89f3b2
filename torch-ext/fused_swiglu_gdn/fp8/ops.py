"""Quantisation and products in FP8 as operations of layers; not part of the API."""

from typing import Callable, Optional

import torch
from torch import Tensor

from ..projection.call import MAX_WEIGHTS
from ..runtime import dispatch
from ..runtime.operation import Operation
from ..runtime.ops import transformed
from . import reference
from .call import (
    MAX_PLAIN,
    Dequantise,
    Few,
    FewMlp,
    NormQuantise,
    Product,
    Quantise,
    Quantised,
    QuantiseFew,
    SiluMulQuantise,
)


class EagerOperation(Operation):
    """An operation for layers, which call it in eager mode and where no gradient is needed.

    There is no operator of torch. A call gives None where the module should be called instead; if
    the reference is forced, that computes it.
    together: several kernels compute a call, and no other operation reads what they write; a first
    call compiles them in threads.
    """

    def __init__(
        self, family: str, name: str, call: type, reference, written: tuple = (),
        together: bool = False,
    ):  # fmt: skip
        super().__init__(family, name, call, reference, schema=None, written=written)
        self.together = together

    def __call__(self, tensors: tuple, options: tuple = ()):
        run = self.find(tensors, options, True)
        if run is None:
            run = self.serving(tensors, options)
            if run is not None and self.together and tensors[0].is_cuda:
                from ..runtime.ahead import compiled_together  # not where there is no Triton

                with compiled_together():
                    return run(*tensors)
        return None if run is None else run(*tensors)

    def serving(self, tensors: tuple, options: tuple = ()) -> Optional[Callable]:
        """A function of the tensors, or None where the module should be called."""
        run = super().serving(tensors, options)
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
QUANTISE = EagerOperation("fp8.quantise", "quantise_fwd", Quantise, reference)
SILU_MUL_QUANTISE = EagerOperation(
    "fp8.quantise", "silu_mul_quantise_fwd", SiluMulQuantise, reference
)
NORM_QUANTISE = EagerOperation("fp8.norm", "norm_quantise_fwd", NormQuantise, reference)
PRODUCT = EagerOperation(*MULTIPLY, Product, reference)
DEQUANTISE = EagerOperation("fp8.dequantise", "dequantise_fwd", Dequantise, reference)
FEW = EagerOperation("fp8.few", "few_fwd", Few, reference)
QUANTISE_FEW = EagerOperation("fp8.few", "quantise_few_fwd", QuantiseFew, reference)
FEW_MLP = EagerOperation("fp8.few", "few_mlp_fwd", FewMlp, reference)
_ABSENT = (None,) * MAX_WEIGHTS
_NOTHING = (None,) * (1 + MAX_PLAIN)


def few(
    x: Quantised,
    M: int,
    weights: tuple,
    scales: tuple,
    plain: tuple = (),
    tokens: Optional[Tensor] = None,
) -> Optional[Tensor]:
    """x W^T of the M tokens of x with each of the weights, side by side [M, N] bf16, in one or two
    launches; behind them those of `tokens`, x in bf16, with weights in bf16. None where M is no
    small number or no kernel serves. All weights begin at multiples of 16 bytes."""
    count, others = len(weights), len(plain)
    if count > MAX_WEIGHTS or others > MAX_PLAIN:
        return None
    absent = _ABSENT[count:]
    more = (tokens, *plain, None) if others == 1 else (tokens, *plain) if others else _NOTHING
    return FEW((*x, *weights, *absent, *scales, *absent, *more), (M,))
