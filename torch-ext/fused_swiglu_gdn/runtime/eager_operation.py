"""Operations that are called in eager mode alone, without an operator of torch."""

from typing import Callable, Optional

import torch

from . import dispatch
from .cache import fast_path_ok
from .operation import Operation
from .ops import transformed


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
                from .ahead import compiled_together  # not where there is no Triton

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
