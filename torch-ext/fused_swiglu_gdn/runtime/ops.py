"""Registers torch operators; which tensors kernels take."""

import inspect
import math
import typing
from typing import Callable, Iterable, Optional, Tuple

import torch
import torch.autograd.forward_ad as forward_ad
from torch.autograd.graph import increment_version
from torch.library import CustomOpDef

from .._ops import add_op_namespace_prefix

PLAIN = (torch.Tensor, torch.nn.Parameter)
_functorch = torch._C._functorch.peek_interpreter_stack  # None outside vmap, grad, jvp, ...
wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def autocast(*tensors: Optional[torch.Tensor]) -> Tuple[Optional[torch.Tensor], ...]:
    """The tensors in autocast's dtype if autocast is on, else unchanged."""
    first = tensors[0]
    if not isinstance(first, torch.Tensor):
        return tensors
    kind = first.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        x.to(dtype)
        if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64
        else x
        for x in tensors
    )


class Operator(CustomOpDef):
    """A torch operator that eager calls bypass.

    torch.library takes 60 to 130 us of the host for a call with a gradient, an autograd.Function of
    the same two functions takes 10. Tracing, transforms, dispatch modes and tensor subclasses see
    the operator.
    """

    body: Callable  # what the operator does; None stands for an output that is not there
    mutated: tuple = ()  # places of arguments that it changes
    function: Optional[type] = None  # the autograd.Function of an operator with a gradient

    def __call__(self, *args):
        if torch.compiler.is_compiling() or not _unwatched(args):
            return super().__call__(*args)
        if needs_grad(args):
            return super().__call__(*args) if self.function is None else self.run(self.body, *args)
        outputs = self.body(*args)
        for place in self.mutated:
            if args[place] is not None:
                increment_version(args[place])
        return outputs

    def run(self, body: Callable, *args):
        """Runs body(*args), a replacement for the operator's body, with the operator's gradient."""
        return self.function.apply(*args, len(args), body)

    def register_autograd(self, backward: Callable, *, setup_context: Callable) -> None:
        """Registers the gradient with torch and for eager calls."""
        super().register_autograd(backward, setup_context=setup_context)

        def forward(ctx, *args):
            *args, count, body = args
            output = body(*args[:count])
            setup_context(ctx, args, output)
            return output

        run = differentiating(backward, (None, None))
        parts = {"forward": staticmethod(forward), "backward": staticmethod(run)}
        self.function = type(self._name, (torch.autograd.Function,), parts)


def differentiating(backward: Callable, more: tuple = ()) -> Callable:
    """backward(ctx, *gradients) of an autograd.Function whose kernels read the gradients; more:
    what the Function returns behind it."""

    def differentiate(ctx, *gradients):
        if torch.compiler.is_dynamo_compiling() or torch.compiler._is_compiling_flag:
            return (*backward(ctx, *gradients), *more)
        for x in gradients:
            if x is not None and (x._is_zerotensor() or x.is_neg()):
                gradients = tuple(map(_in_memory, gradients))
                break
        # gradients have the precision of the forward, wherever backward() is called
        with torch._C._DisableAutocast():
            return (*backward(ctx, *gradients), *more)

    return differentiate


def differentiating_once(function: str) -> Callable:
    """The same, as a decorator, of a Function without a second derivative: where one is asked for,
    the error names this function."""

    def decorate(backward: Callable) -> Callable:
        run = differentiating(backward)

        def differentiate(ctx, *gradients):
            if not torch.is_grad_enabled():
                return run(ctx, *gradients)
            with torch.no_grad():
                found = run(ctx, *gradients)
            return last_derivative(function, (*ctx.saved_tensors, *gradients), found)

        return differentiate

    return decorate


def applying(function: type, tensors: Iterable[Optional[torch.Tensor]]) -> Callable:
    """function.apply for eager calls like one of these tensors, of an autograd.Function: without
    torch's look for functorch's transforms and for tensors that they left behind, if the call has
    neither."""
    if transformed() or any([x is not None and wrapped(x) for x in tensors]):
        return function.apply
    return super(torch.autograd.Function, function).apply


def _unwatched(args: tuple) -> bool:
    """True if only eager torch sees a call with these arguments and no view has its negative bit
    set.

    Operators take such views materialised.
    """
    if _functorch() is not None or torch._C._len_torch_dispatch_stack():
        return False
    if torch._C._get_tracing_state() is not None:
        return False
    return all([type(x) in PLAIN and not x.is_neg() for x in tensors_of(args)])


def _in_memory(gradient: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """The gradient as a tensor with memory and without the negative bit.

    torch has tensors of zeros without memory, and views whose negation is lazy.
    """
    if gradient is not None and (gradient._is_zerotensor() or gradient.is_neg()):
        return gradient.clone()
    return gradient


def unsigned(tensors: tuple) -> tuple:
    """The tensors, with copies of views whose negative bit is set: kernels do not see that bit."""
    return tuple([x if x is None or not x.is_neg() else x.resolve_neg() for x in tensors])


def operator(name: str, mutates_args: tuple = (), like: tuple = ()):
    """Registers a function as a torch operator.

    like: names of the arguments whose shapes and dtypes the outputs have, if that is all that a
    fake computes. If such an argument is None, so is the output.

    The function's signature is the schema. `*options: Options` or `*fields: Call`, a NamedTuple,
    stands for the fields of that type: all operators of an operation take them in the order of the
    call. An operator returns tensors only, so None among the function's outputs becomes an empty
    tensor. The function may also return nothing.
    """

    def register(function: Callable):
        signature = inspect.signature(function)
        spelled = []
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_POSITIONAL:
                spelled += _fields(parameter.annotation)
            else:
                spelled.append(parameter)

        def prototype():
            pass

        prototype.__signature__ = signature.replace(parameters=spelled)
        schema = torch.library.infer_schema(prototype, mutates_args=mutates_args)
        first = next(i for i, x in enumerate(spelled) if x.annotation is torch.Tensor)

        def presented(*args):
            outputs = function(*args)
            if outputs is None or isinstance(outputs, torch.Tensor):
                nothing = signature.return_annotation is None
                return None if nothing else present(outputs, args[first])
            return tuple([present(x, args[first]) for x in outputs])

        found = torch.library.custom_op(
            add_op_namespace_prefix(name), presented, mutates_args=mutates_args, schema=schema
        )
        found.__class__, found.body = Operator, function
        names = [x.name for x in spelled]
        found.mutated = tuple([i for i, x in enumerate(names) if x in mutates_args])
        if like:
            found.register_fake(_fake([names.index(x) for x in like], first))
        return found

    return register


def _fake(places: list, first: int) -> Callable:
    """The fake of an operator whose outputs are like its arguments at these indices."""

    def fake(*args):
        inputs = [args[place] for place in places]
        outputs = [present(x if x is None else x.new_empty(x.shape), args[first]) for x in inputs]
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    return fake


def _fields(kind: type) -> list:
    """Parameters for the fields of a NamedTuple, nested NamedTuples flattened."""
    found = []
    for name, hint in typing.get_type_hints(kind).items():
        if hasattr(hint, "_fields"):
            found += _fields(hint)
        else:
            kind_of = inspect.Parameter.POSITIONAL_OR_KEYWORD
            found.append(inspect.Parameter(name, kind_of, annotation=hint))
    return found


def tensors_of(args: tuple) -> list:
    """The tensors among arguments, including those in calls and lists."""
    found = []
    for x in args:
        if isinstance(x, torch.Tensor):
            found.append(x)
        elif isinstance(x, (tuple, list)):
            found += tensors_of(x)
    return found


def needs_grad(args: tuple) -> bool:
    return torch.is_grad_enabled() and any([x.requires_grad for x in tensors_of(args)])


def transformed() -> bool:
    """True inside torch.func transforms or forward-mode derivatives, for which no kernel has a
    rule."""
    return _functorch() is not None or forward_ad._current_level >= 0


def contiguous(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy, with the strides of a contiguous tensor of its shape.

    x.contiguous() is x itself where strides mean nothing, in a tensor without elements and in
    dimensions of one, whatever they are; a kernel looks at them all the same.
    """
    x, steps, step = x.contiguous(), [], 1
    for size in reversed(x.shape):
        steps.insert(0, step)
        step *= max(size, 1)
    return x if x.stride() == tuple(steps) else x.as_strided(x.shape, steps)


def dense(x: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """x with its last dimension contiguous, which is all that kernels require of strides."""
    return x if x is None or x.stride(-1) == 1 or x.shape[-1] <= 1 else contiguous(x)


def rows_of(x: torch.Tensor) -> Optional[torch.Tensor]:
    """x [..., K] as a view [M, K] with dense rows, or None if it must be copied first."""
    try:
        rows = x if x.ndim == 2 else x.view(math.prod(x.shape[:-1]), x.shape[-1])
    except RuntimeError:
        return None
    return rows if rows.stride(1) == 1 or rows.shape[1] <= 1 else None


def in_rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., K] as [M, K] with dense rows, a view if possible."""
    rows = rows_of(x)
    return rows_of(contiguous(x)) if rows is None else rows


def present(x, like: torch.Tensor) -> torch.Tensor:
    """x, or an empty tensor for an absent output: operators return tensors only."""
    return like.new_empty(0) if x is None else x


def _refuse_second_derivative(function: str) -> None:
    raise NotImplementedError(
        f"{function} has no second derivative on these kernels: its gradient cannot be "
        "differentiated (create_graph=True, a penalty on gradients)"
    )


def no_second_derivative(op: Callable, function: str) -> None:
    """Makes differentiating `op`, the gradient of a public function, raise a clear error."""
    op.register_autograd(
        lambda ctx, *_: _refuse_second_derivative(function),
        setup_context=lambda ctx, inputs, output: None,
    )


class _Last(torch.autograd.Function):
    """The tensors behind the first `count` as they are; their derivative by those is refused."""

    @staticmethod
    def forward(ctx, function, count, *tensors):
        ctx.function = function
        return tuple([x if x is None else x.view_as(x) for x in tensors[count:]])

    @staticmethod
    def backward(ctx, *_):
        _refuse_second_derivative(ctx.function)


def last_derivative(function: str, tensors: tuple, gradients: tuple) -> tuple:
    """The gradients, computed without autograd of these tensors, of a public function: for an
    operator that writes its arguments, for which torch takes no formula of a gradient."""
    return _Last.apply(function, len(tensors), *tensors, *gradients)


def counting(launch: Callable, places: list) -> Callable:
    """launch, and autograd's notice of the tensors that it writes.

    As after torch's own in-place operations, backward then raises if it has saved such a tensor,
    instead of computing from other values.
    """

    notice = torch._C._increment_version  # what increment_version calls

    def run(*tensors):
        out = launch(*tensors)
        notice([tensors[i] for i in places])
        return out

    return run
