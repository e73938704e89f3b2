"""`Operation`: what a call means, which kernels compute it, and how torch sees it."""

from typing import Callable, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from . import dispatch
from .cache import ALIKE, CallCache, fast_path_ok
from .call import device_of, tensors_in
from .device import is_gpu
from .ops import (
    PLAIN,
    applying,
    counting,
    last_derivative,
    needs_grad,
    no_second_derivative,
    operator,
    present,
    transformed,
)

# inside a backward: whether its graph stays, for a second one (retain_graph, create_graph)
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph


class Operation(CallCache):
    """One operation: its calls, its torch operator, its kernels, and a function for known calls.

    operation(tensors, options) computes a call of a public function and returns a tensor, or a
    tuple with None for each output that the call does not have.

    family: "room.module". A kernel module `<room>/<folder>/<module>.py` exports
    `prepare_<name>(call)`. It returns a function of the call's tensors, for all calls with the same
    facts (runtime/cache.py), or None if its kernels do not compute the call exactly.
    call: a NamedTuple of tensors, or None, whose last field is `options` (runtime/call.py). Its
    fields are the schema of the operator.
    reference: the module whose function `<name>(*tensors, *options)` is the formula, or a function
    of the call, whose outputs lie as the fake says.
    check(call): takes the options of the public function, raises if an argument is wrong, and
    returns the call with options of its type; for `serving`, None where no kernel shall compute it.
    cast(*tensors): the tensors in autocast's dtype.
    outputs: how many tensors the operator returns; like, fake: their shapes and dtypes, as names
    of fields (`operator`) or as a function of the call.
    written: names of the tensors that are written in place. The public function returns such a
    tensor from its own arguments: among the outputs of a call it may be the tensor, None or, from
    the operator, whose outputs share no memory with its arguments, an empty tensor.
    differentiable(call): False if the reference must compute a call that needs a gradient.
    aligned: names of tensors that kernels read at multiples of 16 bytes alone; the reference
    computes calls with others.
    varying: {name of a tensor: its dimension} of a size that changes from call to call, and is the
    same in all of these tensors. The function that prepare_<name> returns may have an attribute
    `resized`: a function of a call's tensors that differ in this size, and in strides of dimensions
    before it, alone; it returns the function for such calls.
    opaque: the reference cannot be traced, so that tracing always sees the operator.
    train: the Operation of the same calls with a gradient, whose first output is the result.
    schema: the operator's name, if it is not `name`; None: there is no operator, for the reference
    calls other operations.
    """

    def __init__(
        self, family: str, name: str, call: type, reference, *, check: Optional[Callable] = None,
        cast: Optional[Callable] = None, outputs: int = 1, like: tuple = (), written: tuple = (),
        fake: Optional[Callable] = None, differentiable: Optional[Callable] = None,
        aligned: tuple = (), varying: Optional[dict] = None, opaque: bool = False,
        train: Optional["Operation"] = None, schema: Optional[str] = "",
    ):  # fmt: skip
        super().__init__(alike=4 if varying else ALIKE)  # lengths are met once
        self.refused = CallCache()  # calls of `serving` that are known to gain nothing
        self.sizes: Optional[CallCache] = None  # of `resized`
        if varying:
            self.sizes = CallCache({call._fields.index(x): dim for x, dim in varying.items()})
        self.family, self.name, self.kind, self.module = family, name, call, reference
        self.check = check or (lambda call: call)
        self.cast, self.differentiable, self.opaque = cast, differentiable, opaque
        self.count = len(call._fields) - 1
        self.places = [call._fields.index(x) for x in written]
        self.aligned = [call._fields.index(x) for x in aligned]
        self.train, self.gradient, self.last, self.op = train, None, "", None
        if schema is not None:
            self._register(schema or name, written, like, outputs, fake)

    def _register(self, name: str, written, like, outputs: int, fake) -> None:
        def body(*fields):
            found = self.launcher(fields)(*fields[: self.count])
            return _apart(found, [fields[i] for i in self.places]) if self.places else found

        returned = Tensor if outputs == 1 else Tuple[(Tensor,) * outputs] if outputs else None
        body.__annotations__ = {"fields": self.kind, "return": returned}
        self.op = operator(name, mutates_args=written, like=like)(body)
        if fake is not None or not outputs:
            self.op.register_fake(_presenting(fake, self.kind, outputs))

    def register_gradient(
        self, save: Callable, backward: Callable, by: "Operation", function: str = ""
    ) -> None:
        """Registers the gradient, as torch.library takes it; `by`: the Operation that computes it.

        In eager calls ctx.needs_input_grad has two elements more than the operator has arguments.
        function: the public function, whose second derivative is refused.
        """
        self.gradient = (by.family, by.name)
        self.op.register_autograd(backward, setup_context=save)
        if by.places:
            by.last = function
        elif function:
            no_second_derivative(by.op, function)

    def __call__(self, tensors: tuple, options: tuple = ()):
        """The operation on the arguments of a public function."""
        run = self.find(tensors, options, True)
        return self._first(tensors, options) if run is None else run(*tensors)

    def serving(self, tensors: tuple, options: tuple) -> Optional[Callable]:
        """A function of the tensors by kernels, or None where nothing is gained by them.

        For layers, which have another way to compute the same.
        """
        run = self.find(tensors, options, True)
        if run is not None:
            return run
        if self.refused.find(tensors, options, True):
            return None
        call = self.check(self.kind(*tensors, options))
        if call is not None:
            if torch.compiler.is_compiling():
                traced = self._has_kernels(call, False)
                return (lambda *tensors: self.op(*tensors, *call.options)) if traced else None
            run = self._by_kernels(call)
        if fast_path_ok():
            if run is not None:
                self.keep(tensors, options, run)
            elif _by_facts(tensors):
                self.refused.keep(tensors, options, True)
        return run

    def cache_clear(self) -> None:
        super().cache_clear()
        self.refused.cache_clear()
        if self.sizes is not None:
            self.sizes.cache_clear()

    def _resized(self, tensors: tuple, options: tuple) -> Optional[Callable]:
        """A function for calls that differ from known ones in sizes that vary alone, or None."""
        resized = self.sizes.find(tensors, options, True)
        return None if resized is None else self.keep(tensors, options, resized(*tensors))

    def _first(self, tensors: tuple, options: tuple):
        run = None if self.sizes is None else self._resized(tensors, options)
        if run is not None:
            return run(*tensors)
        given = tensors if self.cast is None else self.cast(*tensors)
        call = self.check(self.kind(*given, options))
        if torch.compiler.is_compiling():
            return self._traced(call)
        run = bound = self._bind(call)
        if any([a is not b for a, b in zip(given, tensors)]):
            run = self._casting(bound)
        if fast_path_ok() and is_gpu(call.device):  # on a CPU checks may read values
            self.keep(tensors, options, run)
            if self.sizes is not None:
                self.sizes.keep(tensors, options, getattr(run, "resized", None))
        return bound(*given)

    def _casting(self, run: Callable) -> Callable:
        return lambda *tensors: run(*self.cast(*tensors))

    def _traced(self, call):
        grad = needs_grad(call)
        if grad and self.train is not None:
            if self.train._has_kernels(call, grad):
                return self.train.op(*tensors_in(call), *call.options)[0]
        elif self.opaque or self._has_kernels(call, grad):
            return self.op(*tensors_in(call), *call.options)
        return self._reference(call)

    def _has_kernels(self, call, grad: bool) -> bool:
        """True while tracing, if the operator and not the reference is traced."""
        if grad and not self._has_gradient(call):
            return False
        family, name = self.gradient if grad else (self.family, self.name)
        where = device_of(call)
        return dispatch.has_kernels(family, name, where.type, where.index)

    def _has_gradient(self, call) -> bool:
        if self.gradient is None:
            return False
        return self.differentiable is None or self.differentiable(call)

    def _reference(self, call, **more):
        if callable(self.module):
            return self.module(call, **more)
        return getattr(self.module, self.name)(*tensors_in(call), *call.options)

    def _bind(self, call) -> Callable:
        """A function of the tensors of all calls like this one."""
        run, kind, options = self._by_kernels(call), self.kind, call.options
        return run or (lambda *tensors: self._reference(kind(*tensors, options)))

    def _by_kernels(self, call) -> Optional[Callable]:
        (*tensors, options), grad = call, needs_grad(call)
        if grad and self.train is not None:
            return _first_of(self.train._by_kernels(call))
        there = [x for x in tensors if x is not None]
        # torch's transforms have no rule for kernels, which see no sign that is kept aside either
        if transformed() or any([x.is_neg() for x in there]):
            return None
        if grad and not self._has_gradient(call):
            dispatch.recorded(self.name, "reference")
            return None
        launch = self._prepared(call, self.gradient if grad else None)
        if launch is None:
            return None
        plain = all([type(x) in PLAIN for x in there])
        if not plain or self.op is not None and torch._C._len_torch_dispatch_stack():
            return self.op and (lambda *tensors: self.op(*tensors, *options))
        if grad:
            return self._with_gradient(launch, options, there)
        return self.noticed(launch, tensors)

    def noticed(self, launch: Callable, tensors: Sequence) -> Callable:
        """launch, with autograd's notice of those of the tensors that it writes."""
        places = [i for i in self.places if tensors[i] is not None]
        places = [i for i in places if not tensors[i].is_inference()]
        return counting(launch, places) if places else launch

    def _with_gradient(self, launch: Callable, options: tuple, there: list) -> Callable:
        apply = applying(self.op.function, there)
        more = (*options, self.count, launch)
        return lambda *tensors: apply(*tensors, *more)

    def in_gradient(self, tensors: tuple, options: tuple = ()):
        """The operation, as the gradient of another one, of tensors that autograd gives it."""
        if self.places and keeps_graph():
            tensors = self.spared(tensors)
        if not torch.is_grad_enabled():  # else a second derivative is asked for
            run = self.find(tensors, (None, *options), True)
            if run is not None:
                found = run(*tensors)
                return self._written(found, tensors) if self.places else found
        elif self.last:
            with torch.no_grad():
                found = self.in_gradient(tensors, options)
            return last_derivative(self.last, tensors, found)
        return self.op(*tensors, *options)

    def spared(self, tensors: tuple) -> tuple:
        """The tensors, with copies of those that are written: for a gradient that may be asked for
        once more, of the same forward."""
        copies = {i: tensors[i].clone() for i in self.places if tensors[i] is not None}
        return tuple([copies.get(i, x) for i, x in enumerate(tensors)])

    def _written(self, found, tensors: tuple):
        """The outputs apart from what was written in place, of which autograd takes notice."""
        written = [x for x in map(tensors.__getitem__, self.places) if x is not None]
        increment_version(written)
        return _apart(found, written)

    def launcher(self, fields: tuple) -> Callable:
        """A function of the tensors of an operator's arguments: its body.

        Autograd is above it, so the reference may compute it, too. Outputs are contiguous then, as
        the fake promises.
        """
        tensors, options = fields[: self.count], fields[self.count :]
        options = (None, *[tuple(x) if isinstance(x, list) else x for x in options])
        run = self.find(tensors, options, True)
        if run is None:
            call = self.kind.of(fields)
            plain = all([x is None or type(x) in PLAIN for x in tensors])
            run = (plain and self._prepared(call)) or self._contiguous(call.options)
            if fast_path_ok():
                self.keep(tensors, options, run)
        return run

    def _prepared(self, call, gradient: Optional[Tuple[str, str]] = None) -> Optional[Callable]:
        """A function of the call's tensors by kernels, or None."""
        launch = dispatch.prepare(self.family, self.name, call, gradient)
        if launch is None or not self.aligned:
            return launch
        return self._if_aligned(launch, self._contiguous(call.options))

    def _if_aligned(self, launch: Callable, by_reference: Callable) -> Callable:
        places, resized = self.aligned, getattr(launch, "resized", None)

        def run(*tensors, **more):
            for place in places:
                if tensors[place].data_ptr() & 15:
                    return by_reference(*tensors, **more)
            return launch(*tensors, **more)

        if resized is not None:
            run.resized = lambda *tensors: self._if_aligned(resized(*tensors), by_reference)
        return run

    def _contiguous(self, options: tuple) -> Callable:
        def run(*tensors, **more):
            out = self._reference(self.kind(*tensors, options), **more)
            if callable(self.module):
                return out
            if isinstance(out, Tensor):
                return out.contiguous()
            return tuple([x if x is None else x.contiguous() for x in out])

        return run


def _by_facts(tensors: tuple) -> bool:
    """True if a refusal of these tensors follows from facts of the call (runtime/cache.py).

    Kernels may also refuse tensors that do not begin at a multiple of 16 bytes.
    """
    there = [x for x in tensors if x is not None]
    if torch.compiler.is_compiling() or transformed():
        return False
    if not is_gpu(there[0].device) or not all([type(x) in PLAIN for x in there]):
        return False
    return not any([x.data_ptr() & 15 for x in there])


def _presenting(fake: Optional[Callable], kind: type, outputs: int) -> Callable:
    """A fake of an operator's arguments from one of a call, which returns None where nothing is."""

    def run(*fields):
        if not outputs:
            return None
        out = fake(kind.of(fields))
        if outputs == 1:
            return present(out, fields[0])
        return tuple([present(x, fields[0]) for x in out])

    return run


def _apart(found, written: list):
    """The outputs, with None in place of tensors that were written."""
    if isinstance(found, tuple):
        return tuple([_apart(x, written) for x in found])
    return None if any([found is x for x in written]) else found


def _first_of(run: Optional[Callable]) -> Optional[Callable]:
    return None if run is None else lambda *tensors: run(*tensors)[0]
