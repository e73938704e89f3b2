"""Quantisation and products in FP8 as operations of layers."""

from typing import Callable, Optional

from ..runtime import dispatch
from ..runtime.operation import Operation
from ..runtime.ops import transformed
from . import reference
from .call import (
    Dequantise,
    Few,
    FewMlp,
    NormQuantise,
    Product,
    Quantise,
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
        return run

    def _by_kernels(self, call) -> Optional[Callable]:
        launch = None if transformed() else self._prepared(call)
        return launch and self.noticed(launch, call.tensors)


MULTIPLY = ("fp8.multiply", "multiply_fwd")
QUANTISE = EagerOperation("fp8.quantise", "quantise_fwd", Quantise, reference)
GATE = EagerOperation("fp8.quantise", "silu_mul_quantise_fwd", SiluMulQuantise, reference)
NORM = EagerOperation("fp8.norm", "norm_quantise_fwd", NormQuantise, reference)
PRODUCT = EagerOperation(*MULTIPLY, Product, reference)
DEQUANTISE = EagerOperation("fp8.dequantise", "dequantise_fwd", Dequantise, reference)
FEW = EagerOperation("fp8.few", "few_fwd", Few, reference)
QUANTISE_FEW = EagerOperation("fp8.few", "quantise_few_fwd", QuantiseFew, reference)
FEW_MLP = EagerOperation("fp8.few", "few_mlp_fwd", FewMlp, reference)
